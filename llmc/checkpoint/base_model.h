// The frozen model that LoRA adapters were trained on, as recorded in the manifest of their
// checkpoint:
//
//   "base": {"path": "base/", "iteration": 40, "xxh3": "0123456789abcdef"},
//
// Adapters fit only this model, so a resumed run and an export compare it with the model that they
// load. Called by manifest.c, checkpoint_load.c, llmc/run and dev/convert.
#pragma once
#include "llmc/base/json.h"
#include "llmc/base/json_line.h"
LLMC_BEGIN

typedef struct BaseModel {
    const char *path;   // its --save directory as given, for messages; NULL: not recorded
    int64_t iteration;  // for messages
    uint64_t xxh3;      // hash of the hashes of its files; the same in a copy of the checkpoint
} BaseModel;

// Appends the member "base" of a manifest, or nothing if base is NULL or has no path.
void base_model_write(Text *out, const BaseModel *base);
// Parses the member. object: NULL if it is missing. base->path is malloc'ed. Returns a description
// of the fault or NULL.
const char *base_model_parse(const cJSON *object, BaseModel *base);
typedef enum BaseMatch { BASE_SAME, BASE_UNKNOWN, BASE_DIFFERS } BaseMatch;
// Compares the recorded base with the loaded one. Sets err (EXIT_CHECKPOINT) unless they are equal;
// callers may treat it as a warning. step_flag: the flag that selects the iteration of the loaded
// base.
BaseMatch base_model_compare(const BaseModel *recorded, const BaseModel *loaded, const char *step_flag,
                             Error *err);

LLMC_END
