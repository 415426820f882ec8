// Shapes for which a later result of cuBLASLt's heuristic is faster than the first. Generated
// by dev/bench/gemm_search.cu on an H200 and confirmed in a trace of the step
// (dev/bench/kernel_trace.c). A row for "dx through GELU" also makes linear.cu fuse GELU' into the
// GEMM; otherwise GELU' is a separate pass. The table is used only with this library version and
// GPU family.
#pragma once
#include <stdint.h>

enum { GEMM_TABLE_VERSION = 130100, GEMM_TABLE_MAJOR = 9 };

typedef struct GemmAnswer {
    int32_t m, n, k;
    uint8_t form, answer;  // value of gemm_form(); index of the heuristic's result
} GemmAnswer;

static const GemmAnswer gemm_table[] = {
    // 125M, micro-batch 32
    {65536, 768, 768, 10, 7},   // projection: 117 -> 109 us (662 -> 709 TFLOP/s)
    {65536, 3072, 768, 18, 4},  // fc1 with GELU: 567 -> 539 us (545 -> 574 TFLOP/s)
    {65536, 3072, 768, 24, 3},  // dx of fc2 through GELU: 663 -> 580 us (466 -> 534 TFLOP/s)
    {65536, 768, 3072, 0, 5},   // dx of fc1: 399 -> 391 us (776 -> 791 TFLOP/s)
    {65536, 768, 768, 0, 5},    // dx of projection: 120 -> 106 us (647 -> 729 TFLOP/s)
    {9472, 50304, 768, 2, 5},   // logits: 1032 -> 979 us (709 -> 748 TFLOP/s)
    // 350M, micro-batch 16
    {32768, 1024, 1024, 10, 5},  // projection: 118 -> 104 us (582 -> 658 TFLOP/s)
    {32768, 4096, 1024, 18, 4},  // fc1 with GELU: 523 -> 474 us (526 -> 580 TFLOP/s)
    {32768, 4096, 1024, 0, 5},   // dx of fc2, separate GELU': 385 -> 341 us (714 -> 806 TFLOP/s)
    {32768, 1024, 1024, 0, 4},   // dx of projection: 110 -> 100 us (624 -> 688 TFLOP/s)
    {8192, 50304, 1024, 2, 7},   // logits: 1446 -> 1166 us (584 -> 724 TFLOP/s)
    // 1.3B, micro-batch 8
    {16384, 8192, 2048, 18, 4},  // fc1 with GELU: 886 -> 784 us (621 -> 701 TFLOP/s)
    {16384, 8192, 2048, 24, 6},  // dx of fc2 through GELU: 950 -> 893 us (579 -> 615 TFLOP/s)
    {16384, 2048, 2048, 0, 4},   // dx of projection: 203 -> 201 us (676 -> 685 TFLOP/s)
    {8192, 50304, 2048, 2, 5},   // logits: 2608 -> 2376 us (647 -> 710 TFLOP/s)
};
