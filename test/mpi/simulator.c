// See simulator.h. The sections follow sdp4bit/README.md.
#include "test/mpi/simulator.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// --- quantizing and decoding n values ----------------------------------------------------------

typedef struct Hop {
    Codec codec;
    int group;
    Rounding rounding;
    RoundingKey key;
} Hop;

// Sums n values (a power of two) as a perfect binary tree.
static float tree_of(const float *x, int n) {
    return n == 1 ? x[0] : tree_of(x, n / 2) + tree_of(x + n / 2, n / 2);
}

// Quantizes and decodes one EDEN group.
static void send_eden(float *x, uint32_t largest, int bits) {
    float z[256], term[256], sign[256];
    EdenLift e = eden_lift(largest);
    for (int i = 0; i < 256; i++) {
        sign[i] = signbit(x[i]) ? -1.0f : 1.0f;
        z[i] = fabsf(x[i]) * e.lift;
        term[i] = z[i] * z[i];
    }
    float squares = tree_of(term, 256), inverse = eden_inverse(squares, f32_from_bits(largest) * e.lift);
    for (int i = 0; i < 256; i++) {
        x[i] = eden_level(bits, eden_code(z[i] * inverse, 0, bits));
        term[i] = z[i] * x[i];
    }
    float scale = e.coded ? eden_scale(squares, tree_of(term, 256), e.unlift) : e.scale;
    for (int i = 0; i < 256; i++) x[i] = e.coded && !isnan(scale) ? sign[i] * x[i] * scale : scale;
}

