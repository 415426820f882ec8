// Lossless weights on GPUs: a warp codes or decodes a group, and each lane has one of the 32
// states. Bit-identical to lossless_cpu.c. lossless.h defines the format.
#include "sdp4bit/kernels_cuda.cuh"

static constexpr uint16_t FREQUENCIES[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_FREQUENCIES;
static constexpr uint16_t COSTS[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_COSTS;
static_assert((int)LOSSLESS_LANES == (int)WARP && (int)LOSSLESS_CANDIDATES == (int)WARP &&
                  (int)LOSSLESS_RUNS == (int)WARP,
              "one state, candidate scale and run of samples per lane");

enum { STEP = 2 * WARP };  // weights per step: two neighbors per lane

DEV_FN int lane_id(void) { return threadIdx.x % WARP; }
// Returns how many of these lanes (a bit mask) are before this one.
DEV_FN int lanes_before(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1u)); }

// --- tables -------------------------------------------------------------------------------------

// A symbol's entry in its context's table: frequency in the top 10 bits, start in the lowest 10.
typedef uint32_t Place;
enum { FREQUENCY_BIT = 32 - LOSSLESS_PRECISION };
DEV_FN uint32_t place_frequency(Place p) { return p >> FREQUENCY_BIT; }
DEV_FN uint32_t place_start(Place p) { return p & ((1u << LOSSLESS_PRECISION) - 1u); }

// A symbol's entry for the encoder. To divide by the frequency, multiply by reciprocal / 2^32 and
// correct the quotient by at most 1.
struct __align__(8) PushEntry {
    uint32_t reciprocal;
    Place place;
};
struct __align__(16) EncoderTables {
    PushEntry entry[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint16_t cost[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
};
struct __align__(16) DecoderTables {
    Place place[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint8_t symbol[LOSSLESS_CONTEXTS][1 << LOSSLESS_PRECISION];  // symbol of each slot
};

static constexpr Place place_of(int context, int symbol) {
    uint32_t start = 0;
    for (int q = 0; q < symbol; q++) start += FREQUENCIES[context][q];
    return (uint32_t)FREQUENCIES[context][symbol] << FREQUENCY_BIT | start;
}
static constexpr EncoderTables encoder_tables(void) {
    EncoderTables t = {};
    for (int c = 0; c < LOSSLESS_CONTEXTS; c++) {
        for (int q = 0; q < LOSSLESS_SYMBOLS; q++) {
            t.entry[c][q].reciprocal = 0xFFFFFFFFu / FREQUENCIES[c][q];
            t.entry[c][q].place = place_of(c, q);
            t.cost[c][q] = c == LOSSLESS_FRESH ? (uint16_t)LOSSLESS_FRESH_COST : COSTS[c][q];
        }
    }
    return t;
}
static constexpr DecoderTables decoder_tables(void) {
    DecoderTables t = {};
    for (int c = 0; c < LOSSLESS_CONTEXTS; c++) {
        int slot = 0;
        for (int q = 0; q < LOSSLESS_SYMBOLS; q++) {
            t.place[c][q] = place_of(c, q);
            for (int i = 0; i < FREQUENCIES[c][q]; i++) t.symbol[c][slot++] = (uint8_t)q;
        }
    }
    return t;
}
static __device__ const EncoderTables ENCODER = encoder_tables();
static __device__ const DecoderTables DECODER = decoder_tables();

// Copies the tables to shared memory.
template <class Tables> DEV_FN void fetch_tables(Tables *to, const Tables *from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Tables) / sizeof(uint4)); i += CODEC_THREADS)
        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
    __syncthreads();
}

// --- pairs of weights ---------------------------------------------------------------------------

// Loads two weights, the first one in the low half.
DEV_FN uint32_t load_pair(const uint16_t *weights, int i, int n) {
    return i < n ? *reinterpret_cast<const uint32_t *>(weights + i) : 0;
}
DEV_FN uint32_t half_of(uint32_t pair, int h) { return h ? pair >> 16 : pair & 0xFFFFu; }
// Maps both weights to signed 16-bit integers in numeric order. It is its own inverse.
DEV_FN uint32_t ordered_pair(uint32_t pair) { return pair ^ (__vcmplts2(pair, 0) & 0x7FFF7FFFu); }
// Returns the context of a weight, or a value >= LOSSLESS_FRESH for contexts 14 and 15.
DEV_FN int raw_context(uint32_t old, int scale) { return max(scale + 6 - (int)(old >> 7 & 0xFFu), 0); }

DEV_FN void copy_group(uint16_t *to, const uint16_t *from, int n) {
    for (int i = 2 * lane_id(); i < n; i += STEP) {
        *reinterpret_cast<uint32_t *>(to + i) = *reinterpret_cast<const uint32_t *>(from + i);
    }
}

