// Saving and loading a run. Megatron's directory names and tracker file; per-rank safetensors shards, a manifest with sizes and xxh3 hashes;
// written to a temporary folder, fsynced, renamed, tracker last. Records are slices (tensor, lo, hi) by name, so that a checkpoint
// loads at another data-parallel size or with other group sizes. saver.c saves through it and train_gpt.cu loads, with zero_slices.c for what is in
// memory. checkpoint.c saves, checkpoint_load.c loads, manifest.h describes the manifest, safetensors.h the shards, durable.h the care taken with files.
//
//   <save>/latest_checkpointed_iteration.txt             the tracker
//   <save>/checkpoints_of_run.txt                         which of the checkpoints here are of the run that the tracker's is of (lineage.h)
//   <save>/iter_0000100/manifest.json                     files, sizes, hashes, counters, arguments, parameter table
//   <save>/iter_0000100/mp_rank_00/shard_00000_of_00004.safetensors     tensors "<parameter>|<kind>|<lo>"
//   <save>/.iter_0000100.tmp/         while saving; what a killed save left is removed by the next one
//   <save>/.iter_0000100.old/         only on file systems that cannot exchange two names, while iteration 100 is being replaced
//   <save>/.iter_0000050.del/         an old checkpoint while it is being deleted (save_folder.h)
#pragma once
#include "llmc/ranks/peers.h"
#include "llmc/checkpoint/save_folder.h"
#include "llmc/state/run_state.h"
#include "llmc/state/tensor.h"
LLMC_BEGIN

// Elements [lo, hi) of the flattened parameter `tensor`.
typedef struct Slice {
    const char *tensor;
    SliceKind kind;
    int64_t lo, hi;
} Slice;

typedef struct CheckpointTensor {
    const char *name;
    int dims;
    int64_t shape[2];
} CheckpointTensor;

typedef struct CheckpointSave {
    const char *directory;          // --save
    RunState state;
    const char *arguments_json;     // config_to_json
    const CheckpointTensor *tensors; int tensor_count;   // all parameters, logical order
    const Slice *slices; int slice_count;                // what this rank owns
    // Copies slice i to host memory (hi - lo elements, little-endian, packed); called once per slice that is not empty: first the
    // 4-byte kinds, then the 2-byte ones, each in order (so that every tensor in the file is aligned).
    void (*fetch)(void *context, int i, void *host);
    void *context;
    // For a save in the background: host memory for all of this rank's slices. NULL: the caller waits while files are written.
    void *staging;
    uint64_t staging_bytes;         // what it holds; less than the slices take is a fault of the program and fails
    // In the background fetch only asks for its copy: this returns when all have arrived. NULL: fetch returns when its copy has.
    void (*fetched)(void *context);
    Retention keep;                 // older checkpoints that stay; zeros: all
    int64_t before;                 // the checkpoint in this folder that the run went on from, or saved last; -1: none
    Peers peers;                    // all ranks; its site also for the message when the thread gets no memory
} CheckpointSave;

// One save, in parts that leave the ranks free in between: begin, then at the same moments on all ranks, when no rank is busy, advance, until it is done.
// Only the files are written by a thread, and without staging memory by the caller; what the ranks tell each other goes through the caller's. A job that is
// advanced while it is busy waits.
typedef struct CheckpointJob CheckpointJob;
// Collective. The slices of all ranks must not overlap, and a kind that is there at all must be there for every element of every tensor. An older checkpoint of
// the same iteration is replaced. The folder must lie on a file system that all ranks see. The slices and arguments are copied; tensors, their names and the
// staging memory must stay, and the staging memory unused, until the job is done. NULL with the same error on every rank, as checkpoint_advance.
CheckpointJob *checkpoint_begin(const CheckpointSave *save, Error *err);
bool checkpoint_busy(const CheckpointJob *job);
// Collective: the next part. *done: the checkpoint is on the disk and the tracker names it; or false is returned and it failed, with the same error on every rank, and
// nothing under the final names has changed. Errors: EXIT_CHECKPOINT (full disk, permissions).
bool checkpoint_advance(CheckpointJob *job, bool *done, Error *err);
const RunState *checkpoint_job_state(const CheckpointJob *job);
// Once done, on rank 0: WARNING lines about the folder, each empty when there is nothing to say: that the list of the run's checkpoints was damaged; which
// checkpoints are of another run or branch; that an old one could not be deleted.
const char *checkpoint_job_damage(const CheckpointJob *job);
const char *checkpoint_job_others(const CheckpointJob *job);
const char *checkpoint_job_stays(const CheckpointJob *job);
// Once done or failed.
void checkpoint_job_free(CheckpointJob *job);

typedef struct Checkpoint Checkpoint;
// Beside iterations, which are not negative.
enum {
    NO_CHECKPOINT = -1,          // none there
    CHECKPOINT_UNREADABLE = -2,  // what should say which one is damaged: an error tells more
};
// The iteration that the tracker file names; Megatron-LM's tracker word "release" (a checkpoint in <directory>/release) counts as 0. Beside a tracker that is damaged,
// not there or names what is not there the run's newest checkpoint in the folder, and note is a line that says so (empty otherwise). NO_CHECKPOINT only for a folder without any checkpoint of
// this program, or one that is not there: nothing else would tell a fresh start from the end of a long run. CHECKPOINT_UNREADABLE with err when there is a tracker, or
// are checkpoints, and none that could be gone on from; also for a file, and for the folder of a single checkpoint. Not collective: one rank asks and tells the others.
int64_t checkpoint_find(const char *directory, char *note, size_t note_bytes, Error *err);
// The checkpoint of *iteration, which the tracker names; when it is damaged or not there the newest sound one before it in its line (lineage.h), and *iteration
// becomes its number and note (empty otherwise) a line that says what was wrong, and one more when the list of the line is damaged. NULL with the error of the
// first one when none is sound (EXIT_CHECKPOINT; names the damaged file). Collective, same result on every rank: rank 0 reads the manifest for all; the ranks share the
// work of checking the shards' sizes and hashes. Shards are opened when they are first read, and their headers compared with the manifest.
Checkpoint *checkpoint_open_sound(const char *directory, int64_t *iteration, Peers peers, char *note, size_t note_bytes, Error *err);
void checkpoint_close(Checkpoint *checkpoint);
const RunState *checkpoint_state(const Checkpoint *checkpoint);
const char *checkpoint_arguments(const Checkpoint *checkpoint);  // JSON text
// The checkpoint's parameters, to compare with the model's: names and shapes must be equal (one line naming the first difference).
bool checkpoint_check_tensors(const Checkpoint *checkpoint, const CheckpointTensor *tensors, int count, Error *err);
bool checkpoint_has(const Checkpoint *checkpoint, SliceKind kind);  // false for kinds left out by --no-save-optim
// Reads elements [lo, hi) of a tensor, gathered from whichever shards hold them. Not collective. Errors (EXIT_CHECKPOINT): a tensor or range that is in
// no shard, weights of a build with another precision, a damaged shard.
bool checkpoint_read(const Checkpoint *checkpoint, const Slice *slice, void *host, Error *err);

LLMC_END
