// Saves and loads checkpoints: Megatron's directory names and tracker file, per-rank safetensors
// shards, and a manifest with sizes and xxh3 hashes. Everything is written to a temporary
// directory, fsynced and renamed; the tracker is updated last. Checkpoints store slices of named
// tensors, so that they load into any other layout: different numbers of ranks, groups or buckets.
//
// saver.c saves and llmc/run/resume.c loads through this interface; zero_slices.c maps the state in
// memory to slices. checkpoint.c implements saving, checkpoint_load.c loading. See manifest.h for
// the manifest, safetensors.h for the shards, durable.h for durable file operations, save_folder.h
// for the --save directory.
//
// Contents of a --save directory:
//
//   latest_checkpointed_iteration.txt    the tracker
//   checkpoints_of_run.txt               the run's own checkpoints (save_folder.h)
//   iter_0000100/manifest.json           files, sizes, hashes, counters, arguments, parameters
//   iter_0000100/mp_rank_00/shard_00000_of_00004.safetensors     tensor rank 0
//   iter_0000100/mp_rank_01_002/...      tensor rank 1, pipeline rank 2
//   iter_0000100/continued               a replica group has continued it (checkpoint_claim)
//   .iter_0000100.tmp/                   a save in progress, or left by a killed save; the
//                                        next save removes it
//   .iter_0000100.old/                   the previous checkpoint of iteration 100 during
//                                        replacement, if the file system cannot exchange two names
//                                        atomically
//   .iter_0000050.del/                   an old checkpoint being deleted
#pragma once
#include "llmc/checkpoint/base_model.h"
#include "llmc/checkpoint/save_folder.h"
#include "llmc/checkpoint/slice.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/fp8_state.h"
#include "llmc/state/run_state.h"
#include "llmc/state/tensor.h"
LLMC_BEGIN

typedef struct CheckpointSave {
    const char *directory;  // --save
    RunState state;
    const RunState *node_states;
    int node_state_count;        // 0: all nodes have `state`. Rank 0's array is saved
    BaseModel base;              // the path must stay valid until the job is done; NULL: none
    const Fp8State *fp8;         // rank 0's is saved; NULL or empty: none
    const char *arguments_json;  // config_to_json
    const Tensor *tensors;
    int tensor_count;  // all parameters of the model, in logical order
    const Slice *slices;
    int slice_count;                 // slices saved by this rank
    int tensor_rank, pipeline_rank;  // select the directory of this rank's shard
    int pipeline_ranks;              // 0 or 1: no pipeline
    // Copies slice i to host memory: hi - lo elements, little-endian, packed. Called once per
    // non-empty slice, in order, first for the 4-byte kinds and then for the 2-byte ones, so that
    // every tensor in the file is aligned.
    void (*fetch)(void *context, int i, void *host);
    void *context;
    // Asynchronous saves: host buffer for all slices of this rank, and its size. A buffer that is
    // too small is an internal error. NULL: save synchronously.
    void *staging;
    uint64_t staging_bytes;
    // Asynchronous saves: fetch only starts its copy; this waits for all copies. NULL: fetch is
    // synchronous.
    void (*fetched)(void *context);
    Retention keep;  // which older checkpoints to keep; zeros: all
    int64_t before;  // iteration in this directory that the run resumed from or saved last; -1: none
    Peers peers;     // all ranks
} CheckpointSave;

// An asynchronous save. Call checkpoint_begin, then checkpoint_advance until done, at the same
// steps on all ranks and when no rank is busy. With a staging buffer, a thread writes the files.
// All communication happens on the caller's thread. Advancing a busy job waits for its thread.
typedef struct CheckpointJob CheckpointJob;
// Collective. Starts a save and replaces an older checkpoint of the same iteration.
// - The slices of different ranks must not overlap. The slices of a saved kind must cover every
//   element of every tensor that has the kind; per-node kinds must do so for every node 0, 1, ...
// - The directory must be on a file system shared by all ranks.
// - Slices, arguments and the FP8 state are copied. The tensors must stay valid, and the staging
//   buffer unused, until the job is done.
// Returns NULL with the same error on every rank, as checkpoint_advance.
CheckpointJob *checkpoint_begin(const CheckpointSave *save, Error *err);
bool checkpoint_busy(const CheckpointJob *job);
// Collective. Runs the next stage. *done: the checkpoint is durable and the tracker names it.
// Returns false with the same error on every rank if the save failed; then nothing under the final
// names has changed. Errors: EXIT_CHECKPOINT (full disk, permissions).
bool checkpoint_advance(CheckpointJob *job, bool *done, Error *err);
const RunState *checkpoint_job_state(const CheckpointJob *job);
// WARNING lines about the directory, valid on rank 0 once the job is done; empty if there is
// nothing to report.
typedef struct FolderNotes {
    char damage[1400];  // the list of the run's checkpoints was damaged
    char others[1400];  // checkpoints that belong to another run or branch
    char stays[1400];   // an old checkpoint could not be deleted
} FolderNotes;
const FolderNotes *checkpoint_job_notes(const CheckpointJob *job);
// Frees a job that is done or has failed.
void checkpoint_job_free(CheckpointJob *job);

