// Compares local steps bit for bit with a simulator. llmc/state/zero.c trains on synthetic
// gradients for two rounds of outer syncs, in every shape of replica groups that fits the ranks.
// Each replica group has a Simulator for its inner steps. This file simulates the outer steps from
// sdp4bit/README.md, tensor by tensor and element by element, without messages or shards. In one
// step one replica group gets a NaN, and only this group skips the step. The bytes between replica
// groups must be as planned. Some presets end with the last step, in which all buckets synchronize,
// and some train with Muon, which updates two of the matrices.
//
//   test_local_mpi [--emulate-nodes]
//
// With the flag each replica group has one rank, and replica groups may share GPUs.
// build/test/gpu/test_local_mpi is the same program for GPU ranks.
// ranks: 1 2 3 4
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/devices.h"
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"
#include "test/leaks.h"
#include "test/mpi/local_presets.h"
#include "test/mpi/orthogonalize.h"
#include "test/mpi/simulator.h"

enum { STEPS = 11, POISONED_STEP = 6, POISONED_REPLICA_GROUP = 1, H = 4, TENSORS = 9 };
static const float RATE = 1e-2f, WEIGHT_DECAY = 0.1f, OUTER_LR = 0.7f, OUTER_MOMENTUM = 0.9f;

// --- a trial -------------------------------------------------------------------------------------

// Simulated outer state in the layout of the arena, the same for all replica groups.
typedef struct OuterState {
    float *weights, *momentum;
    float *residual;  // (replica groups, arena) error feedback; NULL without it
    double *owed;     // (arena) exact means minus decoded means, summed over all outer syncs
    int64_t *turn;    // (buckets) sync slot
} OuterState;

typedef struct Trial {
    const Preset *preset;
    const Mesh *mesh;
    Device *device;
    Lanes lanes;
    Config config;
    Timers *timers;
    Stream *compute;
    MemoryPlan memory_plan;
    Zero *zero;
    LayoutTensor *tensors;
    BucketLayout layout;  // same as in zero
    MuonShape muon_shapes[TENSORS];
    SimulatedMuon muon;        // with --optimizer muon
    Simulator *replica_group;  // (replica groups)
    OuterState outer;
    float *local, **grads;  // (arena) gradients of this rank; (world, arena) of every rank
    float *found;           // (arena) downloaded from the device
} Trial;

static int replica_groups(const Trial *t) { return t->mesh->replica_groups.size; }

static bool complain(const Trial *t, int64_t step, const char *what, int64_t at) {
    fprintf(stderr, "rank %d, %d replica groups x %d, %s, step %lld: %s at %lld\n", t->mesh->world.rank,
            replica_groups(t), t->mesh->dp.size, t->preset->name, (long long)step, what, (long long)at);
    return false;
}

static bool has_muon(const Trial *t) { return t->config.optimizer == OPTIMIZER_MUON; }

// With Muon, the matrices whose sides are multiples of 8 are orthogonalized.
static MuonShape muon_shape(const Tensor *tensor) {
    MuonShape shape = {.row_ranks = 1, .column_ranks = 1};
    if (tensor->dims == 1 || tensor->local[0] % 8 || tensor->local[1] % 8) return shape;
    shape.columns = tensor->local[1];
    shape.groups = 1;
    shape.part[0] = tensor->local[0];
    return shape;
}

static void fill_tensors(Trial *t, Tensor *tensor) {
    static const int64_t shape[TENSORS][2] = {{140, 96},  {150, 122}, {33, 0},    {184, 120}, {101, 0},
                                              {128, 192}, {7, 0},     {166, 142}, {32, 0}};
    static const int unit[TENSORS] = {0, 1, 1, 2, 2, 3, 3, 4, 4};
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor %d", i);
        tensor[i] = tensor_row(name, shape[i][0], shape[i][1], -1, unit[i], 0);
        t->muon_shapes[i] = muon_shape(&tensor[i]);
        if (has_muon(t)) tensor[i].muon = t->muon_shapes[i];
    }
    tensors_number(tensor, TENSORS, 1);
}

