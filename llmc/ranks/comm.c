// What the backends of comm.h say in the same words: names of scopes in errors and in what the watchdog tells, and what is wrong with a topology.
// Called by llmc/cpu/comm.c and llmc/cuda/comm.cu.
#include "llmc/comm.h"

const char *comm_scope_name(CommScope scope) {
    static const char *const names[COMM_SCOPES] = {"inside the node", "between nodes", "in the data-parallel group"};
    return names[scope];
}

bool comm_disagreement(Error *err) { return error_set(err, EXIT_ENVIRONMENT, "the ranks disagree about the topology; start every rank with the same flags"); }
