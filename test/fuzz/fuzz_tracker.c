// latest_checkpointed_iteration.txt, the tracker file of a checkpoint directory.
#include "llmc/checkpoint/manifest.h"
#include "test/checkpoint_calls.h"
#include "test/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error err = {0};
    fuzz_file(CHECKPOINT_TRACKER, data, size);
    int64_t iteration = newest_checkpoint(fuzz_folder(), &err);
    PROMISE(iteration >= 0 || iteration == CHECKPOINT_UNREADABLE);
    if (iteration == CHECKPOINT_UNREADABLE) fuzz_check_error(&err);
    return 0;
}
