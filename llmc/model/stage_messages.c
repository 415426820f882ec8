// Messages between pipeline stages: see gpt.h. Called by micro_batches.c.
//
// Quantized messages are encoded into and decoded from buffers of their own. Both directions are
// pure functions of the activations and of a key (seed, step, layer, direction, first sample of the
// micro-batch), so they depend neither on timing nor on the number of data-parallel ranks, and a
// resumed run repeats them. The receiver computes with the decoded values in forward and backward,
// also if it recomputes its activations.
#include <assert.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"

ActivationFormat messages_format(const Config *config, PassDirection direction) {
    int bits = direction == FORWARD ? config->activation_quantization_bits_forward
                                    : config->activation_quantization_bits_backward;
    bool plain = !config->quantized_activations || bits == 16;
    ActivationFormat format = {plain ? FLOATX_CODEC : codec_of_bits(bits), config->aq_group_size,
                               (Rounding)config->aq_rounding};
    return format;
}

int64_t messages_bytes(const Config *config, PassDirection direction, int64_t rows) {
    ActivationFormat format = messages_format(config, direction);
    int64_t elements = rows * config->hidden_size;
    if (!codec_grouped(format.codec)) return codec_bytes(format.codec, elements);
    return activations_message(&format, elements, config->verify_wire).bytes;
}

// --- buffers -------------------------------------------------------------------------------------

void messages_describe(GPT *gpt, const Config *config) {
    const Stage *stage = &gpt->stage;
    bool apart = stage->shape.stages > 1, chunked = stage->shape.chunks > 1;
    int64_t elements = tp_rows(&gpt->tp, (int64_t)gpt->B * gpt->T).count * gpt->C;
    int sends[2] = {!stage->heads || chunked ? gpt->slots : 0,
                    !stage->embeds || chunked ? GRADIENT_SLOTS : 0};
    for (int direction = FORWARD; direction <= BACKWARD; direction++) {
        StageMessages *m = &gpt->messages[direction];
        m->format = messages_format(config, (PassDirection)direction);
        m->quantized = apart && codec_grouped(m->format.codec);
        m->sends = sends[direction];
        if (m->quantized) m->layout = activations_message(&m->format, elements, config->verify_wire);
    }
}

void messages_reserve(GPT *gpt, MemoryPlan *plan) {
    const char *group = "pipeline";
    int64_t elements = 0;
    for (int direction = FORWARD; direction <= BACKWARD; direction++) {
        StageMessages *m = &gpt->messages[direction];
        // A stage that sends hidden states receives their gradients, and the other way round.
        bool receives = gpt->messages[direction == FORWARD ? BACKWARD : FORWARD].sends > 0;
        if (!m->quantized) continue;
        elements = m->layout.elements;
        m->out = xcalloc((size_t)m->sends + 1, sizeof *m->out, "the activation table");
        for (int i = 0; i < m->sends; i++) {
            memory_plan_reserve(plan, group, "quantized activations, sent", (size_t)m->layout.bytes,
                                (void **)&m->out[i]);
        }
        for (int i = 0; receives && i < MESSAGES_EXPECTED; i++) {
            memory_plan_reserve(plan, group, "quantized activations, received", (size_t)m->layout.bytes,
                                (void **)&m->in[i]);
        }
    }
    if (elements == 0) return;
    activations_reserve(&gpt->message_scratch, (size_t)elements, group, plan);
}

void messages_start(GPT *gpt) {
    if (!gpt->message_scratch.segment) return;
    Rows own = tp_rows(&gpt->tp, (int64_t)gpt->B * gpt->T);
    Segment segment = activations_segment(own.count * gpt->C, own.first * gpt->C);
    copy_to_device(gpt->stream, gpt->message_scratch.segment, &segment, sizeof segment);
    stream_synchronize(gpt->stream);
}

void messages_free(GPT *gpt) {
    free(gpt->messages[FORWARD].out);
    free(gpt->messages[BACKWARD].out);
}

// --- one message ---------------------------------------------------------------------------------

// Returns the messages of the pass's direction if they are quantized, else NULL.
static StageMessages *quantized(GPT *gpt, const Pass *p) {
    StageMessages *m = &gpt->messages[p->direction];
    return m->quantized && p->training ? m : NULL;
}

static size_t plain_bytes(const GPT *gpt, const Pass *p) {
    return (size_t)gpt_own_rows(gpt, p).count * (size_t)gpt->C * sizeof(floatX);
}

// Describes the pass's input message, or its output message if `sends`. In forward the input enters
// the chunk's first layer; the output enters the layer after its last one.
static StageMessage describe(const GPT *gpt, const Pass *p, bool sends) {
    int stages = gpt->stage.shape.stages, own = gpt->stage.shape.stage;
    bool upper = (p->direction == FORWARD) == sends;  // the message crosses the chunk's upper end
    int other = (own + (upper ? 1 : stages - 1)) % stages;
    int layer = upper ? gpt_layer_number(gpt, gpt_end_layer(gpt, p) - 1) + 1
                      : gpt_layer_number(gpt, gpt_first_layer(gpt, p));
    return (StageMessage){.hop = p->direction == FORWARD ? HOP_ACTIVATIONS : HOP_ACTIVATION_GRADIENTS,
                          .from = sends ? own : other,
                          .to = sends ? other : own,
                          .micro_batch = p->micro_batch,
                          .layer = layer};
}

