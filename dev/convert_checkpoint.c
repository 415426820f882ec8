// convert_checkpoint: converts checkpoints of the trainer to Hugging Face directories and back, and
// imports Megatron-LM checkpoints. This file has the command line; hf_export.c, hf_import.c and
// megatron.c in dev/convert do the work.
#include <inttypes.h>
#include <stdio.h>

#include "llmc/base/json.h"
#include "dev/convert/hf.h"
#include "dev/convert/megatron.h"
#include "dev/lib/tool.h"
#include "llmc/ranks/launch.h"

typedef enum Precision { EXPORT_FP32, EXPORT_BF16 } Precision;

typedef struct Settings {
    const char *load, *to_hf, *to_peft, *adapters, *from_hf, *from_megatron, *save;
    int64_t step, part_megabytes;
    int divisible, dtype, weights;
    HfTokenizerOptions tokenizer;
    bool no_save_optim, help;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {.help = "Export a checkpoint to a Hugging Face directory"},
    {"load", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(load), .value = "FOLDER",
     .help = "A --save directory of the trainer."},
    {"to-hf", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(to_hf), .value = "FOLDER",
     .help = "The directory to create."},
    {"to-peft", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(to_peft), .value = "FOLDER",
     .help = "The directory to create for the adapters of a LoRA run, in PEFT's format."},
    {"adapters", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(adapters), .value = "FOLDER",
     .help = "A --save directory of a LoRA run: merge its adapters into the model of --load."},
    {"ckpt-step", .kind = OPTION_INT64, .high = 1e15, .low = -1, .initial = "-1", .offset = FIELD(step),
     .value = "N", .help = "Iteration of the checkpoint; -1: the latest."},
    {"dtype", .kind = OPTION_CHOICE, .choices = "fp32|bf16", .initial = "bf16", .offset = FIELD(dtype),
     .value = "WORD", .help = "fp32: the master weights. bf16: the model weights."},
    {"weights", .kind = OPTION_CHOICE, .choices = WEIGHTS_CHOICES, .initial = "outer",
     .offset = FIELD(weights), .value = "WORD",
     .help = "With --local-steps H, outer selects the outer weights, which may be H - 1 iterations old, and "
             "mean selects the mean of all nodes' weights."},
    {"max-shard-size", .kind = OPTION_INT64, .low = 1, .high = 1e9, .initial = "5000",
     .offset = FIELD(part_megabytes), .value = "MB",
     .help = "Maximum size of a weight file; larger models get several files and an index."},
    {.help = "Import a Hugging Face directory or a Megatron-LM checkpoint"},
    {"from-hf", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(from_hf), .value = "FOLDER",
     .help = "A model directory with safetensors files."},
    {"from-megatron", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(from_megatron), .value = "FOLDER",
     .help = "A --save directory of Megatron-LM, in torch_dist format or with one file per rank; see "
             "--ckpt-step."},
    {"save", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(save), .value = "FOLDER",
     .help = "A directory without checkpoints, in which to save iteration 0."},
    {"make-vocab-size-divisible-by", .kind = OPTION_INT, .low = 1, .high = 1 << 20, .initial = "128",
     .offset = FIELD(divisible), .value = "N",
     .help = "Pad the embedding to a multiple of N. Pass the trainer's value of this flag times its "
             "--tensor-model-parallel-size. Megatron-LM checkpoints keep their padding."},
    {"no-save-optim", .kind = OPTION_FLAG, .offset = FIELD(no_save_optim),
     .help = "Save only the weights, for --load --finetune."},
    {.help = "Both"},
    {"vocab-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer.vocab_file), .value = "PATH",
     .help = "The model's vocab.json (default: the directory's, else the one used in training)."},
    {"merge-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer.merge_file), .value = "PATH",
     .help = "Its merges.txt."},
    {"tokenizer-model", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer.model), .value = "PATH",
     .help = "The model's tokenizer.json or its directory, instead of these two files."},
    {"tokenizer-eod", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer.eod), .value = "TOKEN",
     .help = "The end-of-document token of tokenizer.json, if tokenizer_config.json does not name it."},
    {"no-tokenizer", .kind = OPTION_FLAG, .offset = FIELD(tokenizer.none), .help = "Omit the tokenizer."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

static bool check(const Settings *s, Error *err) {
    bool exporting = s->load || s->to_hf || s->to_peft, importing = s->from_hf || s->from_megatron || s->save;
    if (exporting == importing || (s->from_hf && s->from_megatron)) {
        return usage_error(err,
                           "use --load with --to-hf to export, or --save with --from-hf or --from-megatron "
                           "to import; --help lists the flags");
    }
    bool from = s->from_hf || s->from_megatron;
    const char *missing = exporting  ? !s->load                   ? "--load"
                                       : !s->to_hf && !s->to_peft ? "--to-hf"
                                                                  : NULL
                          : !from    ? "--from-hf"
                          : !s->save ? "--save"
                                     : NULL;
    if (missing) return usage_error(err, "%s is missing; --help lists the flags", missing);
    if (s->to_peft && (s->to_hf || s->adapters)) {
        return usage_error(err,
                           "--to-peft exports adapters, and --to-hf a model, into which --adapters merges "
                           "them; use one of the two");
    }
    if (s->adapters && !s->to_hf) return usage_error(err, "--adapters needs --load and --to-hf; add them");
    if (!exporting && s->weights) return usage_error(err, "--weights selects what --load exports; remove it");
    const HfTokenizerOptions *t = &s->tokenizer;
    if (!t->vocab_file != !t->merge_file)
        return usage_error(err, "--vocab-file and --merge-file must be used together; add the other one");
    if ((t->vocab_file != NULL) + (t->model != NULL) + t->none <= 1) return true;
    return usage_error(
        err, "--vocab-file, --tokenizer-model and --no-tokenizer are mutually exclusive; remove all but one");
}

static bool export_folder(const Settings *s, Peers peers, Error *err) {
    HfReport report = {.files = 0};
    HfExport options = {.load = s->load,
                        .iteration = s->step,
                        .output = s->to_peft ? s->to_peft : s->to_hf,
                        .adapters = s->adapters,
                        .fp32 = s->dtype == EXPORT_FP32,
                        .weights = (WeightsChoice)s->weights,
                        .part_bytes = s->part_megabytes * 1000000,
                        .tokenizer = s->tokenizer,
                        .buffer_elements = HF_BUFFER_ELEMENTS,
                        .peers = peers};
    bool ok = (s->to_peft ? hf_export_adapters : hf_export)(&options, &report, err);
    fputs(report.notes, stderr);
    if (ok) {
        fprintf(stderr,
                "Wrote %s: iteration %" PRId64 ", %" PRId64 " parameters in %s, %d file%s of weights.\n",
                options.output, report.iteration, report.parameters, options.fp32 ? "fp32" : "bf16",
                report.files, report.files == 1 ? "" : "s");
    }
    return ok;
}

static bool import_folder(const Settings *s, Peers peers, Error *err) {
    HfReport report;
    HfImport options = {.folder = s->from_hf,
                        .save = s->save,
                        .divisible = s->divisible,
                        .no_optimizer = s->no_save_optim,
                        .tokenizer = s->tokenizer,
                        .buffer_elements = HF_BUFFER_ELEMENTS,
                        .peers = peers};
    bool ok = hf_import(&options, &report, err);
    fputs(report.notes, stderr);
    if (ok)
        fprintf(stderr, "Wrote iteration 0 into %s: %" PRId64 " parameters.\n", s->save, report.parameters);
    return ok;
}

static bool import_megatron(const Settings *s, Peers peers, Error *err) {
    HfReport report;
    MegatronImport options = {.folder = s->from_megatron,
                              .iteration = s->step,
                              .save = s->save,
                              .no_optimizer = s->no_save_optim,
                              .tokenizer = s->tokenizer,
                              .buffer_elements = HF_BUFFER_ELEMENTS,
                              .peers = peers};
    bool ok = megatron_import(&options, &report, err);
    fputs(report.notes, stderr);
    if (ok) {
        fprintf(stderr,
                "Wrote iteration 0 into %s: %" PRId64 " parameters, from iteration %" PRId64
                " in %d file%s.\n",
                s->save, report.parameters, report.iteration, report.files, report.files == 1 ? "" : "s");
    }
    return ok;
}

static bool convert(const Settings *s, Peers peers, Error *err) {
    if (s->load) return export_folder(s, peers, err);
    return s->from_hf ? import_folder(s, peers, err) : import_megatron(s, peers, err);
}

// The functions of checkpoint.h are collective, so set up a world of one rank.
static bool run(const void *flags, int *argc, char ***argv, Error *err) {
    const Settings *settings = (const Settings *)flags;
    Launch launch;
    if (!check(settings, err)) return false;
    launch_init(&launch, argc, argv);
    Peers peers = {launch.world, 0, NULL};
    bool ok = launch.size == 1 ||
              usage_error(err, "convert_checkpoint uses a single process; start it without mpirun");
    if (ok) ok = convert(settings, peers, err);
    if (!ok && launch.rank == 0) error_print(NULL, err->what);
    launch_finalize(&launch);
    err->what[0] = 0;  // already printed
    return ok;
}

int main(int argc, char **argv) {
    Settings settings = {0};
    const Tool tool = {
        table,
        TABLE_ROWS,
        "Usage: convert_checkpoint --load FOLDER --to-hf FOLDER, or --from-hf FOLDER --save FOLDER,\n"
        "       or --from-megatron FOLDER --save FOLDER\n"
        "Exports checkpoints to Hugging Face directories and imports them (GPT-2, Llama, Qwen3,\n"
        "Mistral), and imports Megatron-LM checkpoints.\n",
        &settings,
        run,
        NULL};
    json_use_checked_memory();
    return tool_main(&tool, argc, argv);
}
