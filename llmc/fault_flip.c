// A flipped bit in device memory: see fault.h.
#include "llmc/fault.h"

void fault_flip(Stream *stream, void *byte, int rank) {
    uint8_t value;
    copy_to_host(stream, &value, byte, 1);
    stream_synchronize(stream);
    value ^= (uint8_t)(1 << rank % 8);
    copy_to_device(stream, byte, &value, 1);
    stream_synchronize(stream);
}
