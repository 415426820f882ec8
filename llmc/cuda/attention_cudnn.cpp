// cuDNN's fused causal attention through cudnn-frontend graphs. Host code only. Called by
// attention.cu, which uses attention_plain.cu if this file refuses a call. The Device keeps a pair
// of graphs (forward, backward) per shape.
//
// The graphs read and write qkv in place through strides. Strides cannot describe grouped-query
// attention in Megatron-LM's layout. Groups then run one after the other, unless by_kind is set.
//
// Batches with document masks, or whose length is not a multiple of 64, are packed: the rows of all
// samples of a slice follow each other, and cuDNN reads where each document starts and how long it
// is.
//
// In deterministic mode, cuDNN's backward pass stores the (T, T) gradients of the scores of all
// heads in the workspace. To bound its size, the batch is divided into slices that run one after
// the other: whole samples, or some heads of a sample. Forward uses the same slices, so that both
// have the same dropout masks.
#include <nvrtc.h>

// Stubs, so that the program does not need NVRTC. Only cudnn-frontend's experimental part, which is
// not used here, compiles kernels at run time.
template <class... Arguments> static nvrtcResult no_nvrtc(Arguments...) { return NVRTC_ERROR_INTERNAL_ERROR; }
#define nvrtcCreateProgram no_nvrtc
#define nvrtcDestroyProgram no_nvrtc
#define nvrtcCompileProgram no_nvrtc
#define nvrtcGetCUBIN no_nvrtc
#define nvrtcGetCUBINSize no_nvrtc
#define nvrtcGetProgramLog no_nvrtc
#define nvrtcGetProgramLogSize no_nvrtc
#include <cudnn_frontend.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "llmc/cuda/attention.h"
#include "llmc/cuda/limits.h"

namespace fe = cudnn_frontend;
namespace graph = cudnn_frontend::graph;
using TensorRef = std::shared_ptr<graph::Tensor_attributes>;

