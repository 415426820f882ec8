// The precision of weights and activations: bf16 in the product, fp32 (-DPRECISION_FP32) for finite-difference tests of the same code.
// One of the four places where the design allows a preprocessor conditional. Used by every file that touches weights or activations.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "sdp4bit/codec.h"

#ifdef PRECISION_FP32
typedef float floatX;
HD_FN float floatX_to_float(floatX x) { return x; }
HD_FN floatX floatX_from_float(float x) { return x; }
#define FLOATX_NAME "fp32"
#define FLOATX_CODEC CODEC_FP32
#else
typedef uint16_t floatX;  // bfloat16 bits; CUDA kernels reinterpret them as __nv_bfloat16
HD_FN float floatX_to_float(floatX x) { return bf16_to_float(x); }
HD_FN floatX floatX_from_float(float x) { return bf16_from_float(x); }
#define FLOATX_NAME "bf16"
#define FLOATX_CODEC CODEC_BF16
#endif
