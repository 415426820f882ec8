// Faults made on purpose, so that tests see them found: single bits flipped where cosmic rays and
// cables flip them, and ranks that live on but stand still. The environment variable SDP4BIT_FAULT
// names them; without it nothing happens. Opened by zero_plan.c and heartbeat.c; asked by these,
// zero.c and wire.c.
//
// replica:RANK:ITERATION:BUCKET[:BIT]
//     One bit of this bucket's weights in the replica of world rank RANK, after the iteration's
//     update.
// message:RANK:ITERATION:NUMBER[:BIT]
//     One bit of the message that RANK has received in its NUMBER-th exchange of the iteration,
//     from 0.
// stall:RANK:ITERATION:NUMBER
//     World rank RANK stops for ever just before its NUMBER-th wait for others or its device in the
//     iteration, from 0. The others wait for it. Iteration 0 is all of setup and loading.
// hang:RANK:ITERATION:NUMBER
//     The same inside that wait, as in a device call that does not return.
//
// Several are joined by commas. BIT counts the bits of the bucket, or of the message without its
// checksum, as they lie in little-endian memory: 30 is the exponent's highest of a first fp32
// value. A negative one counts from the end. Default: RANK modulo 8.
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

// The faults that SDP4BIT_FAULT asks of this rank. Error: EXIT_USAGE for a variable that says
// something else.
bool faults_from_environment(Faults *faults, int rank, Error *err);
// The fault of this kind that is due, or NULL: at is the bucket, the exchange, or the wait.
const Fault *fault_due(const Faults *faults, FaultKind kind, int64_t iteration, int64_t at);
// Flips the fault's bit of `bytes` bytes of device memory, in stream order. Numbers outside of them
// begin anew. Waits for the stream. NULL: does nothing.
void fault_flip(const Fault *fault, Stream *stream, void *memory, int64_t bytes);

LLMC_END
