// The base model of LoRA adapters: see base_model.h.
#include "llmc/checkpoint/base_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void base_model_write(Text *out, const BaseModel *base) {
    if (!base || !base->path) return;
    text_add(out, "\"base\": {\"path\": ");
    text_add_quoted(out, base->path);
    text_add(out, ", \"iteration\": %" PRId64 ", \"xxh3\": \"%016" PRIx64 "\"},\n", base->iteration,
             base->xxh3);
}

const char *base_model_parse(const cJSON *object, BaseModel *base) {
    memset(base, 0, sizeof *base);
    if (!object) return NULL;
    const char *path = json_member_string(object, "path");
    if (!path || !json_member_int64(object, "iteration", 0, JSON_INT_MAX, &base->iteration) ||
        !json_member_hash(object, "xxh3", &base->xxh3))
        return "its \"base\" is malformed";
    base->path = xstrdup(path);
    return NULL;
}

BaseMatch base_model_compare(const BaseModel *recorded, const BaseModel *loaded, const char *step_flag,
                             Error *err) {
    char hint[80] = " model";
    if (!recorded->path) {
        ckpt_error(err,
                   "the adapters' checkpoint does not record its base model, so %.600s was not compared; "
                   "check that they were trained on it",
                   loaded->path);
        return BASE_UNKNOWN;
    }
    if (recorded->xxh3 == loaded->xxh3) return BASE_SAME;
    if (recorded->iteration != loaded->iteration)
        snprintf(hint, sizeof hint, ", for example with %s %" PRId64, step_flag, recorded->iteration);
    ckpt_error(err,
               "the adapters were trained on iteration %" PRId64 " of %.300s, but iteration %" PRId64
               " of %.300s has other weights; load the original base%s",
               recorded->iteration, recorded->path, loaded->iteration, loaded->path, hint);
    return BASE_DIFFERS;
}
