// Computes a lower bound of the step time from measured times of layers and links, with the model
// of llmc/plan/step_time.h. Called by comm_bound.py.
//
// Reads numbers from standard input and prints the bound in ms. The numbers are, in this order:
// number of buckets; number of micro-batches; forward, backward, head and tail times of a StepLoad;
// steps between outer syncs; delay of an outer sync; the fields of each BucketLoad.
#include <stdio.h>
#include <stdlib.h>

#include "llmc/plan/step_time.h"

static bool read_bucket(BucketLoad *b) {
    int gathered;
    bool ok = scanf("%d %d %lf %lf %lf %lf %d %lf %lf %lf %lf", &b->layers, &b->reductions, &b->grad_inside,
                    &b->grad_between, &b->weight_between, &b->weight_inside, &gathered, &b->forward_gather,
                    &b->backward_gather, &b->update, &b->exchange) == 11;
    b->gathered = ok && gathered;
    return ok;
}

enum { MOST_BUCKETS = 1 << 20 };
static bool read_load(StepLoad *load, int *steps, int *delay) {
    if (scanf("%d %d %lf %lf %lf %lf %d %d", &load->buckets, &load->micro_batches, &load->forward,
              &load->backward, &load->head, &load->tail, steps, delay) != 8)
        return false;
    if (load->buckets < 1 || load->buckets > MOST_BUCKETS) return false;
    if (load->micro_batches < 1 || *steps < 1) return false;
    load->bucket = (BucketLoad *)xcalloc((size_t)load->buckets, sizeof(BucketLoad), "times of buckets");
    for (int b = 0; b < load->buckets; b++) {
        if (!read_bucket(&load->bucket[b])) return false;
    }
    return true;
}

int main(void) {
    StepLoad load = {0};
    int steps, delay;
    bool ok = read_load(&load, &steps, &delay);
    if (ok) {
        double ms = step_time(&load);
        if (steps > 1) ms = step_time_local(&load, ms, steps, delay);
        printf("%.9g\n", ms);
    } else {
        fprintf(stderr, "error: invalid input; see the head of dev/bench/step_bound.c for the format\n");
    }
    free(load.bucket);
    return ok ? 0 : EXIT_USAGE;
}
