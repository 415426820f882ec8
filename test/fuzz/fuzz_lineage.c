// checkpoints_of_run.txt, the list of a run's checkpoints in its --save directory.
#include "llmc/checkpoint/save_folder.h"
#include "test/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error err = {0};
    Lineage lineage, again;
    uint64_t bytes;
    fuzz_file(LINEAGE_NAME, data, size);
    PROMISE(lineage_read(fuzz_folder(), &lineage, &err));
    // There are no checkpoint directories, so all names come from the list.
    PROMISE(lineage.listed == (lineage.count > 0) && lineage.listed == !*lineage.damage);
    PROMISE(memchr(lineage.damage, 0, sizeof lineage.damage));
    for (int i = 0; i < lineage.count; i++) {
        PROMISE(lineage.iterations[i] >= 0 && (i == 0 || lineage.iterations[i] > lineage.iterations[i - 1]));
        PROMISE(lineage_holds(&lineage, lineage.iterations[i]));
        PROMISE(lineage_before(&lineage, lineage.iterations[i]) == (i ? lineage.iterations[i - 1] : -1));
    }
    if (lineage.listed) {  // the list must survive a round trip
        char *text = lineage_text(&lineage, &bytes);
        fuzz_file(LINEAGE_NAME, text, bytes);
        PROMISE(lineage_read(fuzz_folder(), &again, &err) && again.listed);
        PROMISE(again.count == (lineage.count < LINEAGE_MOST ? lineage.count : (int)LINEAGE_MOST));
        lineage_free(&again);
        free(text);
    }
    lineage_free(&lineage);
    return 0;
}
