// A folder that an export creates: see hf_folder.h.
#include "dev/convert/hf_folder.h"

#include <dirent.h>
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>

#include "llmc/base/durable.h"

bool hf_folder_check(const char *output, Error *err) {
    DIR *folder = opendir(output);
    if (!folder && errno == ENOENT) return true;
    if (!folder) return durable_error(err, "make", output);
    int entries = 0;
    while (readdir(folder)) entries++;
    closedir(folder);
    if (entries <= 2) return true;  // "." and ".."
    return usage_error(err, "%s exists and is not empty; choose a new folder", output);
}

bool hf_folder_open(HfFolder *f, const char *output, Error *err) {
    *f = (HfFolder){.output = output};
    if (!hf_folder_check(output, err)) return false;
    char *copy = xstrdup(output), *again = xstrdup(output);
    f->parent = xstrdup(dirname(copy));
    f->fresh = text_format("%s/.%s.tmp", f->parent, basename(again));
    free(copy);
    free(again);
    return durable_make_folders(f->parent, err) && durable_remove_tree(f->fresh, err) &&
           durable_make_folders(f->fresh, err);
}

bool hf_folder_publish(const HfFolder *f, Error *err) {
    if (!durable_sync_folder(f->fresh, err)) return false;
    if (rename(f->fresh, f->output) != 0) return durable_error(err, "rename to", f->output);
    return durable_sync_folder(f->parent, err);
}

void hf_folder_close(HfFolder *f, bool failed) {
    Error ignored;  // the first error is reported already
    if (failed && f->fresh) durable_remove_tree(f->fresh, &ignored);
    free(f->parent);
    free(f->fresh);
    *f = (HfFolder){0};
}
