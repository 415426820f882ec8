// Opens the weights of a Hugging Face folder. See hf_files.h.
#include "dev/convert/hf_files.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"

#define WHOLE "model.safetensors"
#define INDEX "model.safetensors.index.json"
// All files stay open. An 18B model has about 15.
enum { MOST_PARTS = 512, INDEX_MAX_BYTES = 16 << 20 };

static int by_name(const void *a, const void *b) {
    return strcmp(((const HfTensorPlace *)a)->name, ((const HfTensorPlace *)b)->name);
}

static void add_tensor(HfFiles *files, const SafeFile *file, const SafeEntry *entry) {
    files->tensors[files->count++] = (HfTensorPlace){entry->name, file, entry};
}

static void make_room(HfFiles *files, int tensors, int parts) {
    files->files = xcalloc((size_t)parts, sizeof(SafeFile), "the files of a folder");
    files->tensors = xcalloc((size_t)tensors + 1, sizeof(HfTensorPlace), "the tensors of a folder");
}

static bool open_whole(HfFiles *files, const char *path, Error *err) {
    SafeFile file;
    if (!safe_file_open(&file, path, err)) return false;
    make_room(files, file.count, 1);
    files->files[files->file_count++] = file;
    for (int i = 0; i < file.count; i++) add_tensor(files, &files->files[0], &file.entries[i]);
    return true;
}

static bool plain_name(const char *name) {
    size_t length = strlen(name), ending = strlen(".safetensors");
    return *name != '.' && !strchr(name, '/') && length > ending && length <= 200 &&
           strcmp(name + length - ending, ".safetensors") == 0;
}

// Returns the file of this name, which is opened on first use.
static const SafeFile *part(HfFiles *files, const char *folder, const char *name, Error *err) {
    char *path = text_format("%s/%s", folder, name);
    const SafeFile *found = NULL;
    for (int i = 0; i < files->file_count && !found; i++) {
        if (strcmp(files->files[i].path, path) == 0) found = &files->files[i];
    }
    if (!found && files->file_count == MOST_PARTS) {
        ckpt_error(err, "%s/" INDEX " names more than %d files; save the model in larger parts", folder,
                   MOST_PARTS);
    } else if (!found && safe_file_open(&files->files[files->file_count], path, err)) {
        found = &files->files[files->file_count++];
    }
    free(path);
    return found;
}

static bool add_indexed(HfFiles *files, const char *folder, const cJSON *item, Error *err) {
    if (!cJSON_IsString(item) || !plain_name(item->valuestring)) {
        return ckpt_error(err,
                          "%s/" INDEX
                          " maps '%.100s' to '%.100s', which is not the name of a safetensors file in the "
                          "folder; save or download it again",
                          folder, item->string, cJSON_IsString(item) ? item->valuestring : "");
    }
    const SafeFile *file = part(files, folder, item->valuestring, err);
    if (!file) return false;
    const SafeEntry *entry = safe_file_find(file, item->string);
    if (entry) {
        add_tensor(files, file, entry);
        return true;
    }
    return ckpt_error(err, "%s has no '%.100s', although " INDEX " lists it; save or download it again",
                      file->path, item->string);
}

static bool read_index(HfFiles *files, const char *folder, const cJSON *map, Error *err) {
    if (!cJSON_IsObject(map)) {
        return ckpt_error(err, "%s/" INDEX " has no weight_map; save or download it again", folder);
    }
    make_room(files, cJSON_GetArraySize(map), MOST_PARTS);
    for (const cJSON *item = map->child; item; item = item->next) {
        if (!add_indexed(files, folder, item, err)) return false;
    }
    return true;
}

static bool open_parts(HfFiles *files, const char *folder, const char *path, Error *err) {
    cJSON *index = json_read_object(path, INDEX_MAX_BYTES, err);
    bool ok = index && read_index(files, folder, cJSON_GetObjectItemCaseSensitive(index, "weight_map"), err);
    cJSON_Delete(index);
    return ok;
}

static bool no_weights(const char *folder, Error *err) {
    char *pickled = text_format("%s/pytorch_model.bin", folder);
    bool there = durable_exists(pickled);
    free(pickled);
    return ckpt_error(err,
                      there ? "%s holds pickled weights, which are not read because pickles can run code; "
                              "save the model as safetensors"
                            : "%s has neither " WHOLE " nor " INDEX
                              "; use a folder written by save_pretrained",
                      folder);
}

bool hf_files_open(HfFiles *files, const char *folder, Error *err) {
    char *whole = text_format("%s/" WHOLE, folder), *index = text_format("%s/" INDEX, folder);
    memset(files, 0, sizeof *files);
    bool ok = durable_exists(whole)   ? open_whole(files, whole, err)
              : durable_exists(index) ? open_parts(files, folder, index, err)
                                      : no_weights(folder, err);
    free(whole);
    free(index);
    if (!ok) {
        hf_files_close(files);
        return false;
    }
    qsort(files->tensors, (size_t)files->count, sizeof *files->tensors, by_name);
    for (int i = 1; i < files->count && ok; i++) {
        if (strcmp(files->tensors[i - 1].name, files->tensors[i].name) == 0)
            ok = ckpt_error(err, "%s/" INDEX " lists '%.100s' twice; save or download it again", folder,
                            files->tensors[i].name);
    }
    if (!ok) hf_files_close(files);
    return ok;
}

void hf_files_close(HfFiles *files) {
    for (int i = 0; i < files->file_count; i++) safe_file_close(&files->files[i]);
    free(files->files);
    free(files->tensors);
    *files = (HfFiles){0};
}

const HfTensorPlace *hf_files_find(const HfFiles *files, const char *name) {
    HfTensorPlace key = {.name = name};
    return (const HfTensorPlace *)bsearch(&key, files->tensors, (size_t)files->count, sizeof key, by_name);
}
