// Precision of weights and activations: bf16 in production, fp32 (-DPRECISION_FP32) for
// finite-difference tests of the same code. One of the four places where a preprocessor conditional
// is allowed.
#pragma once
#include "llmc/base/numerics.h"

#ifdef PRECISION_FP32
typedef float floatX;
HD_FN float floatX_to_float(floatX x) { return x; }
HD_FN floatX floatX_from_float(float x) { return x; }
#define FLOATX_NAME "fp32"
#else
typedef uint16_t floatX;  // bfloat16 bits; CUDA kernels reinterpret them as __nv_bfloat16
HD_FN float floatX_to_float(floatX x) { return bf16_to_float(x); }
HD_FN floatX floatX_from_float(float x) { return bf16_from_float(x); }
#define FLOATX_NAME "bf16"
#endif
