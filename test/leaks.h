// Leak detection in MPI test programs under AddressSanitizer. MPI never frees some allocations, so
// MPI_Init is excluded, and other allocations of MPI are recognized by the names of its libraries.
// The check runs before MPI_Finalize, which unloads these libraries. Without the sanitizer the weak
// functions are null and nothing is checked. Included by the file with main().
#pragma once
#include <mpi.h>

#include "llmc/ranks/launch.h"

void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));
const char *__lsan_default_suppressions(void);
const char *__lsan_default_options(void);
const char *__lsan_default_suppressions(void) {
    return "leak:libopen-pal\nleak:libopen-rte\nleak:libmpi\nleak:libpmix\nleak:libhwloc\nleak:"
           "libevent\nleak:mca_\nleak:libucp\nleak:libucs\nleak:libfabric\n";
}
const char *__lsan_default_options(void) { return "leak_check_at_exit=0:print_suppressions=0"; }

static inline void leaks_of_mpi_begin(void) {
    if (__lsan_disable) __lsan_disable();
}
static inline void leaks_of_mpi_end(void) {
    if (__lsan_enable) __lsan_enable();
}
// MPI_Init without leak detection.
static inline void leaks_start_mpi(int *argc, char ***argv) {
    leaks_of_mpi_begin();
    MPI_Init(argc, argv);
    leaks_of_mpi_end();
}
// launch_init without leak detection.
static inline void leaks_launch(Launch *launch, int *argc, char ***argv) {
    leaks_of_mpi_begin();
    launch_init(launch, argc, argv);
    leaks_of_mpi_end();
}
// Reports leaks of this process. Returns 1 if there are any. Call before MPI_Finalize.
static inline int leaks_found(void) {
    return __lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check() ? 1 : 0;
}