namespace {

// --- slices --------------------------------------------------------------------------------------

// The part of the batch that one execution processes: whole samples, or some heads of one sample,
// or, if groups run one after the other, one group of several samples.
struct Slice {
    int samples, heads;
};

int sharers_of(const Attention *a) { return a->NH / attention_groups(a); }
bool group_by_group(const Attention *a) { return sharers_of(a) > 1 && !a->by_kind; }

constexpr size_t SEED_BYTES = 256;               // seed and offset, at the start of the workspace
constexpr size_t SLACK_BYTES = (size_t)4 << 20;  // for cuDNN's other data
// If the (T, T) gradients of a sample are larger than this, the sample is divided by heads.
constexpr size_t SCORES_BYTES_MOST = (size_t)1 << 30;
// If the gradients of a packed batch are larger than this, the batch is divided into samples.
constexpr size_t PACKED_BYTES_MOST = (size_t)1 << 30;

size_t up(int64_t n, int64_t multiple) { return (size_t)round_up64(n, multiple); }

// The default backward pass stores the fp32 gradient of q and two statistics per query.
size_t default_bytes(int samples, int heads, int T, int HD) {
    return (size_t)samples * (size_t)heads * up(T, 128) * (up(HD, 32) + 2) * sizeof(float) + SLACK_BYTES;
}
// The deterministic backward pass stores the bf16 gradient of the scores and the statistics. If
// heads share keys and values, it also stores the gradients of keys and values of each head.
size_t deterministic_bytes(int samples, int heads, int T, int HD, bool shared) {
    return (size_t)samples * (size_t)heads * up(T, 128) * (up(T, 128) * sizeof(floatX) + 2 * sizeof(float)) +
           (shared ? 2 * default_bytes(samples, heads, T, HD) : SLACK_BYTES);
}

// Returns the largest slice that fits the workspace and divides the batch evenly: several samples
// (by_samples), or several groups of one sample. {0, 0} if none fits.
Slice largest_slice(const Attention *a, int samples, int groups, bool by_samples, size_t workspace_bytes) {
    int n = by_samples ? samples : groups, heads = sharers_of(a);
    for (int d = n; d > 0; d--) {
        Slice slice = by_samples ? Slice{d, groups * heads} : Slice{1, d * heads};
        size_t bytes = deterministic_bytes(slice.samples, slice.heads, a->T, a->HD, heads > 1);
        if (n % d == 0 && bytes <= workspace_bytes) return slice;
    }
    return Slice{0, 0};
}

// The backward pass of packed sequences stores the fp32 gradient of q with the row stride of qkv,
// two statistics per query and, if heads share keys and values, the gradients of both for each
// head.
size_t packed_bytes(int samples, int T, int NH, int HD, int groups) {
    size_t rows = (size_t)samples * up(T, 128), sharers = (size_t)(NH / groups);
    size_t row = (size_t)(NH + 2 * groups) * up(HD, 32), gradients = sharers > 1 ? 1 + 2 * sharers : 1;
    return rows * (row * gradients + 2 * (size_t)NH) * sizeof(float) + SLACK_BYTES;
}
// Returns the samples of a slice: as many as the limit allows, at least one.
int packed_samples(int B, int T, int NH, int HD, int groups) {
    for (int d = B; d > 1; d--) {
        if (B % d == 0 && packed_bytes(d, T, NH, HD, groups) <= PACKED_BYTES_MOST) return d;
    }
    return 1;
}
int packed_samples_of(const Attention *a) {
    return packed_samples(a->B, a->T, a->NH, a->HD, attention_groups(a));
}
bool is_packed(const Attention *a) { return !limits_dense(a->T, a->doc_start != nullptr); }

Slice choose_slice(const Attention *a, bool deterministic, size_t workspace_bytes) {
    int groups = group_by_group(a) ? 1 : attention_groups(a);
    if (is_packed(a)) return Slice{packed_samples_of(a), groups * sharers_of(a)};
    if (!deterministic) return Slice{a->B, groups * sharers_of(a)};
    Slice whole = largest_slice(a, a->B, groups, true, workspace_bytes);
    return whole.samples > 0 ? whole : largest_slice(a, a->B, groups, false, workspace_bytes);
}

size_t usable_bytes(const Attention *a) {
    return attention_cudnn_workspace_bytes(a->B, a->T, a->NH, a->HD, a->groups, is_packed(a)) - SEED_BYTES;
}

// --- graphs --------------------------------------------------------------------------------------

enum Uid : int64_t {
    Q = 1,
    K,
    V,
    O,
    STATS,
    DO,
    DQ,
    DK,
    DV,
    SEED,
    OFFSET,
    LENGTHS,
    QKV_STARTS,
    OUT_STARTS,
    STATS_STARTS
};

struct Plan {
    bool usable = false;
    Slice slice = {0, 0};
    graph::Graph forward, backward;
};

// Parameters of a plan: B, T, NH, groups, HD, by_kind, window, bits of the dropout probability,
// deterministic, sequences of a packed slice (0: not packed).
using PlanKey = std::tuple<int, int, int, int, int, bool, int, uint32_t, bool, int>;

struct State {
    cudnnHandle_t handle = nullptr;
    std::map<PlanKey, std::unique_ptr<Plan>> plans;
    bool broken = false;          // cuDNN failed to start
    std::vector<uint8_t> arrays;  // op_attention_pack's, before they are copied
};

void state_destroy(void *memory) {
    State *state = static_cast<State *>(memory);
    state->plans.clear();
    if (state->handle) cudnnDestroy(state->handle);
    delete state;
}

std::string version_text(size_t version) {
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

// Describes a call: "cuDNN 9.19.0 (built with headers of 9.19.0), attention of 32 x 12 heads ..."
std::string describe(const Attention *a) {
    return "cuDNN " + version_text(cudnnGetVersion()) + " (built with headers of " +
           version_text(CUDNN_VERSION) + "), attention of " + std::to_string(a->B) + " x " +
           std::to_string(a->NH) + " heads of " + std::to_string(a->HD) + ", sequence " +
           std::to_string(a->T);
}

// Warns on rank 0 that attention uses this program's own kernels.
void notice(const Device *device, const Attention *a, const std::string &reason) {
    if (device->site && device->site->rank > 0) return;
    std::string line = reason.substr(0, reason.find('\n'));
    warning_print(device->site, "%s: %.600s; using this program's own, slower attention kernels instead",
                  describe(a).c_str(), line.c_str());
}

// The memory that a tensor of a slice has in a buffer: (batch, heads, T, columns), strides in
// elements. Sequences of a packed batch have no batch stride: `start` holds their first elements.
struct View {
    int64_t batch, heads, T, columns;
    int64_t batch_stride, head_stride, row_stride;
    TensorRef start;
};
void describe_tensor(graph::Tensor_attributes &t, Uid uid, const View &v) {
    t.set_uid(uid)
        .set_dim({v.batch, v.heads, v.T, v.columns})
        .set_stride({v.batch_stride, v.head_stride, v.row_stride, 1});
    if (v.start) t.set_ragged_offset(v.start);
}
TensorRef add_tensor(graph::Graph &g, const char *name, Uid uid, const View &view) {
    graph::Tensor_attributes t;
    describe_tensor(t.set_name(name), uid, view);
    return g.tensor(t);
}
void describe_output(const TensorRef &tensor, Uid uid, const View &view) {
    describe_tensor(tensor->set_output(true), uid, view);
}
// An array that tells where sequences are.
TensorRef add_numbers(graph::Graph &g, const char *name, Uid uid, int64_t count, fe::DataType_t type) {
    return g.tensor(graph::Tensor_attributes()
                        .set_name(name)
                        .set_uid(uid)
                        .set_dim({count, 1, 1, 1})
                        .set_stride({1, 1, 1, 1})
                        .set_data_type(type));
}
TensorRef add_seed(graph::Graph &g, const char *name, Uid uid) {
    return add_numbers(g, name, uid, 1, fe::DataType_t::INT64);
}

// Strides in elements. query and key: from one head of qkv to the next. out is (B, T, NH * HD).
struct Strides {
    int64_t query, key, qkv_row, out_head, out_row;
};
Strides strides_of(const Attention *a) {
    int64_t HD = a->HD, groups = attention_groups(a), sharers = a->NH / groups, C = a->NH * HD;
    int64_t group = a->by_kind ? HD : (sharers + 2) * HD;
    return Strides{sharers > 1 ? HD : group, group, C + 2 * groups * HD, HD, C};
}
// Views of the tensors of a slice.
struct Views {
    View query, key, out, stats;
    TensorRef lengths;  // of packed sequences
};
Views add_views(graph::Graph &g, const Attention *a, Slice slice) {
    Strides s = strides_of(a);
    int64_t T = a->T, HD = a->HD, heads = slice.heads, keys = slice.heads / sharers_of(a);
    int64_t batch = slice.samples;
    TensorRef lengths, qkv_start, out_start, stats_start;
    const bool packed = is_packed(a);
    if (packed) {
        batch = a->sequences;
        lengths = add_numbers(g, "lengths", LENGTHS, batch, fe::DataType_t::INT32);
        qkv_start = add_numbers(g, "starts in qkv", QKV_STARTS, batch + 1, fe::DataType_t::INT64);
        out_start = add_numbers(g, "starts in out", OUT_STARTS, batch + 1, fe::DataType_t::INT64);
        stats_start = add_numbers(g, "starts in stats", STATS_STARTS, batch + 1, fe::DataType_t::INT64);
    }
    return Views{{batch, heads, T, HD, s.qkv_row * T, s.query, s.qkv_row, qkv_start},
                 {batch, keys, T, HD, s.qkv_row * T, s.key, s.qkv_row, qkv_start},
                 {batch, heads, T, HD, s.out_row * T, s.out_head, s.out_row, out_start},
                 {batch, heads, T, 1, heads * T, packed ? 1 : T, packed ? heads : 1, stats_start},
                 lengths};
}

void set_types(graph::Graph &g) {
    g.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
}

template <class Options> void set_lengths(Options &options, const Views &views) {
    if (views.lengths)
        options.set_padding_mask(true).set_seq_len_q(views.lengths).set_seq_len_kv(views.lengths);
}

// A window of the whole sequence is none.
bool has_window(const Attention *a) { return a->window > 0 && a->window < a->T; }

// cuDNN's left bound is the number of keys that a query sees: the mask keeps row - column < bound.
template <class Options> void set_window(Options &options, const Attention *a) {
    if (has_window(a)) options.set_diagonal_band_left_bound(a->window);
}

fe::error_t build_forward(graph::Graph &g, cudnnHandle_t handle, const Attention *a, Slice slice) {
    set_types(g);
    Views views = add_views(g, a, slice);
    TensorRef q = add_tensor(g, "q", Q, views.query), k = add_tensor(g, "k", K, views.key);
    TensorRef v = add_tensor(g, "v", V, views.key);
    graph::SDPA_attributes options;
    options.set_name("attention")
        .set_generate_stats(true)
        .set_causal_mask(true)
        .set_attn_scale(attention_scale(a));
    set_window(options, a);
    set_lengths(options, views);
    if (a->dropout.p > 0.0f)
        options.set_dropout(a->dropout.p, add_seed(g, "seed", SEED), add_seed(g, "offset", OFFSET));
    auto [out, stats] = g.sdpa(q, k, v, options);
    describe_output(out, O, views.out);
    describe_output(stats, STATS, views.stats);
    stats->set_data_type(fe::DataType_t::FLOAT);
    return g.build(handle, {fe::HeurMode_t::A});
}

fe::error_t build_backward(graph::Graph &g, cudnnHandle_t handle, const Attention *a, Slice slice,
                           bool deterministic) {
    set_types(g);
    Views views = add_views(g, a, slice);
    TensorRef q = add_tensor(g, "q", Q, views.query), k = add_tensor(g, "k", K, views.key);
    TensorRef v = add_tensor(g, "v", V, views.key), out = add_tensor(g, "out", O, views.out);
    TensorRef dout = add_tensor(g, "dout", DO, views.out), stats = add_tensor(g, "stats", STATS, views.stats);
    stats->set_data_type(fe::DataType_t::FLOAT);
    graph::SDPA_backward_attributes options;
    options.set_name("attention backward")
        .set_causal_mask(true)
        .set_attn_scale(attention_scale(a))
        .set_deterministic_algorithm(deterministic);
    const int64_t rows = (int64_t)slice.samples * a->T;
    if (views.lengths) options.set_max_total_seq_len_q(rows).set_max_total_seq_len_kv(rows);
    set_window(options, a);
    set_lengths(options, views);
    if (a->dropout.p > 0.0f)
        options.set_dropout(a->dropout.p, add_seed(g, "seed", SEED), add_seed(g, "offset", OFFSET));
    auto [dq, dk, dv] = g.sdpa_backward(q, k, v, out, dout, stats, options);
    describe_output(dq, DQ, views.query);
    describe_output(dk, DK, views.key);
    describe_output(dv, DV, views.key);
    return g.build(handle, {fe::HeurMode_t::A});
}

// Builds both graphs or none, so that forward and backward of a shape use the same kernels.
std::unique_ptr<Plan> build_plan(const Device *device, State *state, const Attention *a) {
    auto plan = std::make_unique<Plan>();
    size_t available = usable_bytes(a);
    plan->slice = choose_slice(a, device->deterministic, available);
    if (plan->slice.samples == 0) {
        notice(device, a, "the deterministic backward of one head does not fit the workspace");
        return plan;
    }
    try {
        fe::error_t status = build_forward(plan->forward, state->handle, a, plan->slice);
        if (status.is_good())
            status = build_backward(plan->backward, state->handle, a, plan->slice, device->deterministic);
        if (status.is_bad()) {
            notice(device, a, "no plan (" + status.get_message() + ")");
            return plan;
        }
    } catch (const std::exception &e) {
        notice(device, a, std::string("no plan (") + e.what() + ")");
        return plan;
    }
    int64_t needed = std::max(plan->forward.get_workspace_size(), plan->backward.get_workspace_size());
    plan->usable = needed <= (int64_t)available;
    if (!plan->usable)
        notice(device, a,
               "its plan needs " + std::to_string(needed) + " bytes of workspace, but " +
                   std::to_string(available) + " are planned");
    return plan;
}

State *state_of(Device *device, const Attention *a) {
    if (device->attention.state) return static_cast<State *>(device->attention.state);
    State *state = new State;
    device->attention.state = state;
    device->attention.destroy = state_destroy;
    cudnnStatus_t status = cudnnCreate(&state->handle);
    if (status != CUDNN_STATUS_SUCCESS) {
        state->broken = true;
        notice(device, a, std::string("cuDNN failed to start (") + cudnnGetErrorString(status) + ")");
    }
    return state;
}

// Returns the plan for this call, or NULL.
Plan *find_plan(Stream *stream, State **state, const Attention *a) {
    Device *device = stream_device(stream);
    const bool packed = is_packed(a);
    if (packed &&
        (!a->sequences || !limits_packed(a->T, device->deterministic, a->dropout.p > 0, has_window(a))))
        return nullptr;
    *state = state_of(device, a);
    if ((*state)->broken) return nullptr;
    uint32_t dropout_bits = a->dropout.p > 0.0f ? f32_bits(a->dropout.p) : 0;
    PlanKey key{a->B,
                a->T,
                a->NH,
                attention_groups(a),
                a->HD,
                a->by_kind,
                has_window(a) ? a->window : 0,
                dropout_bits,
                device->deterministic,
                packed ? a->sequences : 0};
    auto found = (*state)->plans.find(key);
    if (found == (*state)->plans.end())
        found = (*state)->plans.emplace(key, build_plan(device, *state, a)).first;
    return found->second->usable ? found->second.get() : nullptr;
}

// --- execution -----------------------------------------------------------------------------------

// splitmix64's finalizer. It gives neighboring (seed, site, sample, head, slice) unrelated keys.
uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
int64_t dropout_seed(const Attention *a, int slice) {
    Dropout d = a->dropout;
    uint64_t z = mix(((uint64_t)d.seed << 32 | d.site) + 0x9E3779B97F4A7C15ull);
    z = mix(z ^ (uint64_t)d.first_sample);
    uint64_t part = (uint64_t)a->first_head << 32 | (uint32_t)slice;
    return (int64_t)(mix(z + part) >> 1);  // not negative
}

// Offsets of a slice. Statistics of consecutive slices are contiguous.
struct SliceStart {
    int64_t q, k, v, out, stats;  // elements
    int64_t batch;                // index of the slice's samples, for packed sequences
};
SliceStart slice_start(const Attention *a, Slice slice, int i) {
    Strides s = strides_of(a);
    int per_sample = a->NH / slice.heads;  // 1 if a slice has whole samples
    int64_t sample = (int64_t)(i / per_sample) * slice.samples,
            head = (int64_t)(i % per_sample) * slice.heads;
    int64_t first = sample * a->T * s.qkv_row;
    GroupColumns columns = attention_columns(a, (int)(head / sharers_of(a)));
    return SliceStart{first + columns.q,
                      first + columns.k,
                      first + columns.v,
                      sample * a->T * s.out_row + head * s.out_head,
                      (int64_t)i * slice.samples * slice.heads * a->T,
                      i / per_sample};
}

void check(Stream *stream, const Attention *a, bool good, const std::string &message, const char *what) {
    if (good) return;
    cuda_check_gpu(stream_site(stream));
    fatal(stream_site(stream), EXIT_ENVIRONMENT,
          "%s: %s failed: %s; check that cuDNN's version supports the GPU and the driver (--version)",
          describe(a).c_str(), what, message.c_str());
}

// --- packed sequences ----------------------------------------------------------------------------

// The arrays of op_attention_pack for `slices` slices of `sequences` sequences each. Rows of all
// arrays are multiples of 16 bytes.
struct PackedArrays {
    int64_t slices, sequences;
    int64_t starts() const { return sequences + 2; }  // of which the last one is unused
    int64_t bytes() const { return slices * (3 * starts() * 8 + sequences * 4); }
    int64_t starts_at(int which, int64_t slice) const { return (which * slices + slice) * starts() * 8; }
    int64_t lengths_at(int64_t slice) const { return 3 * slices * starts() * 8 + slice * sequences * 4; }
};

void add_sequences(std::unordered_map<int64_t, void *> &pack, const Attention *a, Slice slice,
                   int64_t batch) {
    PackedArrays arrays{a->B / slice.samples, a->sequences};
    uint8_t *base = static_cast<uint8_t *>(const_cast<void *>(a->packed));
    const Uid starts[] = {QKV_STARTS, OUT_STARTS, STATS_STARTS};
    for (int i = 0; i < 3; i++) pack[starts[i]] = base + arrays.starts_at(i, batch);
    pack[LENGTHS] = base + arrays.lengths_at(batch);
}

bool starts_sequence(const int32_t *doc_start, int64_t row, int T) {
    return doc_start ? doc_start[row] == row % T : row % T == 0;
}

// Runs a graph on every slice. pointers(start) returns the tensors of the slice at `start`.
template <class Pointers>
void execute_slices(Stream *stream, State *state, const Plan *plan, const graph::Graph &g, const Attention *a,
                    const char *what, Pointers pointers) {
    cudnnStatus_t status = cudnnSetStream(state->handle, stream_handle(stream));
    check(stream, a, status == CUDNN_STATUS_SUCCESS, cudnnGetErrorString(status), "choosing the stream");
    int slices = a->B / plan->slice.samples * (a->NH / plan->slice.heads);
    int64_t *seed = static_cast<int64_t *>(a->workspace);
    for (int i = 0; i < slices; i++) {
        SliceStart start = slice_start(a, plan->slice, i);
        std::unordered_map<int64_t, void *> pack = pointers(start);
        if (is_packed(a)) add_sequences(pack, a, plan->slice, start.batch);
        if (a->dropout.p > 0.0f) {
            attention_store_seed(stream, seed, dropout_seed(a, i), 0);
            pack[SEED] = seed;
            pack[OFFSET] = seed + 1;
        }
        fe::error_t result = g.execute(state->handle, pack,
                                       static_cast<uint8_t *>(a->workspace) + SEED_BYTES);
        check(stream, a, result.is_good(), result.get_message(), what);
    }
}

void *address(const void *base, int64_t element, size_t size) {
    return const_cast<uint8_t *>(static_cast<const uint8_t *>(base)) + element * (int64_t)size;
}

}  // namespace

// If heads share keys and values, cuDNN stores their gradients separately for each head.
size_t attention_cudnn_workspace_bytes(int B, int T, int NH, int HD, int groups, bool packed) {
    if (packed) {
        int all = groups > 0 ? groups : NH;
        size_t dense = attention_cudnn_workspace_bytes(B, T, NH, HD, groups, false);
        return std::max(dense, SEED_BYTES + packed_bytes(packed_samples(B, T, NH, HD, all), T, NH, HD, all));
    }
    int sharers = groups > 0 ? NH / groups : 1, least = sharers > 1 ? sharers : 1;
    size_t one_sample = std::min(deterministic_bytes(1, NH, T, HD, sharers > 1), SCORES_BYTES_MOST);
    size_t one_group = deterministic_bytes(1, least, T, HD, sharers > 1);
    size_t each_head = sharers > 1 ? 3 * default_bytes(B, NH, T, HD) : 0;
    // The result is monotonic in B and T.
    return SEED_BYTES + std::max({default_bytes(B, NH, T, HD), one_group, one_sample, each_head});
}

bool attention_cudnn_forward(Stream *stream, const Attention *a) {
    State *state = nullptr;
    Plan *plan = find_plan(stream, &state, a);
    if (!plan) return false;
    execute_slices(stream, state, plan, plan->forward, a, "forward", [&](SliceStart at) {
        return std::unordered_map<int64_t, void *>{{Q, address(a->qkv, at.q, sizeof(floatX))},
                                                   {K, address(a->qkv, at.k, sizeof(floatX))},
                                                   {V, address(a->qkv, at.v, sizeof(floatX))},
                                                   {O, address(a->out, at.out, sizeof(floatX))},
                                                   {STATS, address(a->saved, at.stats, sizeof(float))}};
    });
    return true;
}

bool attention_cudnn_backward(Stream *stream, const Attention *a) {
    State *state = nullptr;
    Plan *plan = find_plan(stream, &state, a);
    if (!plan) return false;
    execute_slices(stream, state, plan, plan->backward, a, "backward", [&](SliceStart at) {
        return std::unordered_map<int64_t, void *>{{Q, address(a->qkv, at.q, sizeof(floatX))},
                                                   {K, address(a->qkv, at.k, sizeof(floatX))},
                                                   {V, address(a->qkv, at.v, sizeof(floatX))},
                                                   {O, address(a->out, at.out, sizeof(floatX))},
                                                   {DO, address(a->dout, at.out, sizeof(floatX))},
                                                   {STATS, address(a->saved, at.stats, sizeof(float))},
                                                   {DQ, address(a->dqkv, at.q, sizeof(floatX))},
                                                   {DK, address(a->dqkv, at.k, sizeof(floatX))},
                                                   {DV, address(a->dqkv, at.v, sizeof(floatX))}};
    });
    return true;
}

// A slice has `sequences` sequences, a power of two, so that few plans serve all batches. The ones
// after its last document are empty.
int op_attention_pack(Stream *stream, const Attention *a, const int32_t *doc_start, void *packed) {
    const int samples = packed_samples_of(a), heads = group_by_group(a) ? sharers_of(a) : a->NH;
    const int64_t rows = (int64_t)samples * a->T, slices = a->B / samples;
    const int64_t sizes[] = {strides_of(a).qkv_row, strides_of(a).out_row, heads};  // elements of a row
    int64_t most = 4;
    for (int64_t i = 0; i < slices; i++) {
        int64_t count = 0;
        for (int64_t r = 0; r < rows; r++) count += starts_sequence(doc_start, i * rows + r, a->T);
        while (most < count) most *= 2;
    }
    PackedArrays arrays{slices, most};
    std::vector<uint8_t> &host = state_of(stream_device(stream), a)->arrays;
    host.assign((size_t)arrays.bytes(), 0);
    for (int64_t i = 0; i < slices; i++) {
        int32_t *lengths = reinterpret_cast<int32_t *>(host.data() + arrays.lengths_at(i));
        int64_t *starts[3], count = 0;
        for (int k = 0; k < 3; k++)
            starts[k] = reinterpret_cast<int64_t *>(host.data() + arrays.starts_at(k, i));
        for (int64_t r = 0; r < rows; r++) {
            if (starts_sequence(doc_start, i * rows + r, a->T)) {
                for (int k = 0; k < 3; k++) starts[k][count] = r * sizes[k];
                count++;
            }
            lengths[count - 1]++;
        }
        for (; count <= most; count++) {
            for (int k = 0; k < 3; k++) starts[k][count] = rows * sizes[k];
        }
    }
    copy_to_device(stream, packed, host.data(), host.size());
    return (int)most;
}

size_t op_attention_pack_bytes(int B, int T, bool documents) {
    if (limits_dense(T, documents)) return 0;
    // Fewer than twice as many sequences as rows, and at least 4 in each of at most B slices.
    return (size_t)B * (size_t)PackedArrays{1, std::max<int64_t>(4, 2 * (int64_t)T)}.bytes();
}
