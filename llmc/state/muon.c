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

void muon_reserve(const Base *base, Muon *muon, MemoryPlan *memory_plan) {
    size_t most = 0, workspace = 0;
    for (int i = 0; i < base->layout.tensors; i++) {
        const MuonShape *shape = &base->tensors[i].muon;
        for (int part = 0; shape->columns > 0 && part < MUON_PARTS; part++) {
            int64_t rows = shape->groups * shape->part[part];
            if (rows == 0) continue;
            size_t bytes = op_newton_schulz_bytes(rows, shape->columns);
            if (bytes > workspace) workspace = bytes;
            if ((size_t)(rows * shape->columns) > most) most = (size_t)(rows * shape->columns);
        }
    }
    if (most == 0) return;
    muon->steps = base->config->muon_num_ns_steps;
    muon_coefficients(base->config->muon_coefficient_type, muon->step, muon->steps);
    const char *group = "Newton-Schulz";
    memory_plan_reserve(memory_plan, group, "normalized momentum", most * sizeof(floatX), (void **)&muon->x);
    memory_plan_reserve(memory_plan, group, "sums of squares",
                        (size_t)ceil_div64((int64_t)most, HADAMARD_ORDER) * sizeof(float),
                        (void **)&muon->partials);
    memory_plan_reserve(memory_plan, group, "norm", sizeof(float), (void **)&muon->sum);
    memory_plan_reserve(memory_plan, group, "products", workspace, &muon->workspace);
}

// --- the update ----------------------------------------------------------------------------------

// Returns the scale of the whole matrix, of which tensor-parallel ranks may have parts.
static float scale_of(const Config *c, const MuonShape *shape, int64_t rows) {
    int64_t out = rows * (shape->row_ranks ? shape->row_ranks : 1);
    int64_t in = shape->columns * (shape->column_ranks ? shape->column_ranks : 1);
    return (float)(c->muon_extra_scale_factor * muon_scale(c->muon_scale_mode, out, in));
}

static void update_part(const Base *base, const Muon *muon, MuonPart *a) {
    Stream *stream = base->lanes->last;
    int64_t n = a->rows * a->columns;
    kernel_muon_squares(stream, a, muon->partials);
    kernel_tree_sum(stream, muon->sum, muon->partials, ceil_div64(n, HADAMARD_ORDER));
    kernel_muon_normalize(stream, a, muon->sum, muon->x);
    NewtonSchulz iteration = {a->rows, a->columns, muon->step, muon->steps, muon->x, muon->workspace};
    kernel_muon_apply(stream, a, op_newton_schulz(stream, &iteration));
}

static void update_matrix(const Base *base, const Muon *muon, MuonPart *a, const Tensor *tensor) {
    const MuonShape *shape = &tensor->muon;
    kernel_muon_momentum(base->lanes->last, a, tensor_elements(tensor));
    a->columns = shape->columns;
    for (int part = 0; part < MUON_PARTS; part++) a->group_rows += shape->part[part];
    for (int part = 0; part < MUON_PARTS; part++) {
        a->part_rows = shape->part[part];
        a->rows = shape->groups * a->part_rows;
        a->scale = scale_of(base->config, shape, a->rows > 0 ? a->rows : 1);
        if (a->rows > 0) update_part(base, muon, a);
        a->first_row += a->part_rows;
    }
}

void muon_update(const Base *base, const Muon *muon, int b, BucketState *state, double weight_decay) {
    assert(b >= 0 && b < base->layout.buckets);
    if (!base->layout.bucket[b].whole) return;
    float mu = (float)base->config->muon_momentum;
    for (int i = 0; i < base->held_count; i++) {
        const Range *range = &base->ranges[i];
        const Tensor *tensor = &base->tensors[range->tensor];
        if (range->bucket != b || !tensor->muon.columns) continue;
        assert(range->lo == 0 && range->hi == tensor_elements(tensor));
        int64_t at = range->state_at - base_state_start(base, b);
        MuonPart a = {.control = base->control,
                      .grads = state->grads.matrix + at,
                      .momentum = state->exp_avg + at,
                      .master = state->master + at,
                      .mu = mu,
                      .one_minus_mu = f32_sub(1.0f, mu),
                      .nesterov = base->config->muon_nesterov,
                      .weight_decay = (float)weight_decay,
                      .fault = base->checks->fault,
                      .code = fault_code(FAULT_OF_UPDATE, (uint64_t)b)};
        update_matrix(base, muon, &a, tensor);
    }
    state->grads.matrix = NULL;
}
