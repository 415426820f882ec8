// Faults made on purpose, so that tests can see them found: single bits flipped where cosmic rays and cables do it, ranks that live on but stand still.
// Named by the environment variable SDP4BIT_FAULT, which this module alone reads; without it nothing happens. Opened by zero_plan.c and heartbeat.c; asked by
// heartbeat.c, zero.c and sdp4bit/wire.c.
//
//   SDP4BIT_FAULT=replica:RANK:ITERATION:BUCKET[:BIT][,...]  one bit of this bucket's weights in the replica of dp rank RANK, after the iteration's update
//   SDP4BIT_FAULT=message:RANK:ITERATION:NUMBER[:BIT][,...]  one bit of a message that RANK has received: that of its NUMBER-th exchange in the iteration, from 0
//                                                         BIT: which of the bucket or message (its checksum aside), negative from the end, as little-endian
//                                                         memory counts them, so 30 is the exponent's highest of a first fp32 value; default RANK modulo 8
//   SDP4BIT_FAULT=stall:RANK:ITERATION:NUMBER[,...]       world rank RANK stops for ever just before its NUMBER-th wait for others or its device in the iteration,
//                                                         from 0: the others wait for it (iteration 0: all of setup and loading)
//   SDP4BIT_FAULT=hang:RANK:ITERATION:NUMBER[,...]        the same inside of that wait, as in a device call that does not return
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

// The faults that SDP4BIT_FAULT asks of this rank. Error: EXIT_USAGE for a variable that says something else.
bool faults_from_environment(Faults *faults, int rank, Error *err);
// The fault of this kind that is due, or NULL: at is the bucket, the exchange, or the wait.
const Fault *fault_due(const Faults *faults, FaultKind kind, int64_t iteration, int64_t at);
// Flips the fault's bit of `bytes` bytes of device memory, in stream order; numbers outside of them begin anew. Waits for the stream. NULL: does nothing.
void fault_flip(const Fault *fault, Stream *stream, void *memory, int64_t bytes);

LLMC_END