static void configure(Trial *t) {
    char *argv[COMMON_FLAGS + MOST_FLAGS];
    int argc = 0;
    Error err = {0};
    for (int i = 0; i < COMMON_FLAGS; i++) argv[argc++] = (char *)common_flags[i];
    for (int i = 0; t->preset->flags[i]; i++) argv[argc++] = (char *)t->preset->flags[i];
    if (!config_parse(&t->config, argc, argv, NULL, 0, &err) ||
        !config_finish(&t->config, t->mesh->world.size, 64, 63, &err)) {
        fatal(NULL, err.code, "%s", err.what);
    }
}

static void build_zero(Trial *t) {
    Tensor tensor[TENSORS];
    Error err = {0};
    fill_tensors(t, tensor);
    lanes_open(&t->lanes, t->device, t->mesh->dp.size > 1 && !t->config.no_overlap);
    t->timers = timers_create(t->device, 0);
    t->compute = stream_create(t->device, "compute");
    t->zero = zero_plan(&t->config, t->mesh, tensor, TENSORS, &t->memory_plan, &err);
    if (!t->zero || !memory_plan_allocate(&t->memory_plan, t->device, 1, &err))
        fatal(NULL, err.code, "%s", err.what);
    zero_start(t->zero, t->device, t->compute, &t->lanes, t->timers);
    t->layout = t->zero->base.layout;
    t->tensors = tensors_for_plan(tensor, TENSORS);
}

static void orthogonalize(void *context, floatX *x, int64_t rows, int64_t columns) {
    const Trial *t = (const Trial *)context;
    orthogonalize_on(t->zero, t->compute, x, rows, columns);
}

// Returns a pseudo-random number in (-1, 1).
static float drawn(uint32_t what, uint32_t of, int64_t i) {
    Philox4 r = philox4x32_10(77, what, (uint32_t)i, (uint32_t)(i >> 32), of, 0);
    return ((float)(r.v[0] >> 8) + 0.5f) * 0x1p-23f - 1.0f;
}

static void build_simulators(Trial *t) {
    size_t arena = (size_t)t->layout.arena_elements;
    const Config *c = &t->config;
    SimulatorOptions o = {&t->layout,
                          t->tensors,
                          t->preset->grad,
                          t->preset->weight,
                          (uint32_t)c->seed,
                          (float)c->adam_beta1,
                          (float)c->adam_beta2,
                          (float)c->adam_eps,
                          WEIGHT_DECAY,
                          (float)c->clip_grad,
                          true,
                          (float)c->loss_spike_factor,
                          false};
    floatX *weights = (floatX *)xcalloc(arena, sizeof *weights, "the test");
    for (int k = 0; k < TENSORS; k++) {
        for (int64_t i = 0; i < t->tensors[k].numel; i++)
            weights[t->layout.tensor_arena[k] + i] = floatX_from_float(0.1f * drawn(1, (uint32_t)k, i));
        copy_to_device(t->compute, zero_weight(t->zero, k), weights + t->layout.tensor_arena[k],
                       (size_t)t->tensors[k].numel * sizeof *weights);
    }
    zero_init_master_weights(t->zero);
    stream_synchronize(t->compute);
    t->replica_group = (Simulator *)xcalloc((size_t)replica_groups(t), sizeof(Simulator), "the test");
    SimulatedMuon muon = {t->muon_shapes,   (float)c->muon_momentum, (float)c->muon_extra_scale_factor,
                          c->muon_nesterov, orthogonalize,           t};
    t->muon = muon;
    for (int n = 0; n < replica_groups(t); n++) {
        simulator_create(&t->replica_group[n], &o, weights);
        if (has_muon(t)) t->replica_group[n].muon = &t->muon;
    }
    t->outer.weights = (float *)xcalloc(arena, sizeof(float), "the test");
    t->outer.momentum = (float *)xcalloc(arena, sizeof(float), "the test");
    t->outer.turn = (int64_t *)xcalloc((size_t)t->layout.buckets, sizeof(int64_t), "the test");
    if (c->error_feedback && c->quantized_gradients)
        t->outer.residual = (float *)xcalloc(arena * (size_t)replica_groups(t), sizeof(float), "the test");
    t->outer.owed = (double *)xcalloc(arena, sizeof(double), "the test");
    memcpy(t->outer.weights, t->replica_group[0].master, arena * sizeof(float));
    // A bucket's sync slot depends on the number of elements in earlier buckets.
    int64_t before = 0, all = 0;
    for (int b = 0; b < t->layout.buckets; b++)
        all += t->layout.bucket[b].matrix_elements + t->layout.bucket[b].tail_elements;
    for (int b = 0; b < t->layout.buckets; b++) {
        t->outer.turn[b] = H * before / all;
        before += t->layout.bucket[b].matrix_elements + t->layout.bucket[b].tail_elements;
    }
    free(weights);
}

