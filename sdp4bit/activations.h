// Quantized activations: hidden states and their gradients that pipeline stages send each other
// (--quantized-activations), or that tensor-parallel ranks sum and gather
// (--quantized-tensor-parallel). A message has the format of a gradient message without a tail,
// encoded and decoded by the gradient kernels:
//
//   sender     widen to fp32 -> Hadamard transform of blocks of 32 -> quantize in groups
//   receiver   decode -> inverse transform -> round to bf16
//
// Part of the exact regime: bitwise identical on CPU ranks and GPUs for equal activations and keys.
// Called by stage_messages.c and tensor_codes.c of llmc/model.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/device.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

typedef struct ActivationFormat {
    Codec codec;  // uniform; FLOATX_CODEC: activations are sent unquantized
    int group;    // elements per scale, a multiple of 32
    Rounding rounding;
} ActivationFormat;

// Returns the layout of a message. elements: a multiple of the group size. sealed: with a checksum.
MessageLayout activations_message(const ActivationFormat *format, int64_t elements, bool sealed);

// Device memory that all messages of a stream share; used only within a call. elements: of all
// messages of a call.
typedef struct ActivationScratch {
    float *values;     // (elements)
    float *partials;   // (elements / 32)
    Segment *segment;  // (1) activations_segment
} ActivationScratch;
// Reserves it in the memory plan. The caller uploads the segment.
void activations_reserve(ActivationScratch *scratch, size_t elements, const char *group, MemoryPlan *plan);
// Returns the segment to upload. logical: offset of the first element for the rounding bits.
Segment activations_segment(int64_t elements, int64_t logical);

// Quantizes x (count, message->elements) into `to` (count, message->bytes), which is 16-byte
// aligned. Leaves out the checksums.
void activations_encode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, RoundingKey key, const floatX *x, int count,
                        uint8_t *to, Stream *stream);
// Decodes messages into x (count, message->elements).
void activations_decode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, const uint8_t *from, int count, floatX *x,
                        Stream *stream);

LLMC_END
