// Bytes that a rank sends per step, summed over all buckets. Included by test_layout.c and
// test_sdp4bit_mpi.c only.
#pragma once
#include "sdp4bit/layout.h"

static inline WireBytes layout_wire_bytes(const BucketLayout *layout, const GradFormat *grad,
                                          const WeightFormat *weight) {
    WireBytes sum = {0};
    for (int b = 0; b < layout->buckets; b++) {
        WireBytes bucket = layout_bucket_wire_bytes(layout, b, grad, weight);
        sum.grad_intra += bucket.grad_intra;
        sum.grad_inter += bucket.grad_inter;
        sum.weight_intra += bucket.weight_intra;
        sum.weight_inter += bucket.weight_inter;
    }
    return sum;
}