static Trial *open_trial(const Mesh *mesh, Device *device, const Preset *preset) {
    Trial *t = (Trial *)xcalloc(1, sizeof *t, "a trial");
    t->preset = preset;
    t->mesh = mesh;
    t->device = device;
    configure(t);
    build_zero(t);
    build_simulators(t);
    size_t arena = (size_t)t->layout.arena_elements;
    t->local = (float *)xcalloc(arena, sizeof(float), "the test");
    t->found = (float *)xcalloc(arena, sizeof(float), "the test");
    t->grads = (float **)xcalloc((size_t)mesh->world.size, sizeof(float *), "the test");
    float *every = (float *)xcalloc(arena * (size_t)mesh->world.size, sizeof(float), "the test");
    for (int r = 0; r < mesh->world.size; r++) t->grads[r] = every + (size_t)r * arena;
    return t;
}

static void close_trial(Trial *t) {
    for (int n = 0; n < replica_groups(t); n++) simulator_free(&t->replica_group[n]);
    free(t->replica_group);
    zero_stop(t->zero);
    memory_plan_free(&t->memory_plan, t->device);
    zero_free(t->zero);
    timers_destroy(t->timers);
    stream_destroy(t->compute);
    lanes_close(&t->lanes);
    config_free(&t->config);
    free(t->outer.weights);
    free(t->outer.momentum);
    free(t->outer.turn);
    free(t->outer.residual);
    free(t->outer.owed);
    free(t->local);
    free(t->found);
    free(t->grads[0]);
    free(t->grads);
    free(t->tensors);
    free(t);
}

// --- the simulated outer step --------------------------------------------------------------------

static bool ends(const Trial *t, int64_t step) { return step == t->config.train_iters; }

typedef struct Part {
    int64_t arena, numel, logical, n;  // n: numel, padded with zeros to whole groups
    bool matrix;
} Part;

static Part part_of(const Trial *t, int tensor) {
    Part part = {t->layout.tensor_arena[tensor], t->tensors[tensor].numel, 0, 0, t->tensors[tensor].matrix};
    for (int k = 0; k < tensor; k++) part.logical += round_up64(t->tensors[k].numel, 32);
    part.n = part.matrix ? round_up64(part.numel, t->preset->grad.inter_group) : part.numel;
    return part;
}

// Keys of a hop's random bits.
static RoundingKey key_of(const Trial *t, uint32_t purpose, uint32_t source, int64_t step) {
    RoundingKey key = {(uint32_t)t->config.seed, (uint32_t)step, purpose, source};
    return key;
}

// One of the two hops of an outer sync, with the purposes of its rounding and rotation bits.
typedef struct Leg {
    RoundingKey rounding, rotation;
} Leg;
static Leg leg_of(const Trial *t, bool mean, uint32_t source, int64_t step) {
    Leg leg = {key_of(t, mean ? PURPOSE_OUTER_MEAN : PURPOSE_OUTER, source, step),
               key_of(t, mean ? PURPOSE_OUTER_MEAN_ROTATION : PURPOSE_OUTER_ROTATION, 0, step)};
    return leg;
}

// Transforms, quantizes and decodes x. `arrive` later inverts the transform.
static void leave(const Trial *t, float *x, const Part *part, Leg leg) {
    const GradFormat *format = &t->preset->grad;
    Codec codec = part->matrix ? format->inter_codec : format->tail_codec;
    if (part->matrix) simulator_transform(x, part->n, format->transform, leg.rotation, part->logical);
    simulator_send(x, part->n, codec, format->inter_group, format->rounding, leg.rounding, part->logical);
}

