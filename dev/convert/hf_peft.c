// Exports LoRA adapters as a folder of PEFT: see hf.h.
//
// PEFT has separate adapters for queries, keys and values, and for the gate and up projections. The
// trainer has one A for each of these groups, which is written once per member. B is divided like
// the rows of the matrix.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "dev/convert/adapters.h"
#include "dev/convert/hf.h"
#include "dev/convert/hf_folder.h"
#include "dev/convert/hf_map.h"
#include "llmc/base/dtype.h"
#include "llmc/base/durable.h"
#include "llmc/checkpoint/safetensors.h"

typedef struct Peft {
    const HfExport *options;
    Adapters adapters;
    HfMap map;
    bool transposed;  // the matrices are GPT-2's Conv1D
} Peft;

// Returns the index of A for a Hugging Face tensor; -1: it has no adapter.
static int adapter_of(const Peft *p, const HfTensor *t) {
    return adapters_of(&p->adapters, p->adapters.model.gpt.whole[t->whole].name);
}
static int64_t outputs_of(const HfTensor *t) { return t->transposed ? t->columns : t->rows; }

// Name without ".weight".
static int stem_length(const HfTensor *t) { return (int)(strlen(t->name) - strlen(".weight")); }

// --- adapter_model.safetensors -------------------------------------------------------------------

static bool append(const Peft *p, SafeWriter *writer, const float *values, int64_t n, Error *err) {
    if (p->options->fp32) return safe_writer_append(writer, values, (uint64_t)n * sizeof *values, err);
    uint16_t *rounded = xmalloc((size_t)n * sizeof *rounded, "an adapter");
    for (int64_t i = 0; i < n; i++) rounded[i] = bf16_from_float(values[i]);
    bool ok = safe_writer_append(writer, rounded, (uint64_t)n * sizeof *rounded, err);
    free(rounded);
    return ok;
}

static bool append_b(const Peft *p, SafeWriter *writer, const HfTensor *t, const float *B, Error *err) {
    int64_t rank = p->adapters.model.gpt.lora.rank, run, row;
    for (int64_t output = 0; output < outputs_of(t); output += run) {
        run = hf_map_run(&p->map, t, output, &row);
        if (!append(p, writer, B + row * rank, run * rank, err)) return false;
    }
    return true;
}

static bool append_all(const Peft *p, SafeWriter *writer, Error *err) {
    const Lora *lora = &p->adapters.model.gpt.lora;
    for (int i = 0; i < p->map.count; i++) {
        const HfTensor *t = &p->map.tensors[i];
        int a = adapter_of(p, t);
        if (a < 0) continue;
        if (!append(p, writer, p->adapters.value[a], tensor_whole_elements(&lora->whole[a]), err) ||
            !append_b(p, writer, t, p->adapters.value[a + 1], err))
            return false;
    }
    return true;
}

static int list_tensors(const Peft *p, SafeTensor *list) {
    const Lora *lora = &p->adapters.model.gpt.lora;
    int n = 0;
    for (int i = 0; i < p->map.count; i++) {
        const HfTensor *t = &p->map.tensors[i];
        int a = adapter_of(p, t);
        if (a < 0) continue;
        int64_t in = lora->whole[a].whole[1], elements[2] = {lora->rank * in, outputs_of(t) * lora->rank};
        for (int k = 0; k < 2; k++) {
            list[n++] = (SafeTensor){.name = text_format("base_model.model.%.*s.lora_%c.weight",
                                                         stem_length(t), t->name, "AB"[k]),
                                     .dtype = p->options->fp32 ? "F32" : "BF16",
                                     .elements = elements[k],
                                     .columns = k ? lora->rank : in};
        }
    }
    return n;
}

static bool write_weights(const Peft *p, const HfFolder *folder, Error *err) {
    uint64_t bytes, xxh3;
    SafeTensor *list = xcalloc(2 * (size_t)p->map.count, sizeof *list, "the parameter table");
    int n = list_tensors(p, list);
    char *path = text_format("%s/adapter_model.safetensors", folder->fresh);
    SafeWriter *writer = safe_writer_open(path, list, n, "{\"format\":\"pt\"}", err);
    bool ok = writer && append_all(p, writer, err);
    if (ok) ok = safe_writer_close(writer, &bytes, &xxh3, err);
    else if (writer) safe_writer_discard(writer);
    for (int i = 0; i < n; i++) free(list[i].name);
    free(list);
    free(path);
    return ok;
}