// --- encoder ------------------------------------------------------------------------------------

// Each lane loads one run of samples, then evaluates one scale on the samples of all lanes.
DEV_FN int choose_scale(const EncoderTables *t, const uint16_t *old, const uint16_t *fresh, int n) {
    static_assert((int)LOSSLESS_RUN == 4, "a lane's samples are two pairs");
    uint32_t sample[LOSSLESS_RUN] = {}, cost = 0;
    int at = lossless_run(lane_id()), largest = 0;
#pragma unroll
    for (int k = 0; k < LOSSLESS_RUN; k += 2) {
        if (at + LOSSLESS_RUN > n) continue;
        uint32_t was = load_pair(old, at + k, n), is = load_pair(fresh, at + k, n);
        sample[k] = lossless_sample(half_of(was, 0), half_of(is, 0));
        sample[k + 1] = lossless_sample(half_of(was, 1), half_of(is, 1));
        largest = max(largest, max((int)(sample[k] & 0xFFu), (int)(sample[k + 1] & 0xFFu)));
    }
    largest = __reduce_max_sync(ALL_LANES, largest);
    int scale = lossless_candidate(largest, lane_id());
#pragma unroll
    for (int k = 0; k < LOSSLESS_RUN; k++) {
#pragma unroll 8
        for (int l = 0; l < WARP; l++)
            cost += lossless_cost(t->cost, __shfl_sync(ALL_LANES, sample[k], l), scale);
    }
    // First lane with the lowest cost. cost * WARP fits: 128 samples cost less than 2^20.
    uint32_t best = __reduce_min_sync(ALL_LANES, cost * WARP + lane_id());
    return lossless_candidate(largest, (int)(best % WARP));
}

// Writes a group's words from the last one to the first.
struct WordWriter {
    uint16_t *slot, *next;  // next: first word written; before slot: the group does not fit
};
enum { STEP_WORDS = 2 * STEP };  // maximum number of words per step

// Writes a word of each full state in lane order. CAREFUL: space or weights may run out.
template <bool CAREFUL> DEV_FN uint32_t spill(WordWriter &w, uint32_t state, bool full) {
    uint32_t lanes = __ballot_sync(ALL_LANES, full);
    w.next -= __popc(lanes);
    uint16_t *to = w.next + lanes_before(lanes);
    if (full && (!CAREFUL || to >= w.slot)) *to = (uint16_t)state;
    return full ? state >> 16 : state;
}

// Returns (state / frequency << LOSSLESS_PRECISION) + state % frequency.
DEV_FN uint32_t divide(uint32_t state, PushEntry e) {
    uint32_t f = place_frequency(e.place), quotient = __umulhi(state, e.reciprocal);
    uint32_t rest = state - quotient * f, coded = (quotient << LOSSLESS_PRECISION) + rest;
    return rest < f ? coded : coded + (1u << LOSSLESS_PRECISION) - f;
}

// Pushes one weight of every lane. value: lossless_value of its change.
template <bool CAREFUL>
DEV_FN uint32_t push_weight(WordWriter &w, uint32_t state, const EncoderTables *t, uint32_t old,
                            uint32_t fresh, uint32_t value, int scale, bool live) {
    int context = raw_context(old, scale), low = max(context - 7, 0);
    LosslessCode code = {value >> low, value & ((1u << low) - 1u), 0, low, 0};
    bool rare = context >= LOSSLESS_FRESH || code.symbol >= LOSSLESS_ESCAPE;
    if (__any_sync(ALL_LANES, rare)) {
        context = lossless_context(old, scale);
        if (context == LOSSLESS_FRESH) value = lossless_value(old, fresh, LOSSLESS_FRESH, scale);
        code = lossless_code(value, context);
        bool wanted = code.raw_bits > 0 && (!CAREFUL || live);
        state = spill<CAREFUL>(w, state, wanted && lossless_overflows(state, 1, code.raw_bits));
        if (wanted) state = lossless_push_bits(state, code.raw, code.raw_bits);
    }
    PushEntry e = t->entry[context][code.symbol];
    uint32_t most = (e.place & ~((1u << FREQUENCY_BIT) - 1u)) >> code.low_bits;
    state = spill<CAREFUL>(w, state, state >= most && (!CAREFUL || live));
    uint32_t coded = divide(state, e) + place_start(e.place);
    return CAREFUL && !live ? state : coded << code.low_bits | code.low;
}