static void arrive(const Trial *t, float *x, const Part *part, Leg leg) {
    if (part->matrix) simulator_invert(x, part->n, t->preset->grad.transform, leg.rotation, part->logical);
}

// --- error feedback ---

// Returns the residuals of replica group n; NULL if it has none.
static float *residual_of(const Trial *t, const Part *part, int n) {
    bool feeds = t->outer.residual && replica_groups(t) > 1;
    return feeds ? t->outer.residual + n * t->layout.arena_elements + part->arena : NULL;
}

// Returns the replica group that quantizes the mean of an element of the arena.
static int owner_of_mean(const Trial *t, int64_t arena) {
    int b = 0;
    while (b + 1 < t->layout.buckets && t->layout.bucket[b + 1].arena_start <= arena) b++;
    const Bucket *bucket = &t->layout.bucket[b];
    int64_t at = arena - bucket->arena_start;
    bool matrix = at < bucket->matrix_elements;
    if (!matrix) at -= bucket->matrix_elements;
    int64_t shard = matrix ? bucket->matrix_per_rank : bucket->tail_per_rank;
    return (int)(at % shard / (shard / replica_groups(t)));
}

// Stores the rounding errors of a message in the residuals of replica group n. x: the message,
// before `arrive`; fed: the pseudo-gradient with the earlier errors.
static void keep_errors(const Trial *t, const Part *part, int n, int64_t step, const float *x,
                        const float *fed) {
    float *residual = residual_of(t, part, n), groups = (float)replica_groups(t);
    float *sent = (float *)xcalloc((size_t)part->n, sizeof *sent, "the test");
    memcpy(sent, x, (size_t)part->n * sizeof *sent);
    arrive(t, sent, part, leg_of(t, false, 0, step));
    for (int64_t i = 0; i < part->numel; i++) residual[i] = -groups * sent[i] + fed[i];
    free(sent);
}

// Adds the rounding errors of the means to the residuals of the groups that quantized them.
static void keep_mean_errors(const Trial *t, const Part *part, const float *exact, const float *mean) {
    for (int64_t i = 0; i < part->numel; i++)
        residual_of(t, part, owner_of_mean(t, part->arena + i))[i] += (float)replica_groups(t) *
                                                                      (exact[i] - mean[i]);
}

// --- both hops ---

// Quantizes the pseudo-gradient of replica group n. fed: (part->numel) scratch.
static void send_pieces(const Trial *t, const Part *part, int n, int64_t step, float *x, float *fed) {
    float *residual = residual_of(t, part, n), share = 1.0f / (float)replica_groups(t);
    for (int64_t i = 0; i < part->numel; i++) {
        if (residual) x[i] += residual[i];
        fed[i] = x[i];
        x[i] *= share;
    }
    leave(t, x, part, leg_of(t, false, (uint32_t)n, step));
    if (residual) keep_errors(t, part, n, step, x, fed);
}

// Computes the mean over the replica groups after both hops.
static void mean_gradient(const Trial *t, const Part *part, int64_t step, float *mean) {
    float *x = (float *)xcalloc((size_t)part->n, sizeof *x, "the test"),
          *fed = (float *)xcalloc((size_t)part->n, sizeof *fed, "the test");
    for (int n = 0; n < replica_groups(t); n++) {
        memset(x, 0, (size_t)part->n * sizeof *x);
        for (int64_t i = 0; i < part->numel; i++)
            x[i] = t->outer.weights[part->arena + i] - t->replica_group[n].master[part->arena + i];
        if (replica_groups(t) > 1) send_pieces(t, part, n, step, x, fed);
        for (int64_t i = 0; i < part->n; i++) mean[i] = n ? mean[i] + x[i] : x[i];
    }
    if (replica_groups(t) > 1) {
        arrive(t, mean, part, leg_of(t, false, 0, step));
        for (int64_t i = part->numel; i < part->n; i++) mean[i] = 0.0f;
        memcpy(fed, mean, (size_t)part->n * sizeof *fed);
        leave(t, mean, part, leg_of(t, true, 0, step));
        arrive(t, mean, part, leg_of(t, true, 0, step));
        if (residual_of(t, part, 0)) keep_mean_errors(t, part, fed, mean);
    }
    free(x);
    free(fed);
}

