// LD_PRELOAD library that makes the n-th call of one MPI function fail on one rank. As with
// MPI_ERRORS_RETURN, the call returns an error, transfers and writes nothing, and leaves the
// request undefined. Built as $(BUILD)/test/fault/mpi_shim.so; used by test/fault/collectives.sh
// and start.sh. Environment:
//   MPI_FAULT_RANK    rank on which the call fails
//   MPI_FAULT_CALL    the function, such as MPI_Iallreduce
//   MPI_FAULT_AT      index of the call that fails, from 1; 0: none
//   MPI_FAULT_STOP    if set, the process stops (SIGSTOP) instead. MPI_FAULT_CALL may then also be
//                     MPI_Init_thread, MPI_Finalize or MPI_Comm_dup (its first call, which follows
//                     MPI_Init_thread)
//   MPI_FAULT_COUNT   file that receives a line "function calls" per function at exit
#include <mpi.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FUNCTIONS = 16 };
static struct {
    const char *name;
    long calls;
} function[MOST_FUNCTIONS];

static bool is_rank(void) {
    const char *wanted = getenv("MPI_FAULT_RANK"), *ours = getenv("OMPI_COMM_WORLD_RANK");
    return wanted && ours && strcmp(wanted, ours) == 0;
}

// Counts a call. Returns true if it must fail.
static bool fails(const char *name) {
    int i = 0;
    if (!is_rank()) return false;
    while (function[i].name && strcmp(function[i].name, name)) i++;
    function[i].name = name;
    function[i].calls++;
    const char *call = getenv("MPI_FAULT_CALL"), *at = getenv("MPI_FAULT_AT");
    bool here = call && at && strcmp(call, name) == 0 && function[i].calls == atol(at);
    if (!here || !getenv("MPI_FAULT_STOP")) return here;
    raise(SIGSTOP);
    return false;
}

__attribute__((destructor)) static void finish(void) {
    const char *path = getenv("MPI_FAULT_COUNT");
    FILE *file = is_rank() && path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (int i = 0; function[i].name; i++) fprintf(file, "%s %ld\n", function[i].name, function[i].calls);
    fclose(file);
}

#define SPOILED(name, parameters, arguments) \
    int name parameters { return fails(#name) ? MPI_ERR_OTHER : P##name arguments; }
SPOILED(MPI_Comm_split, (MPI_Comm comm, int color, int key, MPI_Comm *made), (comm, color, key, made))
SPOILED(MPI_Comm_split_type, (MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *made),
        (comm, type, key, info, made))
SPOILED(MPI_Comm_idup, (MPI_Comm comm, MPI_Comm *made, MPI_Request *request), (comm, made, request))
SPOILED(MPI_Ibarrier, (MPI_Comm comm, MPI_Request *request), (comm, request))
SPOILED(MPI_Ibcast, (void *data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request *request),
        (data, count, type, root, comm, request))
SPOILED(MPI_Iallreduce,
        (const void *own, void *all, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
         MPI_Request *request),
        (own, all, count, type, op, comm, request))
SPOILED(MPI_Iallgather,
        (const void *own, int count, MPI_Datatype type, void *all, int each, MPI_Datatype their,
         MPI_Comm comm, MPI_Request *request),
        (own, count, type, all, each, their, comm, request))
SPOILED(MPI_Igatherv,
        (const void *own, int count, MPI_Datatype type, void *all, const int *each, const int *at,
         MPI_Datatype their, int root, MPI_Comm comm, MPI_Request *request),
        (own, count, type, all, each, at, their, root, comm, request))
SPOILED(MPI_Test, (MPI_Request * request, int *done, MPI_Status *status), (request, done, status))

// Calls that start and end MPI. They are not counted and never fail, but the rank can stop there.
#define STOPPED(name, parameters, arguments) \
    int name parameters { \
        const char *call = getenv("MPI_FAULT_CALL"); \
        if (is_rank() && getenv("MPI_FAULT_STOP") && call && strcmp(call, #name) == 0) raise(SIGSTOP); \
        return P##name arguments; \
    }
STOPPED(MPI_Init_thread, (int *argc, char ***argv, int wanted, int *given), (argc, argv, wanted, given))
STOPPED(MPI_Comm_dup, (MPI_Comm comm, MPI_Comm *made), (comm, made))
STOPPED(MPI_Finalize, (void), ())
