// Checks special token ids of Hugging Face directories. See special_ids.h.
#include "dev/lib/special_ids.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/json.h"

// Counts the ids in [lo, hi] of a number or a list.
static int count_ids(const cJSON *item, int64_t lo, int64_t hi) {
    int64_t id;
    if (!cJSON_IsArray(item)) return json_int64(item, lo, hi, &id);
    int count = 0;
    for (item = item->child; item; item = item->next) count += json_int64(item, lo, hi, &id);
    return count;
}

bool special_ids_set_eos(cJSON *object, int eod) {
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(object, HF_SPECIAL_ID[0]);
    if (!ids || cJSON_IsNull(ids) || count_ids(ids, eod, eod)) return false;
    return cJSON_ReplaceItemInObjectCaseSensitive(object, HF_SPECIAL_ID[0], cJSON_CreateNumber(eod));
}

void special_ids_note(const cJSON *object, const char *file, int64_t words, char *text, size_t size) {
    for (int i = 0; i < HF_SPECIAL_IDS; i++) {
        const cJSON *ids = cJSON_GetObjectItemCaseSensitive(object, HF_SPECIAL_ID[i]);
        if (!ids || cJSON_IsNull(ids)) continue;
        int all = cJSON_IsArray(ids) ? cJSON_GetArraySize(ids) : 1;
        size_t used = strlen(text);
        if (all > 0 && count_ids(ids, 0, words - 1) == all) continue;
        snprintf(text + used, size - used, "%s: %s is not a token id below %" PRId64 ", or a list of them.\n",
                 file, HF_SPECIAL_ID[i], words);
    }
}