static void outer_step(const Trial *t, int tensor, int64_t step) {
    Part part = part_of(t, tensor);
    float *mean = (float *)xcalloc((size_t)part.n, sizeof *mean, "the test");
    float rate = ends(t, step) ? 1.0f : OUTER_LR, momentum = ends(t, step) ? 0.0f : OUTER_MOMENTUM;
    mean_gradient(t, &part, step, mean);
    for (int64_t i = 0; i < part.numel; i++) {
        double exact = 0;
        for (int n = 0; n < replica_groups(t); n++)
            exact += (double)t->outer.weights[part.arena + i] -
                     (double)t->replica_group[n].master[part.arena + i];
        t->outer.owed[part.arena + i] += exact / replica_groups(t) - (double)mean[i];
        float *m = &t->outer.momentum[part.arena + i];
        *m = momentum * *m + mean[i];
        t->outer.weights[part.arena + i] -= rate * (mean[i] + momentum * *m);
    }
    free(mean);
}

static void mix_outer_weights(const Trial *t, int tensor) {
    Part part = part_of(t, tensor);
    for (int n = 0; n < replica_groups(t); n++) {
        for (int64_t i = part.arena; i < part.arena + part.numel; i++) {
            float outer = t->outer.weights[i], *master = &t->replica_group[n].master[i], mix = t->preset->mix;
            *master = mix == 0 ? outer : mix * *master + (1.0f - mix) * outer;
        }
    }
}

static void simulate(Trial *t, int64_t step) {
    int D = t->mesh->dp.size;
    float *losses = (float *)xcalloc((size_t)D, sizeof(float), "the test");
    for (int n = 0; n < replica_groups(t); n++)
        simulator_step(&t->replica_group[n], t->grads + n * D, losses, (uint32_t)step, RATE, RATE);
    free(losses);
    for (int k = 0; k < TENSORS; k++) {
        int64_t turn = t->outer.turn[t->layout.tensor_bucket[k]], synced = step - t->preset->delay;
        if (step % H == turn || ends(t, step)) outer_step(t, k, step);
        if ((synced > 0 && synced % H == turn) || ends(t, step)) mix_outer_weights(t, k);
    }
}

// --- a step --------------------------------------------------------------------------------------

static void make_gradients(Trial *t, int64_t step) {
    bool poisoned = step == POISONED_STEP && t->mesh->replica_groups.rank == POISONED_REPLICA_GROUP;
    uint32_t of = (uint32_t)(step * 100 + t->mesh->world.rank);
    for (int k = 0; k < TENSORS; k++) {
        for (int64_t i = 0; i < t->tensors[k].numel; i++) {
            float x = drawn(2, of * 16 + (uint32_t)k, i);
            t->local[t->layout.tensor_arena[k] + i] = x * x * x;
        }
    }
    if (poisoned && t->mesh->dp.rank == 0) t->local[t->layout.tensor_arena[3] + 5] = NAN;
    int arena = (int)t->layout.arena_elements;
    MPI_Allgather(t->local, arena, MPI_FLOAT, t->grads[0], arena, MPI_FLOAT, MPI_COMM_WORLD);
}

// Reduces the units in backward order.
static void reduce(Trial *t) {
    for (int unit = t->layout.units - 1; unit >= 0; unit--) {
        zero_grads_begin(t->zero, unit);
        for (int k = 0; k < TENSORS; k++) {
            if (t->tensors[k].unit != unit) continue;
            copy_to_device(t->compute, zero_grad(t->zero, k), t->local + t->layout.tensor_arena[k],
                           (size_t)t->tensors[k].numel * sizeof(float));
        }
        zero_reduce_unit(t->zero, unit, true);
    }
}

static bool same_shard(Trial *t, int64_t step, const char *what, const float *device, const float *whole) {
    int64_t rank = t->mesh->dp.rank;
    copy_to_host(t->compute, t->found, device, (size_t)t->layout.shard_elements * sizeof(float));
    stream_synchronize(t->compute);
    for (int b = 0; b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        const float *own = t->found + bucket->state_start, *arena = whole + bucket->arena_start;
        for (int64_t i = 0; i < bucket->matrix_per_rank; i++) {
            if (f32_bits(own[i]) != f32_bits(arena[rank * bucket->matrix_per_rank + i]))
                return complain(t, step, what, bucket->arena_start + rank * bucket->matrix_per_rank + i);
        }
        own += bucket->matrix_per_rank;
        arena += bucket->matrix_elements + rank * bucket->tail_per_rank;
        if (memcmp(own, arena, (size_t)bucket->tail_per_rank * sizeof *own))
            return complain(t, step, what, -1 - bucket->arena_start);
    }
    return true;
}

