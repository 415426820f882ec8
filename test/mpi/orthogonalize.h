// Newton-Schulz for SimulatedMuon of simulator.h, on the tested backend. Includers: the tests that
// compare runs with Muon with the simulator.
#pragma once
#include "llmc/ops.h"
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"

// Replaces x (rows, columns), host memory, by its orthogonalization with the coefficients
// `quintic`, which are repeated here to detect errors in the table of muon.c. Uses the buffers of
// zero.
static inline void orthogonalize_on(Zero *zero, Stream *stream, floatX *x, int64_t rows, int64_t columns) {
    static const NewtonSchulzStep quintic[] = {{4.0848f, -6.8946f, 2.9270f},
                                               {3.9505f, -6.3029f, 2.6377f},
                                               {3.7418f, -5.5913f, 2.3037f},
                                               {2.8769f, -3.1427f, 1.2046f},
                                               {2.8366f, -3.0525f, 1.2012f}};
    Muon *own = &zero->muon;
    size_t bytes = (size_t)(rows * columns) * sizeof(floatX);
    NewtonSchulz a = {rows, columns, quintic, 5, own->x, own->workspace};
    zero_synchronize(zero);
    copy_to_device(stream, own->x, x, bytes);
    copy_to_host(stream, x, op_newton_schulz(stream, &a), bytes);
    stream_synchronize(stream);
}
