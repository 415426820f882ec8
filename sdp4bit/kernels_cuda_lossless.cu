// Lossless weights on GPUs: a warp codes or decodes a group, a lane holds one of its 32 states. The
// bytes are lossless_cpu.c's, and lossless.h has the numbers. Called by qwd.c.
#include "sdp4bit/kernels_cuda.cuh"

static __constant__ uint16_t FREQUENCIES[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_FREQUENCIES;
static __constant__ uint16_t COSTS[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_COSTS;
static_assert((int)LOSSLESS_LANES == (int)WARP && (int)LOSSLESS_CANDIDATES == (int)WARP,
              "a lane has a state, and a candidate");

enum { STEP = 2 * WARP };  // weights of a step: two neighbours per lane
enum { LANE_SAMPLES = LOSSLESS_GROUP / 32 / WARP };

DEV_FN int lane_id(void) { return threadIdx.x % WARP; }
// How many of these lanes come before this one.
DEV_FN int lanes_before(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1u)); }

DEV_FN void fill_tables(LosslessTables *tables) {
    lossless_fill_tables(tables, FREQUENCIES, COSTS, threadIdx.x, CODEC_THREADS);
    __syncthreads();
}

// Two weights, the first one in the low half.
DEV_FN uint32_t load_pair(const uint16_t *weights, int i, int n) {
    return i < n ? *reinterpret_cast<const uint32_t *>(weights + i) : 0;
}
DEV_FN uint32_t half_of(uint32_t pair, int h) { return h ? pair >> 16 : pair & 0xFFFFu; }

DEV_FN void copy_group(uint16_t *to, const uint16_t *from, int n) {
    for (int i = 2 * lane_id(); i < n; i += STEP) {
        *reinterpret_cast<uint32_t *>(to + i) = *reinterpret_cast<const uint32_t *>(from + i);
    }
}

// --- encoder ------------------------------------------------------------------------------------

// Each lane tries a scale on all samples, which the lanes hold together.
DEV_FN int choose_scale(const LosslessTables *t, const uint16_t *old, const uint16_t *fresh, int n) {
    uint32_t sample[LANE_SAMPLES], cost = 0;  // old in the low half
    int largest = 0;
#pragma unroll
    for (int s = 0; s < LANE_SAMPLES; s++) {
        int k = s * WARP + lane_id(), i = lossless_sample(k);
        bool live = k < lossless_samples(n);
        sample[s] = live ? old[i] | (uint32_t)fresh[i] << 16 : 0;
        largest = max(largest, (int)(sample[s] >> 7 & 0xFFu));
    }
    largest = __reduce_max_sync(ALL_LANES, largest);
    int scale = lossless_candidate(largest, lane_id());
#pragma unroll
    for (int s = 0; s < LANE_SAMPLES; s++) {
        int live = min(lossless_samples(n) - s * WARP, (int)WARP);
        for (int l = 0; l < live; l++) {
            uint32_t pair = __shfl_sync(ALL_LANES, sample[s], l);
            cost += lossless_cost(t, half_of(pair, 0), half_of(pair, 1), scale);
        }
    }
    // The least cost, of several the first lane's: 256 samples cost less than 2^21.
    uint32_t best = __reduce_min_sync(ALL_LANES, cost * WARP + lane_id());
    return lossless_candidate(largest, (int)(best % WARP));
}

// A group's words so far; they are written from the last one to the first.
struct WordWriter {
    uint16_t *words;
    int at;  // the first one that is written; below 0: the group does not fit
};

// The lanes whose states are full write a word each, in the order of the lanes.
DEV_FN uint32_t spill(WordWriter &w, uint32_t state, bool full) {
    uint32_t lanes = __ballot_sync(ALL_LANES, full);
    w.at -= __popc(lanes);
    int i = w.at + lanes_before(lanes);
    if (full && i >= 0) w.words[i] = (uint16_t)state;
    return full ? state >> 16 : state;
}

