// Muon's update of whole matrices: see muon.h.
#include "llmc/state/muon.h"

#include <assert.h>
#include <math.h>

#include "sdp4bit/muon.h"

// --- coefficients --------------------------------------------------------------------------------

// The values of Emerging-Optimizers. repeats: after the last step the set starts over; otherwise
// the last step is repeated.
enum { MOST_ROWS = 10 };
static const struct {
    int count;
    bool repeats;
    NewtonSchulzStep step[MOST_ROWS];
} SETS[] = {
    [MUON_SIMPLE] = {1, true, {{3.4445f, -4.7750f, 2.0315f}}},
    [MUON_QUINTIC] = {5,
                      true,
                      {{4.0848f, -6.8946f, 2.9270f},
                       {3.9505f, -6.3029f, 2.6377f},
                       {3.7418f, -5.5913f, 2.3037f},
                       {2.8769f, -3.1427f, 1.2046f},
                       {2.8366f, -3.0525f, 1.2012f}}},
    [MUON_POLAR_EXPRESS] = {8,
                            false,
                            {{8.2051f, -22.9019f, 16.4607f},
                             {4.0664f, -2.8612f, 0.5184f},
                             {3.9096f, -2.8234f, 0.5250f},
                             {3.2856f, -2.4153f, 0.4853f},
                             {2.2779f, -1.6198f, 0.3985f},
                             {1.8726f, -1.2307f, 0.3585f},
                             {1.8564f, -1.2132f, 0.3568f},
                             {1.8750f, -1.2500f, 0.3750f}}},
    [MUON_CANS] = {5,
                   false,
                   {{8.4703f, -25.1081f, 18.6293f},
                    {4.1828f, -3.1087f, 0.5806f},
                    {3.9619f, -2.9541f, 0.5630f},
                    {3.2866f, -2.4647f, 0.5074f},
                    {2.2737f, -1.6447f, 0.4162f}}},
    [MUON_AOL] = {4,
                  true,
                  {{4.0098f, -7.0585f, 2.4635f},
                   {3.4585f, -5.5479f, 2.5959f},
                   {2.7573f, -3.2939f, 1.4254f},
                   {2.7215f, -3.0494f, 1.3169f}}},
    [MUON_DEEPSEEK_V4] = {10,
                          false,
                          {{3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {2.0f, -1.5f, 0.5f},
                           {2.0f, -1.5f, 0.5f}}},
    [MUON_CUBIC5] = {5,
                     false,
                     {{3.3656576f, -3.3420992f, 0.0f},
                      {2.5744352f, -1.4957376f, 0.0f},
                      {2.5368962f, -1.4312570f, 0.0f},
                      {2.4418906f, -1.2764040f, 0.0f},
                      {2.2230472f, -0.9630650f, 0.0f}}},
};

void muon_coefficients(MuonCoefficients type, NewtonSchulzStep *step, int steps) {
    assert(steps >= 1 && steps <= MOST_MUON_STEPS);
    int count = SETS[type].count;
    for (int i = 0; i < steps; i++)
        step[i] = SETS[type].step[i < count ? i : SETS[type].repeats ? i % count : count - 1];
}

double muon_scale(MuonScale mode, int64_t rows, int64_t columns) {
    assert(rows >= 1 && columns >= 1);
    double out = (double)rows, in = (double)columns;
    switch (mode) {
        case MUON_UNIT_RMS_NORM: return sqrt(out / in);
        case MUON_SHAPE_SCALING: return sqrt(out > in ? out / in : 1.0);
        default: return sqrt(out > in ? out : in);
    }
}

// --- buffers -------------------------------------------------------------------------------------

// Elements of the largest matrix that a rank updates, that is gathered, and that is orthogonalized,
// and bytes of op_newton_schulz.
typedef struct Sizes {
    size_t matrix, gathered, part, workspace;
} Sizes;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static Sizes sizes_of(const Base *base) {
    Sizes sizes = {0};
    for (int i = 0; i < base->layout.tensors; i++) {
        const Tensor *tensor = &base->tensors[i];
        MuonShape shape = muon_orthogonalized(&tensor->muon);
        if (shape.columns == 0) continue;
        sizes.matrix = larger(sizes.matrix, (size_t)tensor_elements(tensor));
        if (tensor->muon.duplicated)
            sizes.gathered = larger(sizes.gathered, (size_t)tensor_whole_elements(tensor));
        for (int part = 0; part < MUON_PARTS; part++) {
            int64_t rows = shape.groups * shape.part[part];
            if (rows == 0) continue;
            sizes.part = larger(sizes.part, (size_t)(rows * shape.columns));
            sizes.workspace = larger(sizes.workspace, op_newton_schulz_bytes(rows, shape.columns));
        }
    }
    return sizes;
}

void muon_reserve(const Base *base, Muon *muon, bool on_host, MemoryPlan *memory_plan) {
    Sizes sizes = sizes_of(base);
    const char *group = "Newton-Schulz", *host = "host memory";
    if (sizes.matrix == 0) return;
    muon->steps = base->config->muon_num_ns_steps;
    muon_coefficients(base->config->muon_coefficient_type, muon->step, muon->steps);
    memory_plan_reserve(memory_plan, group, "normalized momentum", sizes.part * sizeof(floatX),
                        (void **)&muon->x);
    memory_plan_reserve(memory_plan, group, "sums of squares",
                        (size_t)ceil_div64((int64_t)sizes.part, HADAMARD_ORDER) * sizeof(float),
                        (void **)&muon->partials);
    memory_plan_reserve(memory_plan, group, "norm", sizeof(float), (void **)&muon->sum);
    memory_plan_reserve(memory_plan, group, "products", sizes.workspace, &muon->workspace);
    size_t directions = larger(sizes.gathered, on_host ? sizes.matrix : 0);
    if (directions)
        memory_plan_reserve(memory_plan, group,
                            sizes.gathered ? "momentum of a whole matrix" : "uploaded momentum",
                            directions * sizeof(float), (void **)&muon->directions);
    if (!on_host) return;
    memory_plan_reserve_host(memory_plan, host, "momentum of a matrix", sizes.matrix * sizeof(float),
                             (void **)&muon->direction);
    memory_plan_reserve_host(memory_plan, host, "orthogonalized momentum", sizes.part * sizeof(floatX),
                             (void **)&muon->orthogonal);
}

// --- one matrix ----------------------------------------------------------------------------------

// Returns the scale of the whole matrix, of which tensor-parallel ranks may have parts.
static float scale_of(const Config *c, const MuonShape *shape, int64_t rows) {
    int64_t out = rows * (shape->row_ranks ? shape->row_ranks : 1);
    int64_t in = shape->columns * (shape->column_ranks ? shape->column_ranks : 1);
    return (float)(c->muon_extra_scale_factor * muon_scale(c->muon_scale_mode, out, in));
}

// Returns how tensor-parallel ranks divide the columns of a tensor; all 0 unless they do.
static MuonColumns columns_of(const Tensor *tensor) {
    MuonColumns columns = {tensor->whole[1], tensor->local[1], tensor_elements(tensor)}, undivided = {0};
    return tensor->split == 1 ? columns : undivided;
}

// Returns part `part` of a matrix without the pointers to its state. rows is 0 if there is none.
static MuonPart part_of(const Base *base, const MuonShape *shape, int part, double weight_decay) {
    float mu = (float)base->config->muon_momentum;
    MuonPart a = {.control = base->control,
                  .mu = mu,
                  .one_minus_mu = f32_sub(1.0f, mu),
                  .nesterov = base->config->muon_nesterov,
                  .weight_decay = (float)weight_decay,
                  .columns = shape->columns,
                  .part_rows = shape->part[part],
                  .rows = shape->groups * shape->part[part]};
    for (int i = 0; i < MUON_PARTS; i++) {
        if (i < part) a.first_row += shape->part[i];
        a.group_rows += shape->part[i];
    }
    if (a.rows > 0) a.scale = scale_of(base->config, shape, a.rows);
    return a;
}

// Returns part `part` of this rank's slice of a matrix without the pointers to its state.
static MuonPart own_part(const Base *base, const Tensor *tensor, int part, double weight_decay) {
    MuonPart a = part_of(base, &tensor->muon, part, weight_decay);
    if (tensor->muon.duplicated) a.sliced = columns_of(tensor);
    return a;
}

// Returns part `part` of the matrix whose U is in muon->directions.
static MuonPart part_of_directions(const Base *base, const Muon *muon, const Tensor *tensor, int part) {
    MuonShape shape = muon_orthogonalized(&tensor->muon);
    MuonPart a = part_of(base, &shape, part, 0);
    a.grads = a.momentum = muon->directions;
    a.nesterov = false;
    if (tensor->muon.duplicated) a.gathered = columns_of(tensor);
    return a;
}

// Returns this rank's slot in muon->directions, or NULL if there is no such buffer.
static float *own_direction(const Base *base, const Muon *muon, const Tensor *tensor) {
    int slot = tensor->muon.duplicated ? base->mesh->tp.rank : 0;
    return muon->directions ? muon->directions + slot * tensor_elements(tensor) : NULL;
}

// Gathers U from the tensor-parallel ranks if they orthogonalize the whole matrix.
static void gather_directions(const Base *base, const Muon *muon, const Tensor *tensor, Stream *stream) {
    if (!tensor->muon.duplicated) return;
    comm_all_gather(&base->mesh->tp, muon->directions, (size_t)tensor_elements(tensor) * sizeof(float),
                    stream);
}

// Returns the orthogonalized momentum of a part (rows, columns).
static const floatX *orthogonalize(const Muon *muon, Stream *stream, const MuonPart *a) {
    kernel_muon_squares(stream, a, muon->partials);
    kernel_tree_sum(stream, muon->sum, muon->partials, ceil_div64(a->rows * a->columns, HADAMARD_ORDER));
    kernel_muon_normalize(stream, a, muon->sum, muon->x);
    NewtonSchulz iteration = {a->rows, a->columns, muon->step, muon->steps, muon->x, muon->workspace};
    return op_newton_schulz(stream, &iteration);
}

// Returns the orthogonalized momentum of the matrix in muon->directions, from the first element on
// that `own`, this rank's slice of the part, needs.
static const floatX *orthogonalize_directions(const Base *base, const Muon *muon, Stream *stream,
                                              const Tensor *tensor, int part, const MuonPart *own) {
    MuonPart a = part_of_directions(base, muon, tensor, part);
    int64_t rank = tensor->muon.duplicated ? base->mesh->tp.rank : 0;
    int64_t slice = own->sliced.own ? own->sliced.own : own->rows * own->columns;
    return orthogonalize(muon, stream, &a) + rank * slice;
}

// Sets *at to the position in this rank's shard of matrix i of bucket b. Returns its tensor, or
// NULL if the shard does not have it.
static const Tensor *matrix_of(const Base *base, int b, int i, int64_t *at) {
    Range range;
    if (!base_cut_segment(base->state, b, i, base_state_shard(base), &range, at)) return NULL;
    const Tensor *tensor = &base->tensors[range.tensor];
    assert(range.lo == 0 && range.hi == tensor_elements(tensor) && tensor->muon.columns);
    return tensor;
}

// --- updates on the device -----------------------------------------------------------------------

void muon_update(const Base *base, const Muon *muon, int b, BucketState *state, double weight_decay) {
    assert(b >= 0 && b < base->layout.buckets);
    Stream *stream = base->lanes->last;
    int64_t at;
    if (!base->state->bucket[b].whole) return;
    for (int i = 0; i < base->state->bucket[b].segments; i++) {
        const Tensor *tensor = matrix_of(base, b, i, &at);
        for (int part = 0; tensor && part < MUON_PARTS; part++) {
            bool gathered = tensor->muon.duplicated;
            MuonPart a = own_part(base, tensor, part, weight_decay);
            a.grads = state->grads.matrix + at;
            if (state->momentum_bf16) a.momentum_bf16 = state->momentum_bf16 + at;
            else a.momentum = state->exp_avg + at;
            a.master = state->master + at;
            a.fault = base->checks->fault;
            a.code = fault_code(FAULT_OF_UPDATE, (uint64_t)b);
            if (part == 0) {
                kernel_muon_momentum(stream, &a, tensor_elements(tensor),
                                     gathered ? own_direction(base, muon, tensor) : NULL);
                gather_directions(base, muon, tensor, stream);
            }
            if (a.rows == 0) continue;
            kernel_muon_apply(stream, &a,
                              gathered ? orthogonalize_directions(base, muon, stream, tensor, part, &a)
                                       : orthogonalize(muon, stream, &a));
        }
    }
    state->grads.matrix = NULL;
}

// --- updates on the host -------------------------------------------------------------------------

// Context of the host calls for a matrix.
typedef struct HostMatrix {
    const Muon *muon;
    UpdateShard shard;
    MuonPart part;
    int64_t at, elements;  // position of the matrix in the shard, and its size
} HostMatrix;

// Returns the part with pointers to its state, which may be the chunk of the disk that is updated
// next.
static MuonPart part_in_memory(const HostMatrix *h) {
    DiskState *disk = h->muon->disk;
    UpdateShard shard = disk ? disk_open_chunk(disk, &h->shard) : h->shard;
    MuonPart a = h->part;
    a.control = shard.control;
    a.grads = shard.matrix_grads + h->at;
    if (shard.momentum_bf16) a.momentum_bf16 = shard.momentum_bf16 + (disk ? 0 : h->at);
    else a.momentum = shard.exp_avg + (disk ? 0 : h->at);
    a.master = shard.master + (disk ? 0 : h->at);
    a.fault = shard.fault;
    a.code = shard.code;
    return a;
}

static void run_momentum(void *context) {
    const HostMatrix *h = (const HostMatrix *)context;
    const QwdHost *host = h->muon->host;
    MuonPart a = part_in_memory(h);
    muon_momentum_host(&a, h->elements, h->muon->direction, host->threads, stream_site(host->stream));
}

static void run_apply(void *context) {
    const HostMatrix *h = (const HostMatrix *)context;
    const QwdHost *host = h->muon->host;
    MuonPart a = part_in_memory(h);
    muon_apply_host(&a, h->muon->orthogonal, host->threads, stream_site(host->stream));
}

// Codes the weights of the next chunk, or of the whole shard, and updates its tail.
static void run_codes(void *context) {
    const HostMatrix *h = (const HostMatrix *)context;
    const QwdHost *host = h->muon->host;
    UpdateShard shard = h->shard;
    shard.matrix_grads = NULL;
    if (h->muon->disk) disk_update_chunk(h->muon->disk, &shard, host->threads, stream_site(host->stream));
    else update_shard_host(&shard, host->threads, stream_site(host->stream));
}

// Queues the update of a matrix. The device normalizes and orthogonalizes the momentum.
static void queue_matrix(const Muon *muon, HostMatrix *h, const Tensor *tensor) {
    Stream *stream = muon->host->stream;
    h->elements = tensor_elements(tensor);
    for (int part = 0; part < MUON_PARTS; part++) {
        h->part = own_part(muon->base, tensor, part, (double)h->shard.weight_decay);
        if (part == 0) {
            stream_host_call(stream, run_momentum, h, sizeof *h);
            copy_from_pinned(stream, own_direction(muon->base, muon, tensor), muon->direction,
                             (size_t)h->elements * sizeof(float));
            gather_directions(muon->base, muon, tensor, stream);
        }
        int64_t elements = h->part.rows * h->part.columns;
        if (elements == 0) continue;
        copy_to_pinned(stream, muon->orthogonal,
                       orthogonalize_directions(muon->base, muon, stream, tensor, part, &h->part),
                       (size_t)(muon_output_index(&h->part, elements - 1) + 1) * sizeof(floatX));
        stream_host_call(stream, run_apply, h, sizeof *h);
    }
}

// Queue the update of a bucket of matrices (HostQueue of qwd.h).
static void queue_in_memory(void *context, int b, const UpdateShard *shard) {
    const Muon *muon = (const Muon *)context;
    HostMatrix h = {.muon = muon, .shard = *shard};
    for (int i = 0; i < shard->bucket.segments; i++) {
        const Tensor *tensor = matrix_of(muon->base, b, i, &h.at);
        if (tensor) queue_matrix(muon, &h, tensor);
    }
    stream_host_call(muon->host->stream, run_codes, &h, sizeof h);
}

// On disk, every matrix is one chunk. The other chunks hold padding or the tail.
static void queue_on_disk(void *context, int b, const UpdateShard *shard) {
    const Muon *muon = (const Muon *)context;
    const DiskState *disk = muon->disk;
    HostMatrix h = {.muon = muon, .shard = *shard};
    for (int64_t i = disk->bucket_chunk[b]; i < disk->bucket_chunk[b + 1]; i++) {
        const DiskChunk *chunk = &disk->chunk[i];
        h.at = chunk->first;
        if (chunk->tensor >= 0) queue_matrix(muon, &h, &muon->base->tensors[chunk->tensor]);
        stream_host_call(muon->host->stream, run_codes, &h, sizeof h);
    }
}

// --- start and end -------------------------------------------------------------------------------

void muon_start(const Base *base, Muon *muon) {
    bool gathers = false;
    for (int i = 0; i < base->layout.tensors; i++) gathers |= base->tensors[i].muon.duplicated;
    if (gathers) muon->gathered = event_create(base->device);
}

void muon_free(Muon *muon) {
    if (muon->gathered) event_destroy(muon->gathered);
}

void muon_updated(const Base *base, const Muon *muon) {
    if (!muon->gathered) return;
    event_record(muon->gathered, muon->host ? muon->host->stream : base->lanes->last);
    timer_start(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    stream_wait(base->compute, muon->gathered);
    timer_stop(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
}

void muon_start_on_host(const Base *base, Muon *muon, QwdHost *host, DiskState *disk) {
    assert(host->stream);
    muon->base = base;
    muon->host = host;
    muon->disk = disk;
    host->queue = disk ? queue_on_disk : queue_in_memory;
    host->queue_context = muon;
}
