// Fault injection for tests: flipped bits, and ranks that stop responding. Set by the environment
// variable SDP4BIT_FAULT; without it nothing happens.
//
// replica:RANK:ITERATION:BUCKET[:BIT]
//     Flips one bit of this bucket's model weights on world rank RANK, after the iteration's
//     update.
// message:RANK:ITERATION:NUMBER[:BIT]
//     Flips one bit of the message that RANK received in its NUMBER-th exchange of the iteration,
//     counted from 0.
// stall:RANK:ITERATION:NUMBER
//     World rank RANK stops forever before its NUMBER-th wait of the iteration (counted from 0) for
//     other ranks or its device. The other ranks wait for it. Iteration 0 is setup and loading.
// hang:RANK:ITERATION:NUMBER
//     The same, but during that wait, like a device call that never returns.
//
// Several faults are separated by commas. BIT counts the bits of the bucket, or of the message
// without its checksum, in little-endian memory: 30 is the highest exponent bit of the first fp32
// value. Negative values count from the end. Default: RANK modulo 8.
#pragma once
#include "llmc/device.h"
LLMC_BEGIN

typedef enum FaultKind { FAULT_REPLICA, FAULT_MESSAGE, FAULT_STALL, FAULT_HANG, FAULT_KINDS } FaultKind;

typedef struct Fault {
    FaultKind kind;
    int rank;
    int64_t iteration, at;
    int64_t bit;
} Fault;

enum { MOST_FAULTS = 16 };
typedef struct Faults {
    Fault fault[MOST_FAULTS];
    int count;
} Faults;

// Reads the faults of this rank from SDP4BIT_FAULT. Error: EXIT_USAGE if it cannot be parsed.
bool faults_from_environment(Faults *faults, int rank, Error *err);
// Returns the fault of this kind that is due, or NULL. at: index of the bucket, exchange or wait.
const Fault *fault_due(const Faults *faults, FaultKind kind, int64_t iteration, int64_t at);
// Flips the fault's bit, modulo the number of bits, in `bytes` bytes of device memory. Runs on the
// stream and waits for it. fault NULL: no-op.
void fault_flip(const Fault *fault, Stream *stream, void *memory, int64_t bytes);

LLMC_END