// --- adapter_config.json -------------------------------------------------------------------------

// Adds the module of a Hugging Face tensor, "mlp.c_proj", unless it is listed. "c_proj" is not
// enough, because GPT-2 has two of them.
static void add_target(cJSON *targets, const HfTensor *t) {
    char name[96];
    snprintf(name, sizeof name, "%.*s", stem_length(t), t->name);
    const char *module = strrchr(name, '.');
    assert(module);
    while (module > name && module[-1] != '.') module--;
    const cJSON *listed;
    cJSON_ArrayForEach(listed, targets) {
        if (strcmp(listed->valuestring, module) == 0) return;
    }
    cJSON_AddItemToArray(targets, cJSON_CreateString(module));
}

static char *adapter_config(const Peft *p) {
    const Config *c = &p->adapters.model.config;
    cJSON *config = cJSON_CreateObject();
    cJSON_AddStringToObject(config, "peft_type", "LORA");
    cJSON_AddStringToObject(config, "task_type", "CAUSAL_LM");
    cJSON_AddNullToObject(config, "base_model_name_or_path");
    cJSON_AddStringToObject(config, "bias", "none");
    cJSON_AddBoolToObject(config, "fan_in_fan_out", p->transposed);
    cJSON_AddBoolToObject(config, "inference_mode", true);
    cJSON_AddBoolToObject(config, "init_lora_weights", true);
    cJSON_AddNumberToObject(config, "lora_alpha", c->lora_alpha);
    cJSON_AddNumberToObject(config, "lora_dropout", c->lora_dropout);
    cJSON_AddNullToObject(config, "modules_to_save");
    cJSON_AddNumberToObject(config, "r", c->lora_rank);
    cJSON_AddBoolToObject(config, "use_rslora", false);
    cJSON *targets = cJSON_AddArrayToObject(config, "target_modules");
    for (int i = 0; i < p->map.count; i++) {
        if (adapter_of(p, &p->map.tensors[i]) >= 0) add_target(targets, &p->map.tensors[i]);
    }
    char *text = cJSON_Print(config);
    cJSON_Delete(config);
    return text;
}

static bool write_config(const Peft *p, const HfFolder *folder, Error *err) {
    char *text = adapter_config(p), *path = text_format("%s/adapter_config.json", folder->fresh);
    bool ok = durable_write_file(path, text, strlen(text), err);
    cJSON_free(text);
    free(path);
    return ok;
}

// --- the folder ----------------------------------------------------------------------------------

static bool write_folder(const Peft *p, Error *err) {
    HfFolder folder;
    bool ok = hf_folder_open(&folder, p->options->output, err) && write_weights(p, &folder, err) &&
              write_config(p, &folder, err) && hf_folder_publish(&folder, err);
    hf_folder_close(&folder, !ok);
    return ok;
}

static bool make_map(Peft *p, Error *err) {
    const ImportedModel *model = &p->adapters.model;
    const HfFamily *family = hf_family_of(model, err);
    if (!family) return false;
    hf_map_make(&p->map, family, model, model->config.vocab_size_unpadded);
    for (int i = 0; i < p->map.count; i++) p->transposed |= p->map.tensors[i].transposed;
    return true;
}

bool hf_export_adapters(const HfExport *options, HfReport *report, Error *err) {
    Peft p = {.options = options};
    AdaptersChoice choice = {options->load, options->iteration, options->fp32, options->weights,
                             options->peers};
    memset(report, 0, sizeof *report);
    bool ok = adapters_open(&p.adapters, &choice, &report->iteration, err) && make_map(&p, err) &&
              write_folder(&p, err);
    const Lora *lora = &p.adapters.model.gpt.lora;
    for (int i = 0; i < lora->whole_tensors; i++)
        report->parameters += tensor_whole_elements(&lora->whole[i]);
    report->files = 1;
    const BaseModel *base = ok ? checkpoint_base(p.adapters.checkpoint) : NULL;
    int used = snprintf(report->notes, sizeof report->notes, "%s", p.adapters.note);
    if (base && base->path) {
        snprintf(report->notes + used, sizeof report->notes - (size_t)used,
                 "The adapters belong to iteration %" PRId64 " of %.600s.\n", base->iteration, base->path);
    }
    hf_map_free(&p.map);
    adapters_close(&p.adapters);
    return ok;
}
