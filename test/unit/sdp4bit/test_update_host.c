// AdamW on the host (sdp4bit/update_host.c) is bitwise identical to a simple reference, which
// handles one element and one group at a time and writes codes bit by bit, and to the kernel of CPU
// ranks, with which GPUs are compared (test/gpu/kernels_dump.c). Tests all codecs, several group
// sizes, weights and differences, 1 to 5 threads, skipped steps and refused elements.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sdp4bit/adamw.h"

// There are three tensors, of which the last one is padded. Each thread gets several ranges.
enum { MATRIX = 96 * 2048, TAIL = 1000, N = MATRIX + TAIL, RANK = 2, SEGMENTS = 3 };
static const Segment segments[SEGMENTS] = {{RANK * MATRIX - 640, 7008, 32, 0},
                                           {RANK * MATRIX + 6400, 100000, 7072, 1},
                                           {RANK * MATRIX + 106752, 80000, 107104, 2}};

// The inputs and outputs of an update.
typedef struct State {
    float master[N], exp_avg[N], exp_avg_sq[N], grads[N];
    floatX weights[MATRIX];
    uint8_t codes[4 * MATRIX];
    float scales[MATRIX / HADAMARD_ORDER];
    floatX tail[TAIL];
    uint64_t fault;
} State;

// Returns a value in [-1, 1) that depends only on i and salt.
static float draw(uint32_t salt, int64_t i) {
    return (float)(int64_t)(replica_mix((uint64_t)i, salt) >> 40) * 0x1p-23f - 1.0f;
}

static State *fresh_state(void) {
    State *s = (State *)calloc(1, sizeof *s);
    assert_non_null(s);
    for (int64_t i = 0; i < N; i++) {
        s->master[i] = 0.1f * draw(1, i);
        s->exp_avg[i] = 0.01f * draw(2, i);
        s->exp_avg_sq[i] = 1e-4f * fabsf(draw(3, i));
        s->grads[i] = 0.02f * draw(4, i);
        if (i < MATRIX) s->weights[i] = floatX_from_float(s->master[i] + 1e-3f * draw(5, i));
    }
    memset(s->codes, 0x5A, sizeof s->codes);
    memset(s->scales, 0x5A, sizeof s->scales);
    memset(s->tail, 0x5A, sizeof s->tail);
    return s;
}

static const StepStatus APPLIED = {.applied = 1,
                                   .clip_coefficient = 0.7f,
                                   .learning_rate = 1e-2f,
                                   .bias_correction1 = 0.19f,
                                   .bias_correction2 = 0.0975f};
static const StepStatus SKIPPED = {.applied = 0};

typedef struct Case {
    Codec codec;
    int group;
    bool difference;
    Rounding rounding;
    const StepStatus *control;
} Case;

static UpdateShard update_of(State *s, const Case *c) {
    UpdateShard u = {.control = c->control,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .epsilon = 1e-8f,
                     .weight_decay = 0.1f,
                     .rank = RANK,
                     .table = {segments, SEGMENTS},
                     .matrix_grads = s->grads,
                     .tail_grads = s->grads + MATRIX,
                     .matrix_weights = s->weights,
                     .master = s->master,
                     .exp_avg = s->exp_avg,
                     .exp_avg_sq = s->exp_avg_sq,
                     .codec = c->codec,
                     .group = c->group,
                     .rounding = c->rounding,
                     .difference = c->difference,
                     .key = {7, 11, 3, 0},
                     .codes = s->codes,
                     .scales = s->scales,
                     .tail = (uint8_t *)s->tail,
                     .fault = &s->fault,
                     .code = fault_code(FAULT_OF_UPDATE, 4)};
    u.bucket.matrix_per_rank = MATRIX;
    u.bucket.matrix_elements = 4 * MATRIX;
    u.bucket.tail_per_rank = TAIL;
    u.bucket.tail_elements = 4 * TAIL;
    return u;
}

// --- the reference -------------------------------------------------------------------------------

static int64_t logical_of(int64_t at) {
    int64_t position = RANK * (int64_t)MATRIX + at;
    int i = SEGMENTS - 1;
    while (i > 0 && segments[i].start > position) i--;
    return segments[i].logical + position - segments[i].start;
}

