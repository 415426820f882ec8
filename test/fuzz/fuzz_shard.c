// Token shards. The input is <prefix>.idx and <prefix>.bin, separated by eight 0xFF bytes. Accepted
// shards are read completely, as by the dataset.
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/data/dataset.h"
#include "llmc/data/shard.h"
#include "test/fuzz/fuzz.h"

enum { MARK_BYTES = 8, MOST_SAMPLES = 32 };

// Replaces mappings with heap memory. A mapping extends to the end of its last page, which may hide
// reads past the end of the file. The linker redirects the calls of shard.c to here (--wrap).
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *at, size_t bytes);
static void *mapped[4];

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 || protection != PROT_READ) return __real_mmap(at, bytes, protection, flags, fd, offset);
    void *memory = xmalloc(bytes, "a mapped file");
    if (pread(fd, memory, bytes, offset) != (ssize_t)bytes) abort();
    for (int i = 0; i < 4; i++) {
        if (mapped[i]) continue;
        mapped[i] = memory;
        return memory;
    }
    abort();
}

int __wrap_munmap(void *at, size_t bytes) {
    for (int i = 0; i < 4; i++) {
        if (mapped[i] != at) continue;
        free(at);
        mapped[i] = NULL;
        return 0;
    }
    return __real_munmap(at, bytes);
}

static void read_sequences(const Shard *s) {
    int64_t sum = 0;
    for (int64_t i = 0; i < s->sequences; i++) {
        int64_t length = shard_length(s, i);
        PROMISE(length >= 0 && shard_position(s, i) == sum);
        int32_t *ids = (int32_t *)fuzz_copy(NULL, 0);
        ids = (int32_t *)xrealloc(ids, (size_t)length * sizeof *ids + 1, "ids");
        shard_read(s, shard_position(s, i), length, ids);
        free(ids);
        sum += length;
    }
    PROMISE(sum == s->tokens);
    for (int64_t d = 0; d < s->documents; d++) PROMISE(shard_boundary(s, d) <= shard_boundary(s, d + 1));
    PROMISE(shard_boundary(s, 0) == 0 && shard_boundary(s, s->documents) == s->sequences);
}

static void read_samples(const Shard *s, int seq_length) {
    double bounds[SPLITS + 1] = {0, 0.5, 0.5, 1};
    for (int split = 0; split < SPLITS; split++) {
        GptDataset d;
        Error err = {0};
        int64_t first, end;
        split_range(bounds, split, s->sequences, &first, &end);
        if (!gpt_dataset_build(&d, s, &(PartRequest){split, first, end, MOST_SAMPLES, seq_length, 1234, NULL},
                               NULL, &err)) {
            fuzz_check_error(&err);
            continue;
        }
        PROMISE(d.samples >= MOST_SAMPLES);
        int32_t *tokens = (int32_t *)xmalloc(((size_t)seq_length + 1) * sizeof *tokens, "a sample");
        for (int64_t i = 0; i < MOST_SAMPLES; i++) {
            gpt_dataset_sample(&d, i, tokens);
            TokenPlace place = gpt_dataset_place(&d, i, seq_length);
            PROMISE(place.sequence >= first && place.sequence < end &&
                    place.offset < shard_length(s, place.sequence));
        }
        free(tokens);
        gpt_dataset_free(&d);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint8_t mark[MARK_BYTES] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFE};
    const uint8_t *separator = size ? (const uint8_t *)memmem(data, size, mark, MARK_BYTES) : NULL;
    size_t index_bytes = separator ? (size_t)(separator - data) : size,
           rest = separator ? size - index_bytes - MARK_BYTES : 0;
    char prefix[512];
    fuzz_file("shard.bin", separator ? separator + MARK_BYTES : data, rest);
    snprintf(prefix, sizeof prefix, "%s", fuzz_file("shard.idx", data, index_bytes));
    prefix[strlen(prefix) - 4] = 0;
    Shard shard;
    Error err = {0};
    if (!shard_open(&shard, prefix, &err)) {
        fuzz_check_error(&err);
        return 0;
    }
    read_sequences(&shard);
    read_samples(&shard, 1);
    read_samples(&shard, 7);
    shard_close(&shard);
    return 0;
}