// Pushes a lane's two weights.
template <bool CAREFUL>
DEV_FN uint32_t push_pair(WordWriter &w, uint32_t state, const EncoderTables *t, uint32_t was, uint32_t is,
                          int scale, bool live) {
    uint32_t from = ordered_pair(was), to = ordered_pair(is);
#pragma unroll
    for (int h = 1; h >= 0; h--) {
        int change = (int)((h ? (to & 0xFFFF0000u) - (from & 0xFFFF0000u) : (to - from) << 16)) >> 16;
        uint32_t value = (uint32_t)(change << 1 ^ change >> 31) & 0xFFFFu;
        state = push_weight<CAREFUL>(w, state, t, half_of(was, h), half_of(is, h), value, scale, live);
    }
    return state;
}

DEV_FN LosslessEntry code_group(const EncoderTables *t, const uint16_t *old, const uint16_t *fresh,
                                uint16_t *slot, int n) {
    int i = n / STEP * STEP + 2 * lane_id();
    WordWriter w = {slot, slot + n - LOSSLESS_STATE_WORDS};
    LosslessEntry entry = {0, (uint16_t)n, (uint8_t)choose_scale(t, old, fresh, n), 0};
    uint32_t state = LOSSLESS_LOWEST;
    if (n % STEP) {
        state = push_pair<true>(w, state, t, load_pair(old, i, n), load_pair(fresh, i, n), entry.scale,
                                i < n);
    }
    i -= STEP;
    uint32_t was = load_pair(old, max(i, 0), n), is = load_pair(fresh, max(i, 0), n);
    for (; i >= 0 && w.next >= slot + STEP_WORDS; i -= STEP) {
        int before = max(i - STEP, 0);  // load the weights of the next step
        uint32_t next_was = *reinterpret_cast<const uint32_t *>(old + before);
        uint32_t next_is = *reinterpret_cast<const uint32_t *>(fresh + before);
        state = push_pair<false>(w, state, t, was, is, entry.scale, true);
        was = next_was;
        is = next_is;
    }
    for (; i >= 0 && w.next > slot; i -= STEP) {
        state = push_pair<true>(w, state, t, load_pair(old, i, n), load_pair(fresh, i, n), entry.scale, true);
    }
    __syncwarp();
    if (w.next <= slot) {  // coding does not save anything
        copy_group(slot, fresh, n);
        return entry;
    }
    reinterpret_cast<uint32_t *>(slot + n - LOSSLESS_STATE_WORDS)[lane_id()] = state;
    int at = (int)(w.next - slot);
    if (lane_id() < at % 8) slot[at - 1 - lane_id()] = 0;
    entry.words = (uint16_t)(n - at);
    return entry;
}

__global__ void __launch_bounds__(CODEC_THREADS) code_kernel(const __grid_constant__ CodeWeights a) {
    __shared__ EncoderTables tables;
    int64_t group = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP, at = group * LOSSLESS_GROUP;
    if (!a.control->applied) return;
    fetch_tables(&tables, &ENCODER);
    if (group >= a.layout.groups) return;
    uint16_t *payload = reinterpret_cast<uint16_t *>(a.coded + a.layout.payload);
    LosslessEntry entry = code_group(&tables, reinterpret_cast<const uint16_t *>(a.old) + at,
                                     reinterpret_cast<const uint16_t *>(a.fresh) + at, payload + at,
                                     lossless_group_elements(&a.layout, group));
    if (lane_id() == 0) reinterpret_cast<LosslessEntry *>(a.coded + a.layout.table)[group] = entry;
}

// Inclusive prefix sum over the threads. Called by the whole block.
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

// One block: writes the ends of the groups, tail and header. Threads take consecutive groups.
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

// One warp copies a group; all threads copy the part before the groups. 16 bytes at a time.
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

// Reads a group's words. In corrupt messages, reads past the end return the last word.
struct WordReader {
    const uint16_t *payload;
    uint32_t at, last;  // positions in the payload: next word, last word of the states
};

// Refills states below LOSSLESS_LOWEST with one word each, in lane order.
DEV_FN uint32_t refill(WordReader &r, uint32_t state, bool live) {
    bool low = live && state < LOSSLESS_LOWEST;
    uint32_t lanes = __ballot_sync(ALL_LANES, low);
    uint32_t word = __ldg(r.payload + min(r.at + lanes_before(lanes), r.last));
    r.at += __popc(lanes);
    return low ? state << 16 | word : state;
}

