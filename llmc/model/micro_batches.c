// The forward and backward passes of a step on one pipeline stage, in schedule order, and the
// messages to and from the neighboring stages: see gpt.h. Called by train_gpt.c,
// llmc/run/eval_tasks.c and tests.
//
// Each receive is posted one pass early, so that the message arrives while this stage computes. The
// exception is a backward pass directly after the forward pass of the same micro-batch: its
// gradient cannot arrive before that forward pass ends, so its receive is posted only then. A
// receive that is posted too early would block the GPU (llmc/cuda/comm.cu).
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/model/gpt.h"

// --- messages to and from the neighboring stages -------------------------------------------------

static void expect_input(GPT *gpt, const Pass *p) {
    if (!gpt_embeds(gpt, p)) messages_expect(gpt, p);
}

// Waits until the previous content of this pass's gradient buffer has been sent.
static void free_gradient_buffer(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    int newer = (int)(pipeline->sent_back - pipeline->gradient_sent[p->gradient]);
    if (pipeline->to_before) link_sent(pipeline->to_before, newer, gpt->stream);
}

static void receive_forward_send(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    MicroBatch *m = &gpt->slot[p->slot];
    if (!gpt_embeds(gpt, p)) {
        messages_receive(gpt, p);
        m->residual[0] = gpt->input[p->input];
    }
    if (pipeline->to_next) link_sent(pipeline->to_next, (int)(pipeline->sent_ahead - m->sent), gpt->stream);
    gpt_forward(gpt, p);
    if (gpt_heads(gpt, p)) return;
    messages_send(gpt, p);
    m->sent = ++pipeline->sent_ahead;
}

static void receive_backward_send(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    if (gpt_heads(gpt, p)) free_gradient_buffer(gpt, p);
    else messages_receive(gpt, p);
    gpt_backward(gpt, p);
    if (gpt_embeds(gpt, p)) return;
    messages_send(gpt, p);
    pipeline->gradient_sent[p->gradient] = ++pipeline->sent_back;
}

// --- the schedule --------------------------------------------------------------------------------

PassSchedule gpt_schedule(GPT *gpt, int micro_batches, bool training) {
    assert(micro_batches >= 0);
    PipelineShape shape = gpt->stage.shape;
    size_t most = 2 * (size_t)micro_batches * (size_t)shape.chunks;
    PassSchedule s = {.gpt = gpt, .micro_batches = micro_batches, .training = training};
    s.action = xcalloc(most + 1, sizeof *s.action, "the pipeline schedule");
    s.actions = pipeline_actions(shape, micro_batches, training, s.action);
    return s;
}

static Pass pass_at(const PassSchedule *s, int i) {
    const PipelineAction *action = &s->action[i];
    GPT *gpt = s->gpt;
    int gradient = gpt->mesh->pp.size > 1 ? action->gradient : 0;
    if (action->backward) {
        Pass pass = gpt->slot[action->slot].pass;
        pass.direction = BACKWARD;
        pass.gradient = gradient;
        return pass;
    }
    Pass pass = {.B = gpt->B,
                 .T = gpt->T,
                 .direction = FORWARD,
                 .micro_batch = action->micro_batch,
                 .chunk = action->chunk,
                 .slot = action->slot,
                 .input = action->input,
                 .gradient = gradient,
                 .training = s->training,
                 .backward = s->training,
                 .first = action->micro_batch == 0,
                 .last = action->micro_batch == s->micro_batches - 1};
    return pass;
}

static void expect(const PassSchedule *s, int i) {
    Pass pass = pass_at(s, i);
    GPT *gpt = s->gpt;
    if (pass.direction == FORWARD) {
        expect_input(gpt, &pass);
    } else if (!gpt_heads(gpt, &pass)) {
        free_gradient_buffer(gpt, &pass);
        messages_expect(gpt, &pass);
    }
}

