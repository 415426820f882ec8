// Micro-batches through a stage of the pipeline, and the messages to its neighbors: see gpt.h. The
// passes themselves are train_gpt.cu's. One stage alone makes them in turn and sends nothing.
//
// What comes from a neighbor is expected one action ahead, so that it travels while this stage
// works on something else. A micro-batch's gradient is not expected while the same micro-batch
// passes: it cannot come before. Why that must not wait on a GPU: llmc/cuda/comm.cu.
#include <stdlib.h>
#include <string.h>

#include "llmc/model/gpt.h"

static size_t hidden_bytes(const GPT *gpt, const Pass *p) {
    return (size_t)gpt_own_rows(gpt, p).count * (size_t)gpt->C * sizeof(floatX);
}

static void expect_input(GPT *gpt, const Pass *p) {
    if (gpt_embeds(gpt, p)) return;
    link_expect(gpt->pipeline.from_before, gpt->input[p->input], hidden_bytes(gpt, p), gpt->stream);
}

// The gradient that lay in this pass's place has left.
static void free_gradient_place(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    int newer = (int)(pipeline->sent_back - pipeline->gradient_sent[p->gradient]);
    if (pipeline->to_before) link_sent(pipeline->to_before, newer, gpt->stream);
}

static void expect_gradient(GPT *gpt, const Pass *p) {
    if (gpt_heads(gpt, p)) return;
    free_gradient_place(gpt, p);
    link_expect(gpt->pipeline.from_next, gpt->dresidual[p->gradient], hidden_bytes(gpt, p), gpt->stream);
}

static void stage_forward(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    MicroBatch *m = &gpt->slot[p->slot];
    if (!gpt_embeds(gpt, p)) {
        link_arrived(pipeline->from_before, gpt->stream);
        m->residual[0] = gpt->input[p->input];
    }
    if (pipeline->to_next) link_sent(pipeline->to_next, (int)(pipeline->sent_ahead - m->sent), gpt->stream);
    gpt_forward(gpt, p);
    if (gpt_heads(gpt, p)) return;
    link_send(pipeline->to_next, m->residual[gpt->stage.layers], hidden_bytes(gpt, p), gpt->stream);
    m->sent = ++pipeline->sent_ahead;
}

static void stage_backward(GPT *gpt, const Pass *p) {
    Pipeline *pipeline = &gpt->pipeline;
    if (gpt_heads(gpt, p)) free_gradient_place(gpt, p);
    else link_arrived(pipeline->from_next, gpt->stream);
    gpt_backward(gpt, p);
    if (gpt_embeds(gpt, p)) return;
    link_send(pipeline->to_before, gpt->dresidual[p->gradient], hidden_bytes(gpt, p), gpt->stream);
    pipeline->gradient_sent[p->gradient] = ++pipeline->sent_back;
}

// The pass of an action. Sizes and places alone.
static Pass pass_of(const GPT *gpt, const PipelineAction *action) {
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = gpt->B;
    pass.T = gpt->T;
    pass.chunk = action->chunk;
    pass.slot = action->slot;
    pass.input = action->input;
    pass.gradient = gpt->mesh->pp.size > 1 ? action->gradient : 0;
    return pass;
}

static void expect(GPT *gpt, const PipelineAction *action) {
    Pass pass = pass_of(gpt, action);
    if (action->backward) expect_gradient(gpt, &pass);
    else expect_input(gpt, &pass);
}

static void forward_micro_batch(GPT *gpt, const Pass *pass) {
    gpt->slot[pass->slot].pass = *pass;
    timer_start(gpt->timers, TIMER_FORWARD_COMPUTE, gpt->stream);
    stage_forward(gpt, pass);
    gpt_head(gpt, pass);
    timer_stop(gpt->timers, TIMER_FORWARD_COMPUTE, gpt->stream);
}

static void backward_micro_batch(GPT *gpt, const Pass *pass) {
    timer_start(gpt->timers, TIMER_BACKWARD_COMPUTE, gpt->stream);
    stage_backward(gpt, pass);
    timer_stop(gpt->timers, TIMER_BACKWARD_COMPUTE, gpt->stream);
    // The copies of the last --async-save: the device has work for a while beside them.
    if (pass->first) zero_copy_staged(gpt->zero);
}

// The first launch of a kernel may wait for all that a GPU was given. With messages under way it
// could wait for ever (llmc/cuda/comm.cu). So a stage launches all kernels of a step's passes once
// before. A loss scale of 0 and zeros from the neighbors make zeros of all gradients.
static void launch_first(GPT *gpt, bool training, LoadMicroBatch load, void *context) {
    MicroBatch *m = &gpt->slot[0];
    Pass pass;
    memset(&pass, 0, sizeof pass);
    pass.B = gpt->B;
    pass.T = gpt->T;
    pass.training = pass.backward = training;
    load(context, gpt, 0, &pass);
    pass.loss_scale = 0.0f;
    zero_rehearse(gpt->zero, true);
    for (int again = 0; again < 1 + training; again++) {
        pass.first = !again;
        for (pass.chunk = 0; pass.chunk < gpt->stage.shape.chunks; pass.chunk++) {
            if (!gpt_embeds(gpt, &pass)) m->residual[0] = gpt->input[0];
            if (!gpt_embeds(gpt, &pass)) set_zero(gpt->stream, gpt->input[0], hidden_bytes(gpt, &pass));
            gpt_forward(gpt, &pass);
            gpt_head(gpt, &pass);
            set_zero(gpt->stream, gpt->dresidual[pass.gradient], hidden_bytes(gpt, &pass));
            if (training) gpt_backward(gpt, &pass);
        }
    }
    stream_synchronize(gpt->stream);
    zero_rehearse(gpt->zero, false);
}

void gpt_micro_batches(GPT *gpt, int count, bool training, LoadMicroBatch load, void *context) {
    PipelineShape shape = gpt->stage.shape;
    size_t most = 2 * (size_t)count * (size_t)shape.chunks;
    PipelineAction *action = (PipelineAction *)xcalloc(most + 1, sizeof *action, "the order of a step");
    int actions = pipeline_actions(shape, count, training, action);
    bool *launched = training ? &gpt->trains : &gpt->evaluates;
    bool anew = training && zero_quantizes_first(gpt->zero);
    if (shape.stages > 1 && device_kind()->asynchronous && (!*launched || anew)) {
        launch_first(gpt, training, load, context);
    }
    *launched = true;
    if (actions > 0) expect(gpt, &action[0]);
    for (int i = 0; i < actions; i++) {
        bool more = i + 1 < actions, ahead = more && action[i + 1].micro_batch != action[i].micro_batch;
        if (ahead) expect(gpt, &action[i + 1]);
        if (action[i].backward) {
            Pass pass = gpt->slot[action[i].slot].pass;
            pass.gradient = pass_of(gpt, &action[i]).gradient;
            backward_micro_batch(gpt, &pass);
        } else {
            Pass pass = pass_of(gpt, &action[i]);
            pass.training = pass.backward = training;
            pass.first = action[i].micro_batch == 0;
            pass.last = action[i].micro_batch == count - 1;
            load(context, gpt, action[i].micro_batch, &pass);
            forward_micro_batch(gpt, &pass);
        }
        if (more && !ahead) expect(gpt, &action[i + 1]);
    }
    free(action);
    if (training) gpt_end_backward(gpt);
}

void gpt_stage_forward(GPT *gpt, const Pass *pass) {
    expect_input(gpt, pass);
    stage_forward(gpt, pass);
}
