// manifest.json of a checkpoint: what was saved, by which program, in which files. Written by checkpoint.c, read by checkpoint_load.c.
// Read as hostile input: sizes, ranges and names are checked, file names are plain names, and the text carries its own hash.
//
//   {"format": "sdp4bit.c checkpoint", "version": 1, "program": "...", "commit": "...", "libraries": "...", "world_size": 4, "weight_dtype": "BF16",
//    "state": {"iteration": 100, ..., "beta1_power": "0x1.9p-1"},          doubles as C hexadecimal floats: to the bit
//    "arguments": {...},
//    "tensors": [{"name": "wte", "shape": [64, 32]}, ...],                 all parameters, logical order
//    "kinds": ["master", "exp_avg", "exp_avg_sq", "weight"],
//    "files": [{"folder": "mp_rank_00", "name": "shard_00000_of_00004.safetensors", "bytes": 1234, "xxh3": "0123456789abcdef",
//               "slices": [[tensor, kind, lo, hi], ...]}, ...],            slices in the order of their data; tensor and kind count from 0
//    "xxh3": "0123456789abcdef"}                                           last line: xxh3-64 of all text before it
#pragma once
#include "llmc/checkpoint/checkpoint.h"
LLMC_BEGIN

#define MANIFEST_NAME "manifest.json"
#define CHECKPOINT_TRACKER "latest_checkpointed_iteration.txt"
enum { CHECKPOINT_TRACKER_MAX_BYTES = 4096, MANIFEST_MAX_BYTES = 256 << 20, MANIFEST_DIMS = 2 };

typedef struct ManifestSlice {
    int tensor, file;      // indices
    SliceKind kind;
    int64_t lo, hi;        // elements of the flattened tensor
    uint64_t begin;        // of element lo, in the file's data section, bytes
} ManifestSlice;

typedef struct ManifestFile {
    char *folder, *name;
    uint64_t bytes, xxh3;  // of the whole file
    int first, count;      // its slices
} ManifestFile;

typedef struct Manifest {
    RunState state;
    char *arguments;        // JSON text
    char weight_dtype[8];   // "BF16" or "F32"
    CheckpointTensor *tensors; int tensor_count;
    ManifestFile *files; int file_count;
    ManifestSlice *slices; int slice_count;  // file by file
    int *order;             // slice indices sorted by (tensor, kind, lo); no two overlap
} Manifest;

// safetensors dtype of a kind's elements: "F32", or for weights this build's floatX.
const char *slice_kind_dtype(SliceKind kind);
// The name of a slice's tensor in its shard: "<parameter>|<kind>|<lo>", malloc'ed.
char *slice_name(const char *tensor, SliceKind kind, int64_t lo);
// Elements of a parameter; 0 for an impossible shape or one of more than 2^48 elements.
int64_t checkpoint_tensor_elements(const CheckpointTensor *tensor);

// One entry of "files" for a shard written by `rank` (malloc'ed, *bytes long). order: the slices in the order of their data, indices into save->slices.
char *manifest_file_entry(const CheckpointSave *save, const char *folder, const char *name, const int *order, int count, uint64_t file_bytes, uint64_t xxh3,
                          size_t *bytes);
// The whole manifest (malloc'ed, *bytes long) around the files' entries, separated by ",\n".
char *manifest_text(const CheckpointSave *save, int world_size, const char *entries, size_t entries_bytes, size_t *bytes);

// path: for messages. EXIT_CHECKPOINT names the fault.
bool manifest_parse(Manifest *manifest, const char *text, size_t bytes, const char *path, Error *err);
// That every kind which is there at all is there for every element of every tensor; else names the first tensor and range that is missing.
bool manifest_check_complete(const Manifest *manifest, const char *path, Error *err);
void manifest_free(Manifest *manifest);
// Index of a tensor, or -1.
int manifest_find_tensor(const Manifest *manifest, const char *name);
// Position in `order` of the first slice of (tensor, kind) that ends after lo; it may belong to another tensor or kind, or be slice_count.
int manifest_first_slice(const Manifest *manifest, int tensor, SliceKind kind, int64_t lo);

LLMC_END