static bool same_weights(Trial *t, int64_t step, const char *what, const floatX *wanted) {
    size_t bytes = (size_t)t->layout.arena_elements * sizeof(floatX);
    copy_to_host(t->compute, t->found, t->zero->weights.arena, bytes);
    stream_synchronize(t->compute);
    for (int64_t i = 0; i < t->layout.arena_elements; i++) {
        if (memcmp((floatX *)(void *)t->found + i, wanted + i, sizeof *wanted))
            return complain(t, step, what, i);
    }
    return true;
}

// During an evaluation every replica group must use the outer weights, and afterward its own
// weights.
static bool evaluates_outer(Trial *t, int64_t step) {
    floatX *outer = (floatX *)xcalloc((size_t)t->layout.arena_elements, sizeof *outer, "the test");
    for (int64_t i = 0; i < t->layout.arena_elements; i++) outer[i] = floatX_from_float(t->outer.weights[i]);
    zero_use_outer(t->zero, true);
    bool ok = same_weights(t, step, "different outer weight in an evaluation", outer);
    zero_use_outer(t->zero, false);
    free(outer);
    return ok;
}

static bool same_bytes(Trial *t, int64_t step, uint64_t before) {
    uint64_t planned = 0;
    for (int b = 0; b < t->layout.buckets; b++) {
        if (step % H != t->outer.turn[b] && !ends(t, step)) continue;
        planned += (uint64_t)outer_wire_bytes(&t->zero->outer.layout, b, &t->zero->base.grad_format);
    }
    return zero_traffic(t->zero).rail - before == planned ||
           complain(t, step, "wrong number of bytes between replica groups", 0);
}

static bool on_all(bool ok) {
    int value = ok;
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return value != 0;
}

static bool same_residual(Trial *t, int64_t step) {
    const float *residual = t->zero->outer.residual;
    bool feeds = t->outer.residual && replica_groups(t) > 1;
    if (!residual || !feeds) return (!residual && !feeds) || complain(t, step, "wrong error feedback", 0);
    return same_shard(t, step, "different residual", residual,
                      t->outer.residual + t->mesh->replica_groups.rank * t->layout.arena_elements);
}

static bool run_step(Trial *t, int64_t step) {
    const Simulator *own = &t->replica_group[t->mesh->replica_groups.rank];
    uint64_t before = zero_traffic(t->zero).rail;
    make_gradients(t, step);
    zero_step_begins(t->zero, step);
    reduce(t);
    zero_update(t->zero, RATE, RATE, WEIGHT_DECAY);
    simulate(t, step);
    zero_synchronize(t->zero);
    bool ok = same_bytes(t, step, before);
    // Waits for outer syncs only every third step, so some of them overlap with later steps.
    if (step % 3 == 0 || step == STEPS) {
        outer_finish(&t->zero->base, &t->zero->outer, &t->zero->optimizer);
        stream_synchronize(t->compute);
        ok = ok && same_shard(t, step, "different master weight", t->zero->optimizer.master, own->master) &&
             same_shard(t, step, "different first moment", t->zero->optimizer.exp_avg, own->exp_avg) &&
             (has_muon(t) || same_shard(t, step, "different second moment", t->zero->optimizer.exp_avg_sq,
                                        own->exp_avg_sq)) &&
             same_shard(t, step, "different outer weight", t->zero->outer.outer, t->outer.weights) &&
             same_shard(t, step, "different outer momentum", t->zero->outer.momentum, t->outer.momentum) &&
             same_residual(t, step);
    }
    bool skips = step == POISONED_STEP && t->mesh->replica_groups.rank == POISONED_REPLICA_GROUP;
    StepStatus control = zero_step_status(t->zero, 0);
    if (control.applied == (int)skips) ok = complain(t, step, "different step status", control.applied);
    ok = on_all(ok && same_weights(t, step, "different weight", own->replica));
    if (step % 5 == 0) ok = on_all(ok && evaluates_outer(t, step));
    return on_all(ok && same_weights(t, step, "different weight after an evaluation", own->replica));
}