// Quantizes and decodes one group. logical: logical offset of x[0], which selects the rounding
// bits.
static void send_group(float *x, int group, const Hop *hop, int64_t logical) {
    int levels = codec_info(hop->codec).levels;
    uint32_t largest = 0;
    for (int i = 0; i < group; i++) {
        uint32_t magnitude = f32_bits(x[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (codec_eden(hop->codec)) {
        send_eden(x, largest, codec_info(hop->codec).bits);
        return;
    }
    GroupScale g = group_scale(largest, levels);
    Philox4 bits = {{0}};
    for (int i = 0; i < group; i++) {
        int64_t offset = logical + i;
        if (i % 8 == 0) bits = rounding_bits(hop->key, (uint64_t)(offset / 8));
        float v = group_scaled(x[i], g);
        int q = code_nearest(v, levels);
        if (hop->rounding == ROUND_STOCHASTIC)
            q = code_stochastic(v, levels, philox_half(bits, (int)(offset % 8)));
        x[i] = code_value(q, g.scale);
    }
}

// Quantizes and decodes n values, a multiple of the group size for quantizing codecs.
static void send(float *x, int64_t n, const Hop *hop, int64_t logical) {
    if (codec_grouped(hop->codec)) {
        for (int64_t i = 0; i < n; i += hop->group) send_group(x + i, hop->group, hop, logical + i);
    } else if (hop->codec == CODEC_BF16) {
        for (int64_t i = 0; i < n; i++) x[i] = bf16_to_float(bf16_from_float(x[i]));
    }
}

typedef struct Rotation {
    Transform kind;
    RoundingKey signs;
    int64_t logical;  // logical offset of the tensor's first element
} Rotation;

// Applies the rotation's signs to n elements, a multiple of 32.
static void flip_signs(float *x, int64_t n, const Rotation *r) {
    for (int64_t i = 0; r->kind == TRANSFORM_ROTATION && i < n; i++) {
        int64_t offset = r->logical + i;
        Philox4 bits = rounding_bits(r->signs, (uint64_t)(offset / 128));
        if (bits.v[offset / 32 % 4] >> offset % 32 & 1) x[i] = -x[i];
    }
}

// Applies the transform and its inverse.
static void transform(float *x, int64_t n, const Rotation *r) {
    int order = r->kind == TRANSFORM_ROTATION ? 256 : 32;
    flip_signs(x, n, r);
    for (int64_t i = 0; r->kind && i < n; i += order) hadamard(x + i, order);
}
static void invert(float *x, int64_t n, const Rotation *r) {
    int order = r->kind == TRANSFORM_ROTATION ? 256 : 32;
    for (int64_t i = 0; r->kind && i < n; i += order) hadamard(x + i, order);
    for (int64_t i = 0; r->kind && i < n; i++) x[i] *= 1.0f / (float)order;
    flip_signs(x, n, r);
}

void simulator_transform(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical) {
    Rotation rotation = {kind, signs, logical};
    transform(x, n, &rotation);
}

void simulator_invert(float *x, int64_t n, Transform kind, RoundingKey signs, int64_t logical) {
    Rotation rotation = {kind, signs, logical};
    invert(x, n, &rotation);
}

void simulator_send(float *x, int64_t n, Codec codec, int group, Rounding rounding, RoundingKey key,
                    int64_t logical) {
    Hop hop = {codec, group, rounding, key};
    send(x, n, &hop, logical);
}

// --- the reduction of one tensor ----------------------------------------------------------------

typedef struct Place {
    int64_t arena, numel, logical;
    bool matrix;
} Place;

static Place place_of(const Simulator *sim, int tensor) {
    const BucketLayout *layout = sim->options.layout;
    Place place = {layout->tensor_arena[tensor], sim->options.tensors[tensor].numel, 0,
                   sim->options.tensors[tensor].matrix};
    for (int i = 0; i < tensor; i++) {
        const LayoutTensor *t = &sim->options.tensors[i];
        place.logical += round_up64(t->before + t->numel + t->after, 32);
    }
    place.logical += sim->options.tensors[tensor].before;
    return place;
}

static void add_to(float *sum, const float *x, int64_t n, bool first) {
    for (int64_t i = 0; i < n; i++) sum[i] = first ? x[i] : sum[i] + x[i];
}

typedef struct Reduction {
    Hop level1, level2;  // the keys' sources are set later
    Rotation rotation;
    int64_t n;  // number of elements, padded with zeros to whole groups
    int64_t logical;
} Reduction;

// Quantizes and decodes the n elements of a tensor that node `node` sends to the other nodes. With
// error feedback, adds the residual first and stores the new residual for the tensor's elements.
static void send_between(const Simulator *sim, const Reduction *r, const Place *place, int node, float *x) {
    Hop hop = r->level2;
    hop.key.source = (uint32_t)node;
    if (!sim->options.error_feedback || !place->matrix) {
        send(x, r->n, &hop, r->logical);
        return;
    }
    float *residual = sim->residual + node * sim->options.layout->arena_elements + place->arena;
    for (int64_t i = 0; i < r->n; i++) x[i] = (i < place->numel ? residual[i] : 0.0f) + x[i];
    for (int64_t i = 0; i < place->numel; i++) residual[i] = x[i];
    send(x, r->n, &hop, r->logical);
    for (int64_t i = 0; i < place->numel; i++) {
        residual[i] -= x[i];
        if (!isfinite(residual[i])) residual[i] = 0.0f;
    }
}

// Clears residuals after a skipped step.
static void forget(Simulator *sim, const Place *place) {
    for (int node = 0; sim->options.error_feedback && node < sim->options.layout->options.nodes; node++) {
        float *residual = sim->residual + node * sim->options.layout->arena_elements + place->arena;
        memset(residual, 0, (size_t)place->numel * sizeof *residual);
    }
}

static void reduce_tensor(const Simulator *sim, const Reduction *r, const Place *place, float *const *grads,
                          float *total) {
    int nodes = sim->options.layout->options.nodes, per_node = sim->options.layout->options.per_node;
    float *x = (float *)xmalloc((size_t)r->n * sizeof *x, "a tensor"),
          *node_sum = (float *)xmalloc((size_t)r->n * sizeof *x, "a tensor");
    float share = 1.0f / (float)(nodes * per_node);
    for (int node = 0; node < nodes; node++) {
        for (int local = 0; local < per_node; local++) {
            int rank = node * per_node + local;
            for (int64_t i = 0; i < r->n; i++)
                x[i] = i < place->numel ? grads[rank][place->arena + i] * share : 0.0f;
            transform(x, r->n, &r->rotation);
            Hop hop = r->level1;
            hop.key.source = (uint32_t)rank;
            if (per_node > 1) send(x, r->n, &hop, r->logical);
            add_to(node_sum, x, r->n, local == 0);
        }
        if (nodes > 1) send_between(sim, r, place, node, node_sum);
        add_to(total, node_sum, r->n, node == 0);
    }
    invert(total, r->n, &r->rotation);
    free(x);
    free(node_sum);
}

// Separately reduced micro-batches use different random bits.
static Reduction reduction_of(const Simulator *sim, const Place *place, uint32_t step, int micro_batch) {
    uint32_t number = 256 * (uint32_t)micro_batch;
    const GradFormat *format = &sim->options.grad;
    Hop level1 = {format->intra_codec,
                  format->intra_group,
                  format->rounding,
                  {sim->options.seed, step, PURPOSE_GRAD_LEVEL1 + number, 0}};
    Hop level2 = {format->inter_codec,
                  format->inter_group,
                  format->rounding,
                  {sim->options.seed, step, PURPOSE_GRAD_LEVEL2 + number, 0}};
    Rotation rotation = {format->transform,
                         {sim->options.seed, step, PURPOSE_ROTATION + number, 0},
                         place->logical};
    if (sim->options.error_feedback) {  // the same rotation in every reduction
        rotation.signs.step = 0;
        rotation.signs.purpose = PURPOSE_ROTATION;
    }
    Reduction r = {level1, level2, rotation, 0, place->logical};
    r.n = round_up64(place->numel, lcm64(HADAMARD_ORDER, lcm64(format->intra_group, format->inter_group)));
    if (!place->matrix) {
        r.level1.codec = r.level2.codec = format->tail_codec;
        r.rotation.kind = TRANSFORM_NONE;
        r.n = place->numel;
    }
    return r;
}

void simulator_add(Simulator *sim, float *const *grads, const bool *tensors, uint32_t step, int micro_batch) {
    for (int t = 0; t < sim->options.layout->tensors; t++) {
        Place place = place_of(sim, t);
        float *out = sim->reduced + place.arena;
        if (tensors && !tensors[t]) continue;
        if (sim->options.layout->dp == 1) {
            memcpy(out, grads[0] + place.arena, (size_t)place.numel * sizeof *out);
            continue;
        }
        if (micro_batch == 0 && !sim->control.applied) forget(sim, &place);
        Reduction r = reduction_of(sim, &place, step, micro_batch);
        float *total = (float *)xmalloc((size_t)r.n * sizeof *total, "a tensor");
        reduce_tensor(sim, &r, &place, grads, total);
        add_to(out, total, place.numel, micro_batch == 0);
        free(total);
    }
}

void simulator_reduce(Simulator *sim, float *const *grads, uint32_t step) {
    simulator_add(sim, grads, NULL, step, 0);
}

// --- the norm -----------------------------------------------------------------------------------

// Sums the squares of n values as a perfect binary tree that is padded with zeros. The size of the
// left half is the largest power of two below n.
static float tree_of_squares(const float *x, int64_t n) {
    if (n == 0) return 0.0f;
    if (n == 1) return x[0] * x[0];
    int64_t left = 1;
    while (2 * left < n) left *= 2;
    return tree_of_squares(x, left) + tree_of_squares(x + left, n - left);
}

// Sums the squares of the reduced gradient's elements [from, from + n) of the arena, except
// elements that other ranks count.
static float counted_squares(const Simulator *sim, int64_t from, int64_t n) {
    const BucketLayout *layout = sim->options.layout;
    float *x = (float *)xmalloc((size_t)(n + 1) * sizeof *x, "a piece");
    memcpy(x, sim->reduced + from, (size_t)n * sizeof *x);
    for (int t = 0; t < layout->tensors; t++) {
        int64_t start = layout->tensor_arena[t] - from, end = start + sim->options.tensors[t].numel;
        if (!sim->options.tensors[t].uncounted) continue;
        for (int64_t i = start < 0 ? 0 : start; i < end && i < n; i++) x[i] = 0.0f;
    }
    float sum = tree_of_squares(x, n);
    free(x);
    return sum;
}

void simulator_records(Simulator *sim, const float *losses) {
    const BucketLayout *layout = sim->options.layout;
    for (int rank = 0; rank < layout->dp; rank++) {
        double sum = 0;
        for (int b = 0; b < layout->buckets; b++) {
            const Bucket *bucket = &layout->bucket[b];
            int64_t matrices = bucket->arena_start + rank * bucket->matrix_per_rank;
            int64_t tails = bucket->arena_start + bucket->matrix_elements + rank * bucket->tail_per_rank;
            sum += (double)counted_squares(sim, matrices, bucket->matrix_per_rank);
            sum += (double)counted_squares(sim, tails, bucket->tail_per_rank);
        }
        sim->records[rank].sum_squares = sum;
        sim->records[rank].loss = (double)losses[rank];
        sim->records[rank].fault = sim->fault[rank];
    }
}

// --- the step status -----------------------------------------------------------------------------

// Updates a running mean as in step_status.h. Returns the limit above which a value is a spike.
static float follow(SpikeTrack *track, float value, float factor, int64_t before, bool finite) {
    float limit = INFINITY;
    if (factor > 0 && before >= 32)
        limit = (float)(track->mean + (double)factor * fmax(track->deviation, 0.01 * fabs(track->mean)));
    if (!finite) return limit;
    double n = (double)(before + 1 < 64 ? before + 1 : 64),
           distance = (double)fminf(value, limit) - track->mean;
    track->mean += distance / n;
    if (before > 0) track->deviation += (fabs(distance) - track->deviation) / n;
    return limit;
}

static bool spike(Simulator *sim, bool finite) {
    SpikeState *s = &sim->control.spikes;
    float loss = sim->control.loss, norm = sim->control.grad_norm;
    s->loss_limit = follow(&s->loss, loss, sim->options.spike_factor, s->seen, finite);
    s->norm_limit = follow(&s->norm, norm, sim->options.spike_factor, s->seen, finite);
    s->found = finite ? (loss > s->loss_limit) + 2 * (norm > s->norm_limit) : 0;
    s->seen += finite;
    return s->found;
}

static void judge(Simulator *sim, const SimulatedWorld *world, float lr_if_applied, float lr_if_skipped) {
    StepStatus *c = &sim->control;
    double squares = 0, loss = 0;
    for (int r = 0; r < world->ranks; r++) squares += world->records[r].sum_squares;
    for (int r = 0; r < world->ranks; r++) loss += world->records[r].loss;
    c->learning_rate = c->applied ? lr_if_applied : lr_if_skipped;
    c->loss = (float)(loss / world->losses);
    c->grad_norm = (float)sqrt(squares);
    c->clip_coefficient = 1.0f;
    if (sim->options.clip_grad > 0) {
        float coefficient = sim->options.clip_grad / (c->grad_norm + 1e-6f);
        if (coefficient < 1.0f) c->clip_coefficient = coefficient;
    }
    bool finite = isfinite(squares) && isfinite(loss);
    spike(sim, finite);  // spikes are only reported
    c->fault = 0;
    c->fault_rank = 0;
    for (int r = world->ranks - 1; r >= 0; r--) {
        uint64_t fault = world->records[r].fault;
        if (fault && (!c->fault || fault <= c->fault)) c->fault = fault, c->fault_rank = r;
    }
    c->applied = (!sim->options.skip_non_finite || finite) && !c->fault;
    c->spikes.skipped_in_a_row = c->applied ? 0 : c->spikes.skipped_in_a_row + 1;
    if (c->applied) {
        c->adam_steps++;
        c->beta1_power *= (double)sim->options.beta1;
        c->beta2_power *= (double)sim->options.beta2;
        c->bias_correction1 = (float)(1 - c->beta1_power);
        c->bias_correction2 = (float)(1 - c->beta2_power);
    }
}

// --- AdamW --------------------------------------------------------------------------------------

// Records that an element's update was refused. The owner's fault names the first such bucket.
static void refuse(Simulator *sim, const Place *place, int64_t at) {
    const BucketLayout *layout = sim->options.layout;
    int b = 0;
    while (b + 1 < layout->buckets && layout->bucket[b + 1].arena_start <= at) b++;
    const Bucket *bucket = &layout->bucket[b];
    int64_t position = at - bucket->arena_start;
    int64_t rank = place->matrix ? position / bucket->matrix_per_rank
                                 : (position - bucket->matrix_elements) / bucket->tail_per_rank;
    uint64_t fault = (uint64_t)1 << 62 | (uint64_t)b;
    if (!sim->fault[rank] || fault < sim->fault[rank]) sim->fault[rank] = fault;
}

static void adamw(Simulator *sim, const Place *place) {
    const SimulatorOptions *o = &sim->options;
    const StepStatus *c = &sim->control;
    float decay = place->matrix ? o->weight_decay : 0.0f;
    for (int64_t i = place->arena; i < place->arena + place->numel; i++) {
        float p = sim->master[i], g = sim->reduced[i] * c->clip_coefficient;
        float m = o->beta1 * sim->exp_avg[i] + (1.0f - o->beta1) * g;
        float v = o->beta2 * sim->exp_avg_sq[i] + (1.0f - o->beta2) * g * g;
        float step = m / c->bias_correction1 / (sqrtf(v / c->bias_correction2) + o->epsilon) + decay * p;
        p -= c->learning_rate * step;
        if (!isfinite(m) || !isfinite(v) || !(fabsf(p) < 0x1p126f)) {
            refuse(sim, place, i);
            continue;
        }
        sim->exp_avg[i] = m;
        sim->exp_avg_sq[i] = v;
        sim->master[i] = p;
    }
}

// --- Muon ---------------------------------------------------------------------------------------

// Updates the rows of a matrix that `row` lists: (rows) indices.
static void muon_rows(Simulator *sim, const Place *place, const MuonShape *shape, const int64_t *row,
                      int64_t rows) {
    int64_t columns = shape->columns, out = rows * shape->row_ranks, in = columns * shape->column_ranks;
    const SimulatedMuon *muon = sim->muon;
    const StepStatus *c = &sim->control;
    int64_t n = rows * columns, padded = 1;
    while (padded < n) padded *= 2;
    float *u = (float *)xcalloc((size_t)padded, sizeof *u, "a matrix");
    float *squares = (float *)xcalloc((size_t)padded, sizeof *squares, "a matrix");
    floatX *x = (floatX *)xcalloc((size_t)n, sizeof *x, "a matrix");
    for (int64_t i = 0; i < n; i++) {
        int64_t at = place->arena + row[i / columns] * columns + i % columns;
        float g = sim->reduced[at] * c->clip_coefficient, mu = muon->momentum;
        sim->exp_avg[at] = mu * sim->exp_avg[at] + (1.0f - mu) * g;
        u[i] = muon->nesterov ? mu * sim->exp_avg[at] + (1.0f - mu) * g : sim->exp_avg[at];
        squares[i] = u[i] * u[i];
    }
    float norm = sqrtf(tree_of(squares, (int)padded));
    for (int64_t i = 0; i < n; i++) x[i] = floatX_from_float(u[i] / fmaxf(norm, 1e-15f));
    muon->orthogonalize(muon->context, x, rows, columns);
    float scale = (float)((double)muon->extra_scale * sqrt((double)(out > in ? out : in)));
    float decay = 1.0f - c->learning_rate * sim->options.weight_decay, rate = c->learning_rate * scale;
    for (int64_t i = 0; i < n; i++) {
        float *p = &sim->master[place->arena + row[i / columns] * columns + i % columns];
        *p = *p * decay - rate * floatX_to_float(x[i]);
    }
    free(u);
    free(squares);
    free(x);
}

static void muon(Simulator *sim, const Place *place, const MuonShape *shape) {
    int64_t rows = place->numel / shape->columns, group = rows / shape->groups, first = 0;
    int64_t *row = (int64_t *)xcalloc((size_t)rows, sizeof *row, "a matrix");
    for (int part = 0; part < MUON_PARTS; part++) {
        int64_t count = 0;
        for (int64_t r = 0; r < rows; r++) {
            if (r % group >= first && r % group < first + shape->part[part]) row[count++] = r;
        }
        if (count) muon_rows(sim, place, shape, row, count);
        first += shape->part[part];
    }
    free(row);
}

// --- the weights --------------------------------------------------------------------------------

static void send_differences(Simulator *sim, const Place *place, uint32_t step) {
    const WeightFormat *format = &sim->options.weight;
    int64_t n = round_up64(place->numel, format->group);
    float *x = (float *)xcalloc((size_t)n, sizeof *x, "a tensor");
    const float *master = sim->master + place->arena;
    floatX *w = sim->replica + place->arena;
    for (int64_t i = 0; i < place->numel; i++)
        x[i] = format->difference ? master[i] - floatX_to_float(w[i]) : master[i];
    Hop hop = {format->codec, format->group, format->rounding, {sim->options.seed, step, PURPOSE_WEIGHT, 0}};
    send(x, n, &hop, place->logical);
    for (int64_t i = 0; i < place->numel; i++)
        w[i] = floatX_from_float(format->difference ? floatX_to_float(w[i]) + x[i] : x[i]);
    free(x);
}

static void update_replica(Simulator *sim, const Place *place, uint32_t step) {
    if (codec_grouped(sim->options.weight.codec) && place->matrix && sim->options.layout->dp > 1) {
        send_differences(sim, place, step);
        return;
    }
    for (int64_t i = place->arena; i < place->arena + place->numel; i++)
        sim->replica[i] = floatX_from_float(sim->master[i]);
}

// --- complete steps -----------------------------------------------------------------------------

void simulator_update(Simulator *sim, const SimulatedWorld *world, uint32_t step, float lr_if_applied,
                      float lr_if_skipped) {
    judge(sim, world, lr_if_applied, lr_if_skipped);
    for (int t = 0; sim->control.applied && t < sim->options.layout->tensors; t++) {
        Place place = place_of(sim, t);
        const SimulatedMuon *other = sim->muon;
        if (other && other->shape[t].columns) muon(sim, &place, &other->shape[t]);
        else adamw(sim, &place);
        update_replica(sim, &place, step);
    }
}

void simulator_step(Simulator *sim, float *const *grads, const float *losses, uint32_t step,
                    float lr_if_applied, float lr_if_skipped) {
    int dp = sim->options.layout->dp;
    SimulatedWorld world = {sim->records, dp, dp};
    simulator_reduce(sim, grads, step);
    simulator_records(sim, losses);
    simulator_update(sim, &world, step, lr_if_applied, lr_if_skipped);
}

void simulator_create(Simulator *sim, const SimulatorOptions *options, const floatX *weights) {
    size_t n = (size_t)options->layout->arena_elements;
    Simulator fresh = {0};
    *sim = fresh;
    sim->options = *options;
    sim->reduced = (float *)xcalloc(n, sizeof(float), "the simulator");
    sim->master = (float *)xcalloc(n, sizeof(float), "the simulator");
    sim->exp_avg = (float *)xcalloc(n, sizeof(float), "the simulator");
    sim->exp_avg_sq = (float *)xcalloc(n, sizeof(float), "the simulator");
    sim->replica = (floatX *)xcalloc(n, sizeof(floatX), "the simulator");
    size_t nodes = (size_t)options->layout->options.nodes;
    sim->residual = (float *)xcalloc(options->error_feedback ? nodes * n : 1, sizeof(float), "the simulator");
    sim->records = (StepRecord *)xcalloc((size_t)options->layout->dp, sizeof(StepRecord), "the simulator");
    sim->fault = (uint64_t *)xcalloc((size_t)options->layout->dp, sizeof(uint64_t), "the simulator");
    for (size_t i = 0; i < n; i++) {
        sim->replica[i] = weights[i];
        sim->master[i] = floatX_to_float(weights[i]);
    }
    sim->control.beta1_power = sim->control.beta2_power = 1.0;
    sim->control.applied = 1;
}

void simulator_free(Simulator *sim) {
    free(sim->reduced);
    free(sim->master);
    free(sim->exp_avg);
    free(sim->exp_avg_sq);
    free(sim->replica);
    free(sim->residual);
    free(sim->records);
    free(sim->fault);
}

uint64_t simulator_hash(const Simulator *sim) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < sim->options.layout->arena_elements; i++) {
        uint32_t bits = 0;
        memcpy(&bits, &sim->replica[i], sizeof sim->replica[i]);
        hash += replica_mix((uint64_t)i, bits);
    }
    return hash;
}