// Selects the random bits of a message. They do not depend on the layout of the ranks, but on the
// size of a micro-batch, because the key holds only its first sample.
static RoundingKey rounding_key(const GPT *gpt, const Pass *p, const StageMessage *which) {
    uint32_t purpose = p->direction == FORWARD ? PURPOSE_ACTIVATION : PURPOSE_ACTIVATION_GRADIENT;
    uint32_t step = (uint32_t)zero_wire_checks(gpt->zero)->step;
    return (RoundingKey){gpt->seed, step, purpose | (uint32_t)which->layer << 8, (uint32_t)p->first_sample};
}

static void encode(GPT *gpt, const Pass *p, const floatX *x, uint8_t *message) {
    const StageMessages *m = &gpt->messages[p->direction];
    StageMessage which = describe(gpt, p, true);
    activations_encode(&m->format, &m->layout, &gpt->message_scratch, rounding_key(gpt, p, &which), x, 1,
                       message, gpt->stream);
    wire_seal_stage(zero_wire_checks(gpt->zero), &which, &m->layout, message, gpt->stream);
}

static void decode(GPT *gpt, const Pass *p, const StageMessage *which, uint8_t *message, floatX *x) {
    const StageMessages *m = &gpt->messages[p->direction];
    wire_check_stage(zero_wire_checks(gpt->zero), which, &m->layout, message, gpt->stream);
    activations_decode(&m->format, &m->layout, &gpt->message_scratch, message, 1, x, gpt->stream);
}

// Returns where the pass's input is stored, in bf16.
static floatX *input_of(const GPT *gpt, const Pass *p) {
    return p->direction == FORWARD ? gpt->input[p->input] : gpt->dresidual[p->gradient];
}

void messages_expect(GPT *gpt, const Pass *p) {
    Link *link = p->direction == FORWARD ? gpt->pipeline.from_before : gpt->pipeline.from_next;
    StageMessages *m = quantized(gpt, p);
    if (m) {
        uint8_t *message = m->in[m->expected++ % MESSAGES_EXPECTED];
        link_expect(link, message, (size_t)m->layout.bytes, gpt->stream);
    } else {
        link_expect(link, input_of(gpt, p), plain_bytes(gpt, p), gpt->stream);
    }
}

void messages_receive(GPT *gpt, const Pass *p) {
    bool forward = p->direction == FORWARD;
    Timer timer = forward ? TIMER_FORWARD_RECV : TIMER_BACKWARD_RECV;
    StageMessages *m = quantized(gpt, p);
    timer_start(gpt->timers, timer, gpt->stream);
    link_arrived(forward ? gpt->pipeline.from_before : gpt->pipeline.from_next, gpt->stream);
    timer_stop(gpt->timers, timer, gpt->stream);
    if (!m) return;
    assert(m->arrived < m->expected && m->expected - m->arrived <= MESSAGES_EXPECTED);
    StageMessage which = describe(gpt, p, false);
    decode(gpt, p, &which, m->in[m->arrived++ % MESSAGES_EXPECTED], input_of(gpt, p));
}

void messages_send(GPT *gpt, const Pass *p) {
    bool forward = p->direction == FORWARD;
    Link *link = forward ? gpt->pipeline.to_next : gpt->pipeline.to_before;
    const floatX *x = forward ? gpt->slot[p->slot].residual[gpt->stage.layers] : gpt->dresidual[p->gradient];
    StageMessages *m = quantized(gpt, p);
    if (m) {
        uint8_t *message = m->out[forward ? p->slot : p->gradient];
        encode(gpt, p, x, message);
        link_send(link, message, (size_t)m->layout.bytes, gpt->stream);
    } else {
        link_send(link, x, plain_bytes(gpt, p), gpt->stream);
    }
}

void messages_warm_up(GPT *gpt, const Pass *p) {
    for (int direction = FORWARD; direction <= BACKWARD; direction++) {
        Pass pass = *p;
        pass.direction = (PassDirection)direction;
        StageMessages *m = quantized(gpt, &pass);
        floatX *x = gpt->dresidual[0];
        if (!m) continue;
        set_zero(gpt->stream, x, plain_bytes(gpt, &pass));
        // Encodes and decodes the same message, so that its checksum matches.
        uint8_t *message = m->sends ? m->out[0] : m->in[0];
        StageMessage which = describe(gpt, &pass, true);
        encode(gpt, &pass, x, message);
        decode(gpt, &pass, &which, message, x);
    }
}