typedef struct Checkpoint Checkpoint;
// Returned in place of an iteration, which is never negative.
enum {
    NO_CHECKPOINT = -1,          // the directory has no checkpoint
    CHECKPOINT_UNREADABLE = -2,  // the tracker is damaged or unusable; see the error
};
// Returns the iteration named by the tracker file. Megatron-LM's "release" (<directory>/release)
// counts as 0. If the tracker is damaged or missing, or names a missing checkpoint, returns the
// run's newest checkpoint in the directory and explains this in note, which is otherwise empty.
// - NO_CHECKPOINT: the directory is missing, empty, or holds only files that a run writes before
//   its first checkpoint (foreign.c).
// - CHECKPOINT_UNREADABLE with err: the tracker or the checkpoints are unusable, or the directory
//   holds other files.
// Not collective: one rank calls it and broadcasts the result.
int64_t checkpoint_find(const char *directory, char *note, size_t note_bytes, Error *err);
// Makes the tracker name this iteration if its checkpoint exists. Called by one rank.
bool checkpoint_track(const char *folder, int64_t iteration, Error *err);
// Marks a checkpoint as continued by a run. Returns true if no run has continued it before. Returns
// false also if the mark cannot be written. Called by one rank.
bool checkpoint_claim(const char *folder, int64_t iteration);
// Opens the checkpoint of *iteration. If it is damaged or missing, falls back to the newest intact
// earlier one of the same run (save_folder.h), updates *iteration and explains the fault in note.
// note also reports a damaged lineage file, and is otherwise empty. If none is intact, returns NULL
// with the error of the first one (EXIT_CHECKPOINT, names the damaged file). Collective, with the
// same result on every rank: rank 0 reads the manifest, and all ranks share the work of verifying
// sizes and hashes. A shard is opened on its first read, and its header is compared with the
// manifest.
Checkpoint *checkpoint_open_or_fall_back(const char *directory, int64_t *iteration, Peers peers, char *note,
                                         size_t note_bytes, Error *err);
// Opens the checkpoint of *iteration, or fails: if it is damaged or missing, the error names the
// newest intact earlier one. If *iteration is negative, which only tools on a single rank may pass,
// opens the latest one and sets *iteration. step_flag: the flag that selects the iteration, for
// errors. note: as in checkpoint_find. Collective.
Checkpoint *checkpoint_open(const char *directory, int64_t *iteration, const char *step_flag, Peers peers,
                            char *note, size_t note_bytes, Error *err);
void checkpoint_close(Checkpoint *checkpoint);
const RunState *checkpoint_state(const Checkpoint *checkpoint);
// State of `node`; falls back to the run's state if none was saved for it.
const RunState *checkpoint_node_state(const Checkpoint *checkpoint, int node);
// State of delayed FP8 scaling; empty if none was saved.
const Fp8State *checkpoint_fp8(const Checkpoint *checkpoint);
const char *checkpoint_arguments(const Checkpoint *checkpoint);  // JSON text
// Base model recorded with LoRA adapters; without path if there is none. Owned by the checkpoint.
const BaseModel *checkpoint_base(const Checkpoint *checkpoint);
// Describes a checkpoint as the base of adapters. The result borrows `directory`.
BaseModel checkpoint_as_base(const Checkpoint *checkpoint, const char *directory);
// Checks that the checkpoint's parameters have the names and shapes of the model's. The error names
// the first difference.
bool checkpoint_check_tensors(const Checkpoint *checkpoint, const Tensor *tensors, int count, Error *err);
// Number of nodes that have the kind; 1 if all nodes share it, 0 if it is absent, as with
// --no-save-optim.
int checkpoint_nodes(const Checkpoint *checkpoint, SliceKind kind);
// Reads a slice, assembled from the shards that hold it, independent of the layout it was saved in.
// Not collective. Errors (EXIT_CHECKPOINT): a missing tensor, range or node; weights saved by a
// build with another precision; a damaged shard.
bool checkpoint_read(const Checkpoint *checkpoint, const Slice *slice, void *host, Error *err);

LLMC_END
