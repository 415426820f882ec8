// manifest.json of a checkpoint: what was saved, by which program, in which files. Written by
// checkpoint.c, read by checkpoint_load.c. Read as hostile input: sizes, ranges and names are
// checked, file names are plain names, and the text carries its own hash.
//
//   {"format": "sdp4bit.c checkpoint", "version": 2, "program": "...", "commit": "...",
//    "libraries": "...", "world_size": 4, "weight_dtype": "BF16",
//    "state": {"iteration": 100, ..., "beta1_power": "0x1.9p-1"},     doubles as hexadecimal floats
//    "nodes": [{...}, ...],           counters of each node, where nodes train by themselves
//    "arguments": {...},
//    "tensors": [{"name": "wte", "shape": [64, 32]}, ...],       all parameters, whole, in order
//    "kinds": ["master", "exp_avg", "exp_avg_sq", "weight"],
//    "files": [{"folder": "mp_rank_00", "name": "shard_00000_of_00004.safetensors", "bytes": 1234,
//               "xxh3": "0123456789abcdef",
//               "slices": [[tensor, kind, lo, hi], [tensor, kind, lo, hi, first, count],
//                          [tensor, kind, lo, hi, node], ...]},
//              ...],
//    "xxh3": "0123456789abcdef"}                                      of all text before this line
//
// Slices stand in the order of their data in the file. Tensor and kind are places in the lists
// above.
//
// A slice is a flat range [lo, hi) of a block of columns (Slice in checkpoint.h). Four numbers: the
// block is the whole tensor. That serves tensors that nobody splits, and those that tensor
// parallelism splits by rows: a rank's rows are one range. Six numbers: the block is columns
// [first, first + count), which a rank holds of a tensor that is split by columns, and ZeRO's share
// of it is a range. Blocks of one tensor and kind are equal or have no column in common. Whoever
// loads asks for a range of a block of its own, in whatever layout.
//
// Of a kind that belongs to nodes a slice ends with one number more, its node: five numbers, or
// seven. Every node has all elements, and nodes count from 0 without a gap.
//
// Kinds are found by name, so a new kind is a new row of SliceKind's table in llmc/state/tensor.c.
// The list ends with the last kind that is there, and never before "weight".
//
// Version 1 had four numbers only, version 2 four or six and the four kinds above. They are read as
// they are. A checkpoint with these kinds alone is written as version 2.
#pragma once
#include "llmc/checkpoint/slice.h"
#include "llmc/state/run_state.h"
LLMC_BEGIN

#define MANIFEST_NAME "manifest.json"
#define CHECKPOINT_TRACKER "latest_checkpointed_iteration.txt"
enum { CHECKPOINT_TRACKER_MAX_BYTES = 4096, MANIFEST_MAX_BYTES = 256 << 20 };

typedef struct ManifestSlice {
    int tensor, file;  // indices
    SliceKind kind;
    int node;  // 0 where the kind belongs to all nodes
    Columns block;
    int64_t lo, hi;  // elements of the flattened block
    uint64_t begin;  // of element lo, in the file's data section, bytes
} ManifestSlice;

typedef struct ManifestFile {
    char *folder, *name;
    uint64_t bytes, xxh3;  // of the whole file
    uint64_t data_bytes;   // of its slices, which stand at its end
    int first, count;      // its slices
} ManifestFile;

typedef struct Manifest {
    RunState state;
    RunState *node_states;
    int node_state_count;  // 0: the run's is every node's
    char *arguments;       // JSON text
    char weight_dtype[8];  // "BF16" or "F32"
    SliceKind kinds[SLICE_KINDS];
    int kind_count;
    Tensor *tensors;
    int tensor_count;  // names and whole shapes
    ManifestFile *files;
    int file_count;
    ManifestSlice *slices;
    int slice_count;         // file by file
    int *order;              // slice indices sorted by (tensor, kind, node, block, lo); no two overlap
    int nodes[SLICE_KINDS];  // one more than the largest node of the kind's slices; 0: it has none
} Manifest;

// safetensors dtype of a kind's elements: "F32", or for weights this build's floatX.
const char *slice_kind_dtype(SliceKind kind);
// The name of a slice's tensor in its shard: "<parameter>|<kind>|<lo>". Behind it stands
// "|<first>+<count>" where the block is not the whole tensor, and "|node <node>" where the kind
// belongs to nodes. malloc'ed.
char *slice_name(const Tensor *tensor, SliceKind kind, int64_t lo, Columns block, int node);
// A slice's block in numbers: where it says all columns, how many there are.
Columns slice_block(const Tensor *tensor, Columns columns);
// That the tensor has this block, and the block this range; lo = hi is allowed.
bool slice_fits(const Tensor *tensor, Columns block, int64_t lo, int64_t hi);

// One entry of "files" for a shard (malloc'ed, *bytes long): its folder, name, size, hash and
// slices (file->count), in the order of their data.
char *manifest_file_entry(const Tensor *tensors, const ManifestFile *file, const ManifestSlice *slices,
                          size_t *bytes);
// What a manifest says of the run that saved it.
typedef struct ManifestRun {
    const RunState *state;
    const RunState *node_states;  // (node_state_count) of each node, if they differ
    int node_state_count;
    const char *arguments_json;  // NULL: none
    const Tensor *tensors;       // (tensor_count) all parameters of the model
    int tensor_count;
} ManifestRun;
// The whole manifest (malloc'ed, *bytes long) around the files' entries, separated by ",\n". kinds:
// one more than the last kind in an entry.
char *manifest_text(const ManifestRun *run, int world_size, int kinds, const char *entries,
                    size_t entries_bytes, size_t *bytes);

// path: for messages. EXIT_CHECKPOINT names the fault.
bool manifest_parse(Manifest *manifest, const char *text, size_t bytes, const char *path, Error *err);
// That every kind which is there at all is there for every element of every tensor that has it, and
// of every node. Else names the first tensor and element that is missing.
bool manifest_check_complete(const Manifest *manifest, const char *path, Error *err);
void manifest_free(Manifest *manifest);
// Index of a tensor, or -1.
int manifest_find_tensor(const Manifest *manifest, const char *name);
// Position in `order` of the first slice of (tensor, kind, node) that ends behind this element. It
// need not hold the element, may belong to another tensor, kind or node, or be slice_count.
int manifest_first_slice(const Manifest *manifest, int tensor, SliceKind kind, int node, int64_t row,
                         int64_t column);

LLMC_END