// Pops one weight of every lane.
DEV_FN uint32_t pop_weight(WordReader &r, uint32_t &state, const DecoderTables *t, uint32_t old,
                           uint32_t ordered, int scale, bool live) {
    int context = raw_context(old, scale), low = max(context - 7, 0);
    if (context >= LOSSLESS_FRESH) {
        context = old & 0x7F80u ? LOSSLESS_FRESH : LOSSLESS_ZERO;
        low = 0;
    }
    uint32_t slot = lossless_slot(state, low), symbol = t->symbol[context][slot];
    Place place = t->place[context][symbol];
    LosslessCode code = {symbol, state & ((1u << low) - 1u), 0, low, 0};
    if (live) state = lossless_pop_symbol(state, low, slot, place_start(place), place_frequency(place));
    state = refill(r, state, live);
    bool rare = live && (symbol == LOSSLESS_ESCAPE || context == LOSSLESS_FRESH);
    if (__any_sync(ALL_LANES, rare)) {
        code.raw_bits = live ? lossless_raw_bits(symbol, context) : 0;
        code.raw = state & ((1u << code.raw_bits) - 1u);
        state = refill(r, state >> code.raw_bits, code.raw_bits > 0);
        return lossless_weight(old & 0xFFFFu, lossless_value_of(code), context, scale);
    }
    uint32_t value = symbol << low | code.low, fresh = ordered + (value >> 1 ^ (0u - (value & 1u)));
    return fresh & 0x8000u ? fresh ^ 0x7FFFu : fresh;
}

DEV_FN uint32_t pop_pair(WordReader &r, uint32_t &state, const DecoderTables *t, uint32_t pair, int scale,
                         bool live) {
    uint32_t ordered = ordered_pair(pair);
    uint32_t first = pop_weight(r, state, t, half_of(pair, 0), ordered, scale, live);
    uint32_t second = pop_weight(r, state, t, half_of(pair, 1), ordered >> 16, scale, live);
    return __byte_perm(first, second, 0x5410);
}

// Returns false if the group is corrupt or was coded relative to other old weights.
DEV_FN bool decode_group(const DecoderTables *t, LosslessEntry entry, const uint16_t *payload,
                         uint16_t *weights, int n) {
    uint32_t states = entry.end - LOSSLESS_STATE_WORDS;
    WordReader r = {payload, entry.end - entry.words, entry.end - 1};
    uint32_t state = reinterpret_cast<const uint32_t *>(payload + states)[lane_id()];
    uint32_t pair = load_pair(weights, 2 * lane_id(), n);
    int i = 2 * lane_id();
    for (; i < n / STEP * STEP; i += STEP) {
        uint32_t next = load_pair(weights, i + STEP, n);  // load the weights of the next step
        *reinterpret_cast<uint32_t *>(weights + i) = pop_pair(r, state, t, pair, entry.scale, true);
        pair = next;
    }
    if (n % STEP) {
        uint32_t fresh = pop_pair(r, state, t, pair, entry.scale, i < n);
        if (i < n) *reinterpret_cast<uint32_t *>(weights + i) = fresh;
    }
    return __all_sync(ALL_LANES, state == LOSSLESS_LOWEST && r.at == states);
}

DEV_FN const uint8_t *sound_message(const DecodeWeights &a, int slot) {
    const uint8_t *message = a.messages + slot * a.stride;
    bool room = a.bytes >= (int64_t)sizeof(LosslessHeader);
    bool sound = room &&
                 lossless_header_sound(reinterpret_cast<const LosslessHeader *>(message), &a.layout, a.bytes);
    return sound ? message : NULL;
}

DEV_FN void mark_fault(const DecodeWeights &a, int slot) {
    atomicCAS(reinterpret_cast<unsigned long long *>(a.fault), 0ull,
              (unsigned long long)(a.code + (uint64_t)slot));
}

// blockIdx.y: the message. apply_coded_tail_kernel reports messages with an invalid header.
__global__ void __launch_bounds__(CODEC_THREADS) decode_kernel(const __grid_constant__ DecodeWeights a) {
    __shared__ DecoderTables tables;
    const LosslessLayout &m = a.layout;
    int64_t group = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / WARP;
    const uint8_t *message = sound_message(a, blockIdx.y);
    if (!a.control->applied || !message) return;
    fetch_tables(&tables, &DECODER);
    if (group >= m.groups) return;
    int n = lossless_group_elements(&m, group);
    LosslessEntry entry = reinterpret_cast<const LosslessEntry *>(message + m.table)[group];
    uint32_t bytes = reinterpret_cast<const LosslessHeader *>(message)->bytes;
    const uint16_t *payload = reinterpret_cast<const uint16_t *>(message + m.payload);
    uint16_t *weights = reinterpret_cast<uint16_t *>(a.weights) +
                        gather_rank(a.nodes, a.per_node, blockIdx.y) * m.elements + group * LOSSLESS_GROUP;
    bool sound = lossless_entry_sound(entry, n, (bytes - m.payload) / (int64_t)sizeof(uint16_t));
    if (sound && entry.words == n) copy_group(weights, payload + (entry.end - n), n);
    else if (sound) sound = decode_group(&tables, entry, payload, weights, n);
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
