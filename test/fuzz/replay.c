// main() of the fuzz targets without libFuzzer. Arguments are files and directories; runs the
// target once on every file. Prints the name of the file first, because a failed check or a
// sanitizer ends the process.
#include <dirent.h>
#include <sys/stat.h>

#include "test/fuzz/fuzz.h"

static int replayed;

static void replay_file(const char *path) {
    FILE *file = fopen(path, "rb");
    struct stat status;
    if (!file || fstat(fileno(file), &status)) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(1);
    }
    size_t bytes = (size_t)status.st_size;
    uint8_t *data = (uint8_t *)xmalloc(bytes ? bytes : 1, "an input");
    if (fread(data, 1, bytes, file) != bytes) exit(1);
    fclose(file);
    printf("# %s (%zu bytes)\n", path, bytes);
    fflush(stdout);
    LLVMFuzzerTestOneInput(data, bytes);
    free(data);
    replayed++;
}

static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void replay_folder(const char *path) {
    struct dirent **entries;
    int count = scandir(path, &entries, visible, alphasort);
    for (int i = 0; i < count; i++) {
        char file[4096];
        snprintf(file, sizeof file, "%s/%s", path, entries[i]->d_name);
        replay_file(file);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        struct stat status;
        // A target may have no directory of past failures.
        if (stat(argv[i], &status)) continue;
        if (S_ISDIR(status.st_mode)) replay_folder(argv[i]);
        else replay_file(argv[i]);
    }
    printf("# %d inputs\n", replayed);
    return replayed ? 0 : 1;
}