DEV_FN uint32_t push_bits(WordWriter &w, uint32_t state, uint32_t value, int bits) {
    if (!__any_sync(ALL_LANES, bits > 0)) return state;
    state = spill(w, state, bits > 0 && lossless_overflows(state, 1, bits));
    return lossless_push_bits(state, value, bits);
}

// One weight of every lane.
DEV_FN uint32_t push_weight(WordWriter &w, uint32_t state, const LosslessTables *t, uint32_t old,
                            uint32_t fresh, int scale, bool live) {
    int context = lossless_context(old, scale);
    LosslessCode code = lossless_code(lossless_value(old, fresh, context, scale), context);
    uint32_t frequency = t->frequency[context][code.symbol], start = t->start[context][code.symbol];
    state = push_bits(w, state, code.low, live ? code.low_bits : 0);
    state = push_bits(w, state, code.high, live ? code.high_bits : 0);
    state = spill(w, state, live && lossless_overflows(state, frequency, LOSSLESS_PRECISION));
    return live ? lossless_push_symbol(state, start, frequency) : state;
}

DEV_FN LosslessEntry code_group(const LosslessTables *t, const uint16_t *old, const uint16_t *fresh,
                                uint16_t *slot, int n) {
    int last = (n - 1) / STEP * STEP + 2 * lane_id();
    uint32_t state = LOSSLESS_LOWEST, was = load_pair(old, last, n), is = load_pair(fresh, last, n);
    WordWriter w = {slot, n - LOSSLESS_STATE_WORDS};
    LosslessEntry entry = {0, (uint16_t)n, (uint8_t)choose_scale(t, old, fresh, n), 0};
    for (int i = last; i >= 0 && w.at > 0; i -= STEP) {
        uint32_t next_was = i >= STEP ? load_pair(old, i - STEP, n) : 0;  // loads of the next step
        uint32_t next_is = i >= STEP ? load_pair(fresh, i - STEP, n) : 0;
        for (int h = 1; h >= 0; h--) {
            state = push_weight(w, state, t, half_of(was, h), half_of(is, h), entry.scale, i < n);
        }
        was = next_was;
        is = next_is;
    }
    __syncwarp();
    if (w.at <= 0) {  // nothing is saved
        copy_group(slot, fresh, n);
        return entry;
    }
    reinterpret_cast<uint32_t *>(slot + n - LOSSLESS_STATE_WORDS)[lane_id()] = state;
    if (lane_id() < w.at % 8) slot[w.at - 1 - lane_id()] = 0;
    entry.words = (uint16_t)(n - w.at);
    return entry;
}

__global__ void __launch_bounds__(CODEC_THREADS) code_kernel(const __grid_constant__ CodeWeights a) {
    __shared__ LosslessTables tables;
    int64_t group = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP, at = group * LOSSLESS_GROUP;
    if (!a.control->applied) return;
    fill_tables(&tables);
    if (group >= a.layout.groups) return;
    uint16_t *payload = reinterpret_cast<uint16_t *>(a.coded + a.layout.payload);
    LosslessEntry entry = code_group(&tables, reinterpret_cast<const uint16_t *>(a.old) + at,
                                     reinterpret_cast<const uint16_t *>(a.fresh) + at, payload + at,
                                     lossless_group_elements(&a.layout, group));
    if (lane_id() == 0) reinterpret_cast<LosslessEntry *>(a.coded + a.layout.table)[group] = entry;
}

