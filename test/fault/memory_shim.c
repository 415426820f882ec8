// LD_PRELOAD library of test/fault/memory.sh. Makes allocations fail in the program and in the
// libraries that it uses for JSON, patterns and hashes. Allocations of MPI and the C library never
// fail, because their behavior without memory is not under test.
//   MEMORY_FAULT_PROGRAM  name of the program; other processes (launchers) are not affected
//   MEMORY_FAULT_RANK     Open MPI rank; every rank if unset
//   MEMORY_FAULT_AT       index of the allocation that fails, from 1; 0: none
//   MEMORY_FAULT_LAST     number of further allocations that fail after it (default 0)
//   MEMORY_FAULT_THREAD   1: count only allocations of threads other than the main thread, and
//                         print a line if one calls MPI_Abort, which only the main thread may do
//   MEMORY_FAULT_COUNT    file that receives the number of allocations at exit
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// glibc's implementations of the functions defined here.
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

enum { MOST_RANGES = 32 };
static struct {
    bool active, threads;
    int ranges;
    uintptr_t begin[MOST_RANGES], end[MOST_RANGES];  // code whose allocations may fail
    long at, last;
} shim;
static atomic_long calls;

static bool is_watched(const char *object) {
    const char *const libraries[] = {"libcjson", "libpcre2", "libutf8proc", "libxxhash"};
    if (!*object) return true;  // the program itself
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        if (strstr(object, libraries[i])) return true;
    }
    return false;
}

static int add_ranges(struct dl_phdr_info *info, size_t size, void *context) {
    for (int i = 0; is_watched(info->dlpi_name) && i < info->dlpi_phnum && shim.ranges < MOST_RANGES; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_X)) continue;
        shim.begin[shim.ranges] = info->dlpi_addr + header->p_vaddr;
        shim.end[shim.ranges++] = info->dlpi_addr + header->p_vaddr + header->p_memsz;
    }
    return 0;
}

static long number_of(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

__attribute__((constructor)) static void start(void) {
    const char *program = getenv("MEMORY_FAULT_PROGRAM"), *rank = getenv("MEMORY_FAULT_RANK"),
               *ours = getenv("OMPI_COMM_WORLD_RANK");
    if (!program || strcmp(program, program_invocation_short_name) != 0) return;
    if (rank && (!ours || strcmp(rank, ours) != 0)) return;
    shim.at = number_of("MEMORY_FAULT_AT");
    shim.threads = number_of("MEMORY_FAULT_THREAD") != 0;
    shim.last = shim.at + number_of("MEMORY_FAULT_LAST");
    dl_iterate_phdr(add_ranges, NULL);
    shim.active = true;
}

__attribute__((destructor)) static void finish(void) {
    const char *path = getenv("MEMORY_FAULT_COUNT");
    FILE *file = shim.active && path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", atomic_load(&calls));
    fclose(file);
}

// Returns true if this allocation, requested by the code at `caller`, must fail.
static bool fails(const void *caller) {
    uintptr_t place = (uintptr_t)caller;
    bool watched = false;
    for (int i = 0; shim.active && i < shim.ranges; i++)
        watched |= place >= shim.begin[i] && place < shim.end[i];
    if (!watched || (shim.threads && gettid() == getpid())) return false;
    long call = atomic_fetch_add(&calls, 1) + 1;
    if (shim.at == 0 || call < shim.at || call > shim.last) return false;
    errno = ENOMEM;
    return true;
}
#define FAILS fails(__builtin_return_address(0))

void *malloc(size_t bytes) { return FAILS ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return FAILS ? NULL : __libc_calloc(count, bytes); }
void *realloc(void *old, size_t bytes) { return FAILS ? NULL : __libc_realloc(old, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) {
    return FAILS ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    if (FAILS || !(*memory = __libc_memalign(alignment, bytes))) return ENOMEM;
    return 0;
}

// C library functions that allocate for the program.
char *strdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = FAILS ? NULL : (char *)__libc_malloc(bytes);
    return copy ? (char *)memcpy(copy, text, bytes) : NULL;
}

char *strndup(const char *text, size_t most) {
    size_t bytes = strnlen(text, most);
    char *copy = FAILS ? NULL : (char *)__libc_malloc(bytes + 1);
    if (!copy) return NULL;
    copy[bytes] = 0;
    return (char *)memcpy(copy, text, bytes);
}

int vasprintf(char **text, const char *format, va_list args) {
    if (FAILS) return -1;
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    *text = length < 0 ? NULL : (char *)__libc_malloc((size_t)length + 1);
    return *text ? vsnprintf(*text, (size_t)length + 1, format, args) : -1;
}

FILE *open_memstream(char **text, size_t *bytes) {
    if (FAILS) return NULL;
    FILE *(*next)(char **, size_t *);
    *(void **)&next = dlsym(RTLD_NEXT, "open_memstream");
    return next(text, bytes);
}

// comm: an int or a pointer, depending on the MPI library.
int MPI_Abort(void *comm, int code) {
    int (*next)(void *, int);
    *(void **)&next = dlsym(RTLD_NEXT, "MPI_Abort");
    if (gettid() != getpid()) fprintf(stderr, "MPI_Abort was called outside the main thread\n");
    return next(comm, code);
}