// Changes one rank's outer weights. All ranks must return an error before anything is saved.
static bool finds_changed_outer_weight(Trial *t) {
    Peers world = {MPI_COMM_WORLD, 0, NULL};
    Error err = {0};
    int64_t repairs = 0;
    float wrong = 0.125f;
    if (replica_groups(t) == 1) return true;
    bool sound = replicas_verify(t->zero, world, NULL, &repairs, &err);
    if (t->mesh->world.rank == t->mesh->world.size - 1)
        copy_to_device(t->compute, t->zero->outer.outer + 7, &wrong, sizeof wrong);
    stream_synchronize(t->compute);
    bool found = !replicas_verify(t->zero, world, NULL, &repairs, &err) && err.code == EXIT_COMMUNICATION;
    return (sound && found) || complain(t, STEPS, "replicas_verify is wrong; equal weights accepted", sound);
}

// The mean of the residuals must be what the decoded means lack, so that no rounding error is lost.
static bool residuals_are_complete(const Trial *t) {
    int64_t arena = t->layout.arena_elements;
    for (int64_t i = 0; t->outer.residual && replica_groups(t) > 1 && i < arena; i++) {
        double sum = 0;
        for (int n = 0; n < replica_groups(t); n++) sum += (double)t->outer.residual[n * arena + i];
        if (fabs(sum / replica_groups(t) - t->outer.owed[i]) > 1e-6)
            return complain(t, STEPS, "a rounding error is lost", i);
    }
    return true;
}

static bool run_preset(const Mesh *mesh, Device *device, const Preset *preset) {
    Trial *t = open_trial(mesh, device, preset);
    bool ok = on_all(t->layout.buckets >= (has_muon(t) ? 2 : 4) ||
                     complain(t, 0, "different number of buckets", t->layout.buckets));
    for (int64_t step = 1; ok && step <= STEPS; step++) ok = run_step(t, step);
    ok = ok && on_all(residuals_are_complete(t)) && on_all(finds_changed_outer_weight(t));
    close_trial(t);
    return ok;
}

// emulate: see devices.h.
static int run_shape(int rank, int size, int per_node, bool emulate) {
    Mesh mesh;
    Error err = {0};
    Peers world = {MPI_COMM_WORLD, 0, NULL};
    int failures = 0, *hosts = (int *)xcalloc((size_t)size, sizeof *hosts, "the hosts");
    if (!mesh_build(&mesh, rank, size, hosts, per_node, 1, 1, &err) || !mesh_make_replica_groups(&mesh, &err))
        fatal(NULL, err.code, "%s", err.what);
    OwnDevice own = devices_choose(world, &mesh, emulate);
    Launch launch = {rank, size, hosts, MPI_COMM_WORLD, MPI_COMM_WORLD, "test", false};
    if (emulate) devices_emulate_nodes(&own, &mesh, &launch);
    Device *device = device_open(own.index, NULL, &err);
    if (!device || !mesh_open(&mesh, world, &err)) fatal(NULL, err.code, "%s", err.what);
    device_set_deterministic(device, true);
    comm_open(&mesh, device, 60);
    for (int preset = 0; preset < PRESETS; preset++) {
        bool ok = run_preset(&mesh, device, &presets[preset]);
        failures += !ok;
        if (rank == 0)
            printf("%s %d replica groups x %d: %s\n", ok ? "ok" : "not ok", size / per_node, per_node,
                   presets[preset].name);
    }
    comm_close(&mesh);
    mesh_close(&mesh);
    device_close(device);
    free(hosts);
    return failures;
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    int rank, size, failures = 0;
    bool emulate = argc == 2 && !strcmp(argv[1], "--emulate-nodes");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int per_node = 1; per_node <= (emulate ? 1 : size); per_node++) {
        if (size % per_node == 0) failures += run_shape(rank, size, per_node, emulate);
    }
    failures += leaks_found();
    MPI_Finalize();
    return failures ? 1 : 0;
}