bool gpt_next_pass(PassSchedule *s, Pass *pass) {
    int i = s->next++;
    // True if the previous call has posted the receive of this pass (see the top of this file).
    bool posted = i > 0 && i < s->actions && s->action[i].micro_batch != s->action[i - 1].micro_batch;
    if (i < s->actions && !posted) expect(s, i);
    if (i >= s->actions) {
        free(s->action);
        s->action = NULL;
        return false;
    }
    if (i + 1 < s->actions && s->action[i + 1].micro_batch != s->action[i].micro_batch) expect(s, i + 1);
    *pass = pass_at(s, i);
    return true;
}

void gpt_forward_pass(GPT *gpt, const Pass *pass) {
    assert(pass->direction == FORWARD && pass->slot < gpt->slots);
    gpt->slot[pass->slot].pass = *pass;
    timer_start(gpt->timers, TIMER_FORWARD_COMPUTE, gpt->stream);
    receive_forward_send(gpt, pass);
    gpt_head(gpt, pass);
    timer_stop(gpt->timers, TIMER_FORWARD_COMPUTE, gpt->stream);
}

void gpt_backward_pass(GPT *gpt, const Pass *pass) {
    assert(pass->direction == BACKWARD && pass->slot < gpt->slots);
    timer_start(gpt->timers, TIMER_BACKWARD_COMPUTE, gpt->stream);
    receive_backward_send(gpt, pass);
    timer_stop(gpt->timers, TIMER_BACKWARD_COMPUTE, gpt->stream);
    // Starts the copies of the latest --async-save while the device has enough other work queued.
    if (pass->first) zero_copy_staged(gpt->zero);
}

void gpt_stage_forward(GPT *gpt, const Pass *pass) {
    expect_input(gpt, pass);
    receive_forward_send(gpt, pass);
}

// --- warm-up -------------------------------------------------------------------------------------

// Waits until all messages have been sent, because the warm-up overwrites their buffers.
static void free_message_buffers(GPT *gpt) {
    Pipeline *pipeline = &gpt->pipeline;
    if (pipeline->to_next) link_sent(pipeline->to_next, 0, gpt->stream);
    if (pipeline->to_before) link_sent(pipeline->to_before, 0, gpt->stream);
}

bool gpt_needs_warm_up(GPT *gpt, bool training, Pass *pass) {
    bool *warm = training ? &gpt->training_warm : &gpt->evaluation_warm;
    bool new_kernels = training && zero_first_quantized_step(gpt->zero);
    bool needed = gpt->stage.shape.stages > 1 && device_kind()->asynchronous && (!*warm || new_kernels);
    Pass first = {.B = gpt->B, .T = gpt->T, .training = training, .backward = training};
    *warm = true;
    *pass = first;
    return needed;
}

void gpt_warm_up(GPT *gpt, const Pass *loaded) {
    MicroBatch *m = &gpt->slot[0];
    Pass pass = *loaded;
    pass.loss_scale = pass.report_scale = 0.0f;
    free_message_buffers(gpt);
    zero_warm_up(gpt->zero, true);
    fp8_warm_up(gpt, true);
    for (int again = 0; again < 1 + pass.training; again++) {
        pass.first = !again;
        for (pass.chunk = 0; pass.chunk < gpt->stage.shape.chunks; pass.chunk++) {
            size_t bytes = (size_t)gpt_own_rows(gpt, &pass).count * (size_t)gpt->C * sizeof(floatX);
            messages_warm_up(gpt, &pass);
            if (!gpt_embeds(gpt, &pass)) m->residual[0] = gpt->input[0];
            if (!gpt_embeds(gpt, &pass)) set_zero(gpt->stream, gpt->input[0], bytes);
            gpt_forward(gpt, &pass);
            gpt_head(gpt, &pass);
            set_zero(gpt->stream, gpt->dresidual[pass.gradient], bytes);
            if (pass.training) gpt_backward(gpt, &pass);
        }
    }
    fp8_warm_up(gpt, false);
    stream_synchronize(gpt->stream);
    zero_warm_up(gpt->zero, false);
}