// The sum of the values of all threads up to this one's. The whole block calls.
enum { SCAN_THREADS = 1024 };
DEV_FN uint32_t scan(uint32_t *sums, uint32_t value) {
    sums[threadIdx.x] = value;
    __syncthreads();
    for (int stride = 1; stride < SCAN_THREADS; stride *= 2) {
        uint32_t before = (int)threadIdx.x >= stride ? sums[threadIdx.x - stride] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    return sums[threadIdx.x];
}

// One block: where the groups end, the tail, the header, and the bytes of it all. A thread takes
// neighbouring groups.
__global__ void __launch_bounds__(SCAN_THREADS) finish_kernel(const __grid_constant__ CodeWeights a) {
    __shared__ uint32_t sums[SCAN_THREADS];
    const LosslessLayout &m = a.layout;
    LosslessHeader header = {(uint32_t)sizeof(LosslessHeader), 0, 0, 0};
    if (a.control->applied) {
        LosslessEntry *entry = reinterpret_cast<LosslessEntry *>(a.coded + m.table);
        uint16_t *tail = reinterpret_cast<uint16_t *>(a.coded + m.tail);
        int64_t each = (m.groups + SCAN_THREADS - 1) / SCAN_THREADS, first = threadIdx.x * each;
        int64_t end = min(first + each, m.groups);
        uint32_t words = 0;
        for (int64_t i = first; i < end; i++) words += lossless_padded_words(entry[i].words);
        words = scan(sums, words) - words;
        for (int64_t i = first; i < end; i++) {
            entry[i].end = words += lossless_padded_words(entry[i].words);
        }
        for (int64_t i = threadIdx.x; i < m.tail_elements; i += SCAN_THREADS) {
            tail[i] = reinterpret_cast<const uint16_t *>(a.tail)[i];
        }
        header.bytes = (uint32_t)m.payload + sums[SCAN_THREADS - 1] * (uint32_t)sizeof(uint16_t);
        header.elements = (uint32_t)m.elements;
        header.tail_elements = (uint32_t)m.tail_elements;
    }
    if (threadIdx.x > 0) return;
    *reinterpret_cast<LosslessHeader *>(a.coded) = header;
    *a.bytes = header.bytes;
}

void kernel_code_weights(Stream *s, const CodeWeights *a) {
    if (a->layout.groups > 0) {
        unsigned blocks = (unsigned)ceil_div64(a->layout.groups, CODEC_WARPS);
        code_kernel<<<blocks, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "code weights");
    }
    finish_kernel<<<1, SCAN_THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "finish coded weights");
}

// 16 bytes at a time. A warp packs a group; what stands before the groups is spread over all.
__global__ void __launch_bounds__(CODEC_THREADS)
    pack_kernel(const __grid_constant__ LosslessLayout m, const uint8_t *coded, uint8_t *message) {
    int64_t thread = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x, group = thread / WARP;
    const LosslessHeader *header = reinterpret_cast<const LosslessHeader *>(coded);
    bool skipped = header->bytes == sizeof(LosslessHeader);
    int64_t fixed = (skipped ? (int64_t)sizeof(LosslessHeader) : m.payload) / (int64_t)sizeof(uint4);
    for (int64_t i = thread; i < fixed; i += (int64_t)gridDim.x * CODEC_THREADS) {
        reinterpret_cast<uint4 *>(message)[i] = reinterpret_cast<const uint4 *>(coded)[i];
    }
    if (skipped || group >= m.groups) return;
    LosslessEntry entry = reinterpret_cast<const LosslessEntry *>(coded + m.table)[group];
    uint32_t words = lossless_padded_words(entry.words);
    int64_t from = group * LOSSLESS_GROUP + lossless_group_elements(&m, group) - words;
    const uint16_t *source = reinterpret_cast<const uint16_t *>(coded + m.payload) + from;
    uint16_t *to = reinterpret_cast<uint16_t *>(message + m.payload) + (entry.end - words);
    for (uint32_t i = (uint32_t)lane_id(); i < words / 8; i += WARP) {
        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(source)[i];
    }
}

void kernel_pack_weights(Stream *s, const LosslessLayout *layout, const uint8_t *coded, uint8_t *message) {
    int64_t groups = layout->groups > 0 ? layout->groups : 1;
    unsigned blocks = (unsigned)ceil_div64(groups, CODEC_WARPS);
    pack_kernel<<<blocks, CODEC_THREADS, 0, stream_handle(s)>>>(*layout, coded, message);
    check_launch(s, "pack coded weights");
}

