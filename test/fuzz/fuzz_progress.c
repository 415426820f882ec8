// progress.txt, from which a resumed run reads its counters.
#include "llmc/log/progress.h"
#include "test/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error err = {0};
    fuzz_file("progress.txt", data, size);
    Progress *progress = progress_open(fuzz_folder(), 4, 1e15, true, &err);
    PROMISE(progress);
    progress_checkpoint(progress, 10, 2e15, 1e9);
    progress_close(progress);
    return 0;
}
