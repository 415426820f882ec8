// Special token ids in the JSON files of Hugging Face directories. Each is a number, a list of
// numbers, null or missing. Called by dev/convert.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Keys of config.json and generation_config.json.
#define HF_SPECIAL_ID ((const char *const[]){"eos_token_id", "bos_token_id", "pad_token_id"})
enum { HF_SPECIAL_IDS = 3 };

// Sets eos_token_id to the end-of-document id, unless it is or contains this id, or is null or
// missing. Returns true if it changed.
bool special_ids_set_eos(cJSON *object, int eod);
// Appends one line to the text of `size` bytes for each key whose ids are not all below `words`.
// file: name for the lines.
void special_ids_note(const cJSON *object, const char *file, int64_t words, char *text, size_t size);

LLMC_END