static void reference_group(const UpdateShard *u, int64_t at) {
    CodecInfo info = codec_info(u->codec);
    uint32_t largest = 0;
    float x[LARGEST_GROUP];
    for (int i = 0; i < u->group; i++) {
        x[i] = !u->control->applied ? 0.0f
               : u->difference      ? u->master[at + i] - floatX_to_float(u->matrix_weights[at + i])
                                    : u->master[at + i];
        uint32_t bits = f32_bits(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    GroupScale g = group_scale(largest, info.levels);
    u->scales[at / u->group] = g.scale;
    for (int i = 0; i < u->group; i++) {
        int64_t logical = logical_of(at) + i, bit = (at + i) * info.bits;
        Philox4 random = rounding_bits(u->key, (uint64_t)logical / ROUNDING_BLOCK);
        float scaled = group_scaled(x[i], g);
        uint32_t half = philox_half(random, (int)(logical % ROUNDING_BLOCK));
        int q = u->rounding == ROUND_STOCHASTIC ? code_stochastic(scaled, info.levels, half)
                                                : code_nearest(scaled, info.levels);
        for (int k = 0; k < info.bits; k++, bit++) {
            uint8_t *byte = &u->codes[bit / 8], mask = (uint8_t)(1 << bit % 8);
            *byte = (uint8_t)(q >> k & 1 ? *byte | mask : *byte & ~mask);
        }
    }
}

static void reference(const UpdateShard *u) {
    bool applied = u->control->applied, grouped = codec_grouped(u->codec);
    for (int64_t i = 0; applied && i < N; i++) {
        bool matrix = i < MATRIX;
        float grad = matrix ? u->matrix_grads[i] : u->tail_grads[i - MATRIX];
        AdamScalars scalars = adam_scalars(u, matrix ? u->weight_decay : 0.0f);
        if (!adamw_element(&u->master[i], &u->exp_avg[i], &u->exp_avg_sq[i], grad, scalars) && !*u->fault)
            *u->fault = u->code;
        if (!matrix) ((floatX *)(void *)u->tail)[i - MATRIX] = floatX_from_float(u->master[i]);
        else if (u->codec == CODEC_FP32) ((float *)(void *)u->codes)[i] = u->master[i];
        else if (!grouped) ((uint16_t *)(void *)u->codes)[i] = bf16_from_float(u->master[i]);
    }
    for (int64_t at = 0; grouped && at < MATRIX; at += u->group) reference_group(u, at);
}

// --- the watchdog --------------------------------------------------------------------------------

// Replaces the heartbeat's function at link time (Makefile).
static int moves;
void __wrap_heartbeat_progress(const Site *site);
void __wrap_heartbeat_progress(const Site *site) { __atomic_fetch_add(&moves, 1, __ATOMIC_RELAXED); }

// --- the tests -----------------------------------------------------------------------------------

static void assert_same(const State *a, const State *b, const Case *c, int threads) {
    const struct {
        const char *name;
        const void *a, *b;
        size_t bytes;
    } parts[] = {{"master weights", a->master, b->master, sizeof a->master},
                 {"first moments", a->exp_avg, b->exp_avg, sizeof a->exp_avg},
                 {"second moments", a->exp_avg_sq, b->exp_avg_sq, sizeof a->exp_avg_sq},
                 {"codes", a->codes, b->codes, sizeof a->codes},
                 {"scales", a->scales, b->scales, sizeof a->scales},
                 {"tail", a->tail, b->tail, sizeof a->tail},
                 {"fault", &a->fault, &b->fault, sizeof a->fault}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (memcmp(parts[i].a, parts[i].b, parts[i].bytes) == 0) continue;
        fail_msg("%s, groups of %d, %d threads: different %s", codec_info(c->codec).name, c->group, threads,
                 parts[i].name);
    }
}

// Compares the state after the reference with the kernel (0 threads) and with 1 to 5 threads.
static void same_bits(const Case *c, void (*spoil)(State *)) {
    State *expected = fresh_state();
    if (spoil) spoil(expected);
    UpdateShard u = update_of(expected, c);
    reference(&u);
    for (int threads = 0; threads <= 5; threads++) {
        State *s = fresh_state();
        if (spoil) spoil(s);
        u = update_of(s, c);
        if (threads) update_shard_host(&u, threads, NULL);
        else kernel_update_shard(NULL, &u);
        assert_same(s, expected, c, threads);
        free(s);
    }
    free(expected);
}

static const int groups[] = {32, 96, 128, 2048, LARGEST_GROUP};
enum { GROUPS = sizeof groups / sizeof *groups };

// Tests every codec except EDEN, which is not used for weights, with every group size. Payload and
// rounding modes vary between the cases.
static void every_codec_and_group(void **state) {
    for (int codec = 0; codec < CODEC_EDEN4; codec++) {
        for (int g = 0; g < GROUPS; g++) {
            Case c = {(Codec)codec, groups[g], (codec + g) % 2 == 0, (Rounding)(g / 2 % 2), &APPLIED};
            if (MATRIX % groups[g] == 0) same_bits(&c, NULL);
            c.difference = !c.difference;
            if (groups[g] == 128) same_bits(&c, NULL);
        }
    }
}

// A skipped step sends zero codes and scales and changes nothing else.
static void a_skipped_step(void **state) {
    for (int codec = 0; codec < CODEC_EDEN4; codec++) {
        Case c = {(Codec)codec, 128, true, ROUND_STOCHASTIC, &SKIPPED};
        same_bits(&c, NULL);
    }
}

// Sets gradients in several ranges, and one in the tail, to values that the update refuses.
static void spoil_gradients(State *s) {
    s->grads[5] = NAN;
    s->grads[70000] = INFINITY;
    s->grads[MATRIX - 1] = 1e30f;
    s->grads[MATRIX + 17] = -INFINITY;
}
static void spoil_master_weights(State *s) { s->master[66000] = 0x1p126f; }

static void refused_elements(void **state) {
    for (int codec = 0; codec < CODEC_EDEN4; codec++) {
        Case c = {(Codec)codec, 128, false, ROUND_NEAREST, &APPLIED};
        same_bits(&c, spoil_gradients);
        same_bits(&c, spoil_master_weights);
    }
    // The first refusal is kept.
    State *s = fresh_state();
    Case c = {CODEC_INT4, 128, true, ROUND_NEAREST, &APPLIED};
    UpdateShard u = update_of(s, &c);
    spoil_gradients(s);
    s->fault = fault_code(FAULT_OF_MESSAGE, 1);
    update_shard_host(&u, 3, NULL);
    assert_true(s->fault == fault_code(FAULT_OF_MESSAGE, 1));
    free(s);
}

// Updating a large shard may take longer than the watchdog's time limit, so every range must report
// progress.
static void ranges_count_as_progress(void **state) {
    State *s = fresh_state();
    Case c = {CODEC_INT4, 128, true, ROUND_NEAREST, &APPLIED};
    UpdateShard u = update_of(s, &c);
    moves = 0;
    update_shard_host(&u, 2, NULL);
    assert_in_range(moves, MATRIX / 100000, MATRIX / 10000);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_codec_and_group),
        cmocka_unit_test(a_skipped_step),
        cmocka_unit_test(refused_elements),
        cmocka_unit_test(ranges_count_as_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