// --- decoder ------------------------------------------------------------------------------------

// A group's words as they arrived; behind the last one come zeros. The warp holds the next ones, so
// that no lane waits for memory.
struct WordReader {
    const uint16_t *words;
    int at, count;
    int first;            // of those that the warp holds: 32 in `here`, then 32 in `there`
    uint32_t here, there;
};

DEV_FN uint32_t word_at(const WordReader &r, int i) { return i < r.count ? __ldg(r.words + i) : 0; }

DEV_FN WordReader open_words(const uint16_t *words, int count) {
    WordReader r = {words, 0, count, 0, 0, 0};
    r.here = word_at(r, lane_id());
    r.there = word_at(r, WARP + lane_id());
    return r;
}

// The lanes whose states are low take a word each, in the order of the lanes.
DEV_FN uint32_t refill(WordReader &r, uint32_t state, bool live) {
    bool low = live && state < LOSSLESS_LOWEST;
    uint32_t lanes = __ballot_sync(ALL_LANES, low);
    int i = r.at - r.first + lanes_before(lanes);
    uint32_t here = __shfl_sync(ALL_LANES, r.here, i % WARP);
    uint32_t there = __shfl_sync(ALL_LANES, r.there, i % WARP);
    r.at += __popc(lanes);
    if (r.at - r.first >= WARP) {
        r.first += WARP;
        r.here = r.there;
        r.there = word_at(r, r.first + WARP + lane_id());
    }
    return low ? lossless_take_word(state, (uint16_t)(i < WARP ? here : there)) : state;
}

// value gains the next bits of every lane that wants some.
DEV_FN void pop_bits(WordReader &r, uint32_t &state, uint32_t &value, int bits) {
    if (!__any_sync(ALL_LANES, bits > 0)) return;
    value = value << bits | (state & ((1u << bits) - 1u));
    state = refill(r, state >> bits, bits > 0);
}

// What decoding wants to know of symbols.
struct Decoder {
    LosslessTables tables;
    LosslessSlots slots;
};

// One weight of every lane.
DEV_FN uint32_t pop_weight(WordReader &r, uint32_t &state, const Decoder *d, uint32_t old, int scale,
                           bool live) {
    int context = lossless_context(old, scale);
    uint32_t slot = state & ((1u << LOSSLESS_PRECISION) - 1u), symbol = d->slots.symbol[context][slot];
    uint32_t start = d->tables.start[context][symbol], frequency = d->tables.frequency[context][symbol];
    bool escape = symbol == LOSSLESS_ESCAPE;
    uint32_t value = escape ? 0 : symbol;
    if (live) state = lossless_pop_symbol(state, slot, start, frequency);
    state = refill(r, state, live);
    pop_bits(r, state, value, !live ? 0 : escape ? 8 : lossless_shift(context));
    pop_bits(r, state, value, live && escape ? 8 : 0);
    return lossless_weight(old, value, context, scale);
}

// False for a group that no encoder has made of these old weights.
DEV_FN bool decode_group(const Decoder *d, LosslessEntry entry, const uint16_t *words, uint16_t *weights,
                         int n) {
    WordReader r = open_words(words, entry.words - LOSSLESS_STATE_WORDS);
    uint32_t state = reinterpret_cast<const uint32_t *>(words + r.count)[lane_id()];
    uint32_t pair = load_pair(weights, 2 * lane_id(), n);
    for (int at = 0; at < n; at += STEP) {
        int i = at + 2 * lane_id();
        bool live = i < n;
        uint32_t next = load_pair(weights, i + STEP, n);  // the load of the next step
        uint32_t first = pop_weight(r, state, d, half_of(pair, 0), entry.scale, live);
        uint32_t second = pop_weight(r, state, d, half_of(pair, 1), entry.scale, live);
        if (live) *reinterpret_cast<uint32_t *>(weights + i) = first | second << 16;
        pair = next;
    }
    return __all_sync(ALL_LANES, state == LOSSLESS_LOWEST && r.at == r.count);
}

