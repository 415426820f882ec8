// A flipped bit in device memory: see fault.h.
#include "llmc/base/fault.h"

void fault_flip(const Fault *fault, Stream *stream, void *memory, int64_t bytes) {
    if (!fault || bytes <= 0) return;
    int64_t bits = 8 * bytes, bit = (fault->bit % bits + bits) % bits;
    uint8_t value, *byte = (uint8_t *)memory + bit / 8;
    copy_to_host(stream, &value, byte, 1);
    stream_synchronize(stream);
    value ^= (uint8_t)(1 << bit % 8);
    copy_to_device(stream, byte, &value, 1);
    stream_synchronize(stream);
}
