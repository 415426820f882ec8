// Division of whole matrices among shards: see layout_whole.h.
#include "sdp4bit/layout_whole.h"

#include <assert.h>
#include <stdlib.h>

static bool belongs(const WholeUnits *units, int i) {
    const LayoutTensor *tensor = &units->tensors[i];
    return tensor->matrix && tensor->unit >= units->first && tensor->unit < units->end;
}

typedef struct WholeMatrix {
    int64_t elements;  // with padding
    int tensor;
} WholeMatrix;

static int larger_first(const void *a, const void *b) {
    const WholeMatrix *x = a, *y = b;
    if (x->elements != y->elements) return x->elements < y->elements ? 1 : -1;
    return x->tensor - y->tensor;
}

// Returns the matrices of the units, the largest first. *elements: their sum.
static WholeMatrix *sorted_matrices(const WholeUnits *units, int *matrices, int64_t *elements) {
    WholeMatrix *sorted = xcalloc((size_t)units->count, sizeof *sorted, "the bucket layout");
    *matrices = 0;
    *elements = 0;
    for (int i = 0; i < units->count; i++) {
        if (!belongs(units, i)) continue;
        int64_t padded = round_up64(units->tensors[i].numel, units->alignment);
        sorted[(*matrices)++] = (WholeMatrix){padded, i};
        *elements += padded;
    }
    qsort(sorted, (size_t)*matrices, sizeof *sorted, larger_first);
    return sorted;
}

// Puts each matrix, the largest first, into the first of dp shards that then has at most `capacity`
// elements, or for capacity 0 into the shard with the fewest elements. Returns the elements of the
// fullest shard, or INT64_MAX if a matrix fits into no shard. shard: receives the shard of each
// tensor that is one of the matrices.
static int64_t fill_shards(const WholeMatrix *matrix, int matrices, int dp, int64_t capacity, int *shard) {
    int64_t *filled = xcalloc((size_t)dp, sizeof *filled, "the bucket layout"), largest = 0;
    for (int i = 0; i < matrices; i++) {
        int chosen = 0;
        for (int s = 1; !capacity && s < dp; s++) {
            if (filled[s] < filled[chosen]) chosen = s;
        }
        while (capacity && chosen < dp && filled[chosen] + matrix[i].elements > capacity) chosen++;
        if (chosen == dp) {
            largest = INT64_MAX;
            break;
        }
        shard[matrix[i].tensor] = chosen;
        filled[chosen] += matrix[i].elements;
        if (filled[chosen] > largest) largest = filled[chosen];
    }
    free(filled);
    return largest;
}

int64_t whole_divide(const WholeUnits *units, int *shard) {
    assert(units->dp >= 1 && units->first < units->end);
    int dp = units->dp, matrices;
    int64_t elements, m = units->multiple;
    WholeMatrix *sorted = sorted_matrices(units, &matrices, &elements);
    int *chosen = shard ? shard : xcalloc((size_t)units->count, sizeof *chosen, "the bucket layout");
    for (int i = 0; i < units->count; i++) chosen[i] = -1;
    int64_t even = round_up64(fill_shards(sorted, matrices, dp, 0, chosen), m);
    int64_t low = round_up64((elements + dp - 1) / dp, m), high = even;
    if (matrices > 0 && low < sorted[0].elements) low = round_up64(sorted[0].elements, m);
    while (low < high) {
        int64_t middle = (low + high) / 2 / m * m;
        if (fill_shards(sorted, matrices, dp, middle, chosen) <= middle) high = middle;
        else low = middle + m;
    }
    fill_shards(sorted, matrices, dp, high < even ? high : 0, chosen);
    free(sorted);
    if (!shard) free(chosen);
    return high;
}

int whole_buckets(const WholeUnits *units, int most) {
    assert(most >= 1 && most <= units->end - units->first);
    int n = units->end - units->first, best = 1;
    int64_t elements = 0, least = INT64_MAX;
    for (int i = 0; i < units->count; i++) {
        if (belongs(units, i)) elements += units->tensors[i].numel;
    }
    for (int buckets = most; buckets >= 1; buckets--) {
        int64_t padded = 0;
        for (int b = 0; b < buckets; b++) {
            WholeUnits part = *units;
            part.first = units->first + (int)((int64_t)n * b / buckets);
            part.end = units->first + (int)((int64_t)n * (b + 1) / buckets);
            padded += units->dp * whole_divide(&part, NULL);
        }
        bool little = padded - elements <= elements / 12;
        // At most 1.36 times the elements with little padding, otherwise more than twice.
        int64_t cost = padded + (little ? padded / (4 * buckets) : padded);
        if (cost < least) least = cost, best = buckets;
    }
    return best;
}

void whole_spread(const WholeUnits *units, int *shard) {
    int64_t *filled = xcalloc((size_t)units->dp, sizeof *filled, "the bucket layout");
    int *place = xcalloc((size_t)units->count, sizeof *place, "the bucket layout");
    for (int i = 0; i < units->count; i++) place[i] = shard[i];
    for (int i = 0; i < units->count; i++) {
        if (shard[i] < 0) continue;
        const LayoutTensor *matrix = &units->tensors[i];
        int chosen = i;
        for (int j = i; j < units->count; j++) {
            bool equal = place[j] >= 0 && units->tensors[j].numel == matrix->numel &&
                         units->tensors[j].work == matrix->work;
            if (equal && filled[place[j]] < filled[place[chosen]]) chosen = j;
        }
        shard[i] = place[chosen];
        place[chosen] = place[i];
        filled[shard[i]] += round_up64(matrix->numel, units->alignment);
    }
    free(filled);
    free(place);
}

void whole_assign(const WholeUnits *units, const int *shard, int64_t *work, int *rank_of) {
    int dp = units->dp;
    int64_t *of_shard = xcalloc((size_t)dp, sizeof *of_shard, "the bucket layout");
    int *owned = xcalloc((size_t)dp, sizeof *owned, "the bucket layout");
    for (int i = 0; i < units->count; i++) {
        if (belongs(units, i)) of_shard[shard[i]] += units->tensors[i].work;
    }
    for (int s = 0; s < dp; s++) rank_of[s] = owned[s] = -1;
    for (int turn = 0; turn < dp; turn++) {
        int heaviest = -1, idlest = -1;
        for (int i = 0; i < dp; i++) {
            if (rank_of[i] < 0 && (heaviest < 0 || of_shard[i] > of_shard[heaviest])) heaviest = i;
            if (owned[i] < 0 && (idlest < 0 || work[i] < work[idlest])) idlest = i;
        }
        rank_of[heaviest] = idlest;
        owned[idlest] = heaviest;
    }
    // The first shards that whole_divide fills hold matrices; shard 0 always does.
    if (of_shard[owned[0]] == 0) {
        int empty = owned[0], rank = rank_of[0];
        rank_of[0] = 0;
        rank_of[empty] = rank;
    }
    for (int s = 0; s < dp; s++) work[rank_of[s]] += of_shard[s];
    free(of_shard);
    free(owned);
}
