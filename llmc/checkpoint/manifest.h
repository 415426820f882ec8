// manifest.json of a checkpoint: tensors, files, counters, and the program that saved them. Written
// by checkpoint.c, read by checkpoint_load.c. Treated as untrusted input: sizes, ranges and names
// are validated, file names must not contain a path, and the text includes its own hash.
//
//   {"format": "sdp4bit.c checkpoint", "version": 2, "program": "...", "commit": "...",
//    "libraries": "...", "world_size": 4, "weight_dtype": "BF16",
//    "state": {"iteration": 100, ..., "beta1_power": "0x1.9p-1"},   doubles are hexadecimal floats
//    "nodes": [{...}, ...],          per-node counters, with local steps only
//    "fp8_scaling": {"history_length": 1, "scales": "3f800000...", "history": "00000000..."},
//                                    with delayed FP8 scaling only: Fp8State, the bits of each
//                                    fp32 number as 8 hexadecimal digits
//    "base": {"path": "base/", "iteration": 40, "xxh3": "0123456789abcdef"},
//                                    with LoRA only: the frozen model (base_model.h)
//    "arguments": {...},
//    "tensors": [{"name": "wte", "shape": [64, 32]}, ...],   all parameters, full shapes, in order
//    "kinds": ["master", "exp_avg", "exp_avg_sq", "weight"],
//    "files": [{"folder": "mp_rank_00", "name": "shard_00000_of_00004.safetensors", "bytes": 1234,
//               "xxh3": "0123456789abcdef",
//               "slices": [[tensor, kind, lo, hi], [tensor, kind, lo, hi, first, count],
//                          [tensor, kind, lo, hi, node], ...]},
//              ...],
//    "xxh3": "0123456789abcdef"}                                 hash of all text before this line
//
// Slices are listed in the order of their data in the file. `tensor` and `kind` are indices into
// the lists above.
//
// A slice is a flat range [lo, hi) of a block of columns (Slice in slice.h):
// - Four numbers: the block is the whole tensor. Used for tensors that are not split, or split by
//   rows under tensor parallelism, where a rank's rows are one contiguous range.
// - Six numbers: the block is columns [first, first + count), this rank's part of a tensor split by
//   columns; the range is ZeRO's shard of it. Blocks of one tensor and kind are equal or disjoint.
// - Per-node kinds append the node: five or seven numbers. Every node has all elements, and nodes
//   are numbered from 0 without gaps.
// A loader requests any range of any block, independent of the saved layout.
//
// Kinds are identified by name, so adding one means adding a row to SliceKind's table in
// llmc/state/tensor.c. The list ends with the last kind that is present, but includes at least the
// kinds up to "weight".
//
// Version 1 has slices of four numbers only; version 2 has four or six, and the four kinds above.
// Both still load. A checkpoint with only these kinds is written as version 2.
#pragma once
#include "llmc/checkpoint/base_model.h"
#include "llmc/checkpoint/slice.h"
#include "llmc/state/fp8_state.h"
#include "llmc/state/run_state.h"
LLMC_BEGIN

#define MANIFEST_NAME "manifest.json"
#define CHECKPOINT_TRACKER "latest_checkpointed_iteration.txt"
enum { CHECKPOINT_TRACKER_MAX_BYTES = 4096, MANIFEST_MAX_BYTES = 256 << 20 };

typedef struct ManifestSlice {
    int tensor, file;  // indices into tensors and files
    SliceKind kind;
    int node;  // 0 for kinds shared by all nodes
    Columns block;
    int64_t lo, hi;  // elements of the flattened block
    uint64_t begin;  // byte offset of element lo in the file's data section
} ManifestSlice;

typedef struct ManifestFile {
    char *folder, *name;
    uint64_t bytes, xxh3;  // size and hash of the whole file
    uint64_t data_bytes;   // size of the slices, at the end of the file
    int first, count;      // range of this file's slices in Manifest.slices
} ManifestFile;

typedef struct Manifest {
    RunState state;
    RunState *node_states;
    int node_state_count;  // 0: all nodes have the run's state
    Fp8State fp8;          // empty without delayed FP8 scaling
    BaseModel base;        // base.path: NULL unless recorded
    char *arguments;       // JSON text
    char weight_dtype[8];  // "BF16" or "F32"
    SliceKind kinds[SLICE_KINDS];
    int kind_count;
    Tensor *tensors;
    int tensor_count;  // names and full shapes
    ManifestFile *files;
    int file_count;
    ManifestSlice *slices;
    int slice_count;         // grouped by file
    int *order;              // slice indices sorted by (tensor, kind, node, block, lo); no two overlap
    int nodes[SLICE_KINDS];  // largest node of the kind's slices + 1; 0: no slices
} Manifest;

// safetensors dtype of a kind: "F32", or this build's floatX for weights.
const char *slice_kind_dtype(SliceKind kind);
// Name of a slice's tensor in its shard (malloc'ed): "<parameter>|<kind>|<lo>", followed by
// "|<first>+<count>" if the block is not the whole tensor, and by "|node <node>" for per-node
// kinds.
char *slice_name(const Tensor *tensor, SliceKind kind, int64_t lo, Columns block, int node);
// Normalizes a block: replaces count 0 with the number of columns.
Columns slice_block(const Tensor *tensor, Columns columns);
// Returns true if the block lies within the tensor and [lo, hi) within the block; lo = hi is
// allowed.
bool slice_fits(const Tensor *tensor, Columns block, int64_t lo, int64_t hi);

// Returns one entry of "files" as JSON text (malloc'ed, *bytes long): directory, name, size, hash,
// and the file->count slices in the order in which the file stores them.
char *manifest_file_entry(const Tensor *tensors, const ManifestFile *file, const ManifestSlice *slices,
                          size_t *bytes);
// Run-level contents of a manifest.
typedef struct ManifestRun {
    const RunState *state;
    const RunState *node_states;  // (node_state_count) state of each node if they differ
    int node_state_count;
    const Fp8State *fp8;         // NULL or empty: none
    const BaseModel *base;       // NULL or without path: none
    const char *arguments_json;  // NULL: none
    const Tensor *tensors;       // (tensor_count) all parameters of the model
    int tensor_count;
} ManifestRun;
// Assembles the manifest (malloc'ed, *bytes long) from the files' entries, which are separated by
// ",\n". kinds: highest kind used + 1.
char *manifest_text(const ManifestRun *run, int world_size, int kinds, const char *entries,
                    size_t entries_bytes, size_t *bytes);

// Parses and validates a manifest. path: for error messages. The error (EXIT_CHECKPOINT) names the
// fault.
bool manifest_parse(Manifest *manifest, const char *text, size_t bytes, const char *path, Error *err);
// Checks that every kind that is present covers every element of every tensor that has it, on every
// node. The error names the first missing tensor and element.
bool manifest_check_complete(const Manifest *manifest, const char *path, Error *err);
void manifest_free(Manifest *manifest);
// Returns a hash of the contents of the files. Independent of arguments and program, so copies and
// repeated imports of a model have the same hash. Another number of ranks changes it.
uint64_t manifest_content(const Manifest *manifest);
int manifest_find_tensor(const Manifest *manifest, const char *name);
// Returns the position in `order` of the first slice of (tensor, kind, node) that ends after this
// element. The slice may start after the element, or belong to another tensor, kind or node.
// Returns slice_count if there is none.
int manifest_first_slice(const Manifest *manifest, int tensor, SliceKind kind, int node, int64_t row,
                         int64_t column);

LLMC_END