DEV_FN const uint8_t *sound_message(const DecodeWeights &a, int slot) {
    const uint8_t *message = a.messages + slot * a.stride;
    bool room = a.bytes >= (int64_t)sizeof(LosslessHeader);
    bool sound = room && lossless_header_sound(reinterpret_cast<const LosslessHeader *>(message), &a.layout,
                                               a.bytes);
    return sound ? message : NULL;
}

DEV_FN void mark_fault(const DecodeWeights &a, int slot) {
    atomicCAS(reinterpret_cast<unsigned long long *>(a.fault), 0ull,
              (unsigned long long)(a.code + (uint64_t)slot));
}

// blockIdx.y: the message. One of which nothing can be read is apply_coded_tail_kernel's to report.
__global__ void __launch_bounds__(CODEC_THREADS) decode_kernel(const __grid_constant__ DecodeWeights a) {
    __shared__ Decoder d;
    const LosslessLayout &m = a.layout;
    int64_t group = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP;
    const uint8_t *message = sound_message(a, blockIdx.y);
    if (!a.control->applied || !message) return;
    fill_tables(&d.tables);
    lossless_fill_slots(&d.slots, &d.tables, threadIdx.x, CODEC_THREADS);
    __syncthreads();
    if (group >= m.groups) return;
    int n = lossless_group_elements(&m, group);
    LosslessEntry entry = reinterpret_cast<const LosslessEntry *>(message + m.table)[group];
    uint32_t bytes = reinterpret_cast<const LosslessHeader *>(message)->bytes;
    const uint16_t *payload = reinterpret_cast<const uint16_t *>(message + m.payload);
    uint16_t *weights = reinterpret_cast<uint16_t *>(a.weights) +
                        gather_rank(a.nodes, a.per_node, blockIdx.y) * m.elements + group * LOSSLESS_GROUP;
    bool sound = lossless_entry_sound(entry, n, (bytes - m.payload) / (int64_t)sizeof(uint16_t));
    const uint16_t *words = payload + (sound ? entry.end - entry.words : 0);
    if (sound && entry.words == n) copy_group(weights, words, n);
    else if (sound) sound = decode_group(&d, entry, words, weights, n);
    if (!sound && lane_id() == 0) mark_fault(a, blockIdx.y);
}

// blockIdx.y: the message. One tail element per thread.
__global__ void __launch_bounds__(CODEC_THREADS)
    apply_coded_tail_kernel(const __grid_constant__ DecodeWeights a) {
    const LosslessLayout &m = a.layout;
    int64_t i = (int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x;
    const uint8_t *message = sound_message(a, blockIdx.y);
    if (!a.control->applied) return;
    if (!message) {
        if (i == 0) mark_fault(a, blockIdx.y);
        return;
    }
    if (i >= m.tail_elements) return;
    int64_t rank = gather_rank(a.nodes, a.per_node, blockIdx.y), messages = a.nodes * a.per_node;
    uint16_t *tail = reinterpret_cast<uint16_t *>(a.weights) + messages * m.elements + rank * m.tail_elements;
    tail[i] = reinterpret_cast<const uint16_t *>(message + m.tail)[i];
}

void kernel_decode_weights(Stream *s, const DecodeWeights *a) {
    unsigned messages = (unsigned)(a->nodes * a->per_node);
    int64_t tail = a->layout.tail_elements > 0 ? a->layout.tail_elements : 1;
    if (a->layout.groups > 0) {
        dim3 grid((unsigned)ceil_div64(a->layout.groups, CODEC_WARPS), messages);
        decode_kernel<<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
        check_launch(s, "decode weights");
    }
    dim3 grid((unsigned)ceil_div64(tail, CODEC_THREADS), messages);
    apply_coded_tail_kernel<<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "apply the tail of coded weights");
}
