// Saving and loading a run. Megatron's directory names and tracker file; per-rank safetensors
// shards, a manifest with sizes and xxh3 hashes. All is written to a temporary folder, fsynced and
// renamed, the tracker last. What is saved are slices of named tensors, so that a checkpoint loads
// in another layout: other numbers of ranks, other groups, other buckets.
//
// saver.c saves through it and llmc/run/resume.c loads, with zero_slices.c for what is in memory.
// checkpoint.c saves, checkpoint_load.c loads. manifest.h describes the manifest, safetensors.h the
// shards, durable.h the care taken with files, save_folder.h what else lies in a --save folder.
//
// What lies in a --save folder:
//
//   latest_checkpointed_iteration.txt    the tracker
//   checkpoints_of_run.txt               which of the checkpoints are the run's own (save_folder.h)
//   iter_0000100/manifest.json           files, sizes, hashes, counters, arguments, parameters
//   iter_0000100/mp_rank_00/shard_00000_of_00004.safetensors     of tensor rank 0
//   iter_0000100/mp_rank_01_002/...      of tensor rank 1, pipeline rank 2
//   .iter_0000100.tmp/                   while saving; what a killed save left goes with the next
//   .iter_0000100.old/                   while iteration 100 is being replaced, where the file
//                                        system cannot exchange two names
//   .iter_0000050.del/                   an old checkpoint while it is being deleted
#pragma once
#include "llmc/checkpoint/save_folder.h"
#include "llmc/checkpoint/slice.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/run_state.h"
#include "llmc/state/tensor.h"
LLMC_BEGIN

typedef struct CheckpointSave {
    const char *directory;  // --save
    RunState state;
    const RunState *node_states;
    int node_state_count;        // of each node, where they differ; 0: they do not.
                                 // Rank 0's are saved
    const char *arguments_json;  // config_to_json
    const Tensor *tensors;
    int tensor_count;  // all parameters of the model, logical order
    const Slice *slices;
    int slice_count;                 // what this rank saves
    int tensor_rank, pipeline_rank;  // name the folder of this rank's shard
    int pipeline_ranks;              // 0 or 1: there is no pipeline
    // Copies slice i to host memory: hi - lo elements, little-endian, packed. Called once per slice
    // that is not empty. First come the 4-byte kinds, then the 2-byte ones, each in order: so every
    // tensor in the file is aligned.
    void (*fetch)(void *context, int i, void *host);
    void *context;
    // For a save in the background: host memory for all of this rank's slices, and its size. Less
    // than the slices take is a fault of the program and fails. NULL: the caller waits while files
    // are written.
    void *staging;
    uint64_t staging_bytes;
    // In the background fetch only asks for its copy. This returns when all have arrived. NULL:
    // fetch returns when its copy has.
    void (*fetched)(void *context);
    Retention keep;  // older checkpoints that stay; zeros: all
    int64_t before;  // iteration in this folder that the run went on from, or saved last; -1: none
    Peers peers;     // all ranks; its site also for the message when the thread gets no memory
} CheckpointSave;

// One save, in parts that leave the ranks free in between: begin, then advance until it is done, at
// the same moments on all ranks, when no rank is busy. Only files are written by a thread, and
// without staging memory by the caller. What the ranks tell each other goes through the caller's
// thread. A job that is advanced while it is busy waits.
typedef struct CheckpointJob CheckpointJob;
// Collective. The slices of all ranks must not overlap. A kind that is there at all must be there
// for every element of every tensor that has it, and where it belongs to nodes for all of them: 0,
// 1, and so on. An older checkpoint of the same iteration is replaced. The folder must lie on a
// file system that all ranks see. Slices and arguments are copied. Until the job is done the
// tensors must stay, and the staging memory must stay unused. NULL with the same error on every
// rank, as checkpoint_advance.
CheckpointJob *checkpoint_begin(const CheckpointSave *save, Error *err);
bool checkpoint_busy(const CheckpointJob *job);
// Collective: the next part. *done: the checkpoint is on the disk and the tracker names it. False:
// it failed, with the same error on every rank, and nothing under the final names has changed.
// Errors: EXIT_CHECKPOINT (full disk, permissions).
bool checkpoint_advance(CheckpointJob *job, bool *done, Error *err);
const RunState *checkpoint_job_state(const CheckpointJob *job);
// Once done, on rank 0: WARNING lines about the folder, each empty when there is nothing to say.
typedef struct FolderNotes {
    char damage[1400];  // the list of the run's checkpoints was damaged
    char others[1400];  // which checkpoints are another run's or branch's
    char stays[1400];   // an old one could not be deleted
} FolderNotes;
const FolderNotes *checkpoint_job_notes(const CheckpointJob *job);
// Once done or failed.
void checkpoint_job_free(CheckpointJob *job);

typedef struct Checkpoint Checkpoint;
// Beside iterations, which are not negative.
enum {
    NO_CHECKPOINT = -1,          // none there
    CHECKPOINT_UNREADABLE = -2,  // what should say which one is damaged: an error tells more
};
// The iteration that the tracker file names. Megatron-LM's word "release" (a checkpoint in
// <directory>/release) counts as 0. Where the tracker is damaged, lost, or names what is not there:
// the run's newest checkpoint in the folder, and note is a line that says so (else empty).
// NO_CHECKPOINT: a folder that is not there, is empty, or holds only what a run writes before its
// first checkpoint (foreign.h). CHECKPOINT_UNREADABLE with err: there is a tracker, or checkpoints,
// and none to go on from; or the folder holds something else. Not collective: one rank asks and
// tells the others.
int64_t checkpoint_find(const char *directory, char *note, size_t note_bytes, Error *err);
// Opens the checkpoint of *iteration, which the tracker names. When it is damaged or not there: the
// newest sound one before it in its line (save_folder.h). Then *iteration becomes its number and
// note a line that says what was wrong, with one more when the list of the line is damaged (else
// empty). NULL with the error of the first one when none is sound (EXIT_CHECKPOINT; names the
// damaged file). Collective, same result on every rank: rank 0 reads the manifest for all, and the
// ranks share the work of checking the shards' sizes and hashes. A shard is opened when it is first
// read, and its header compared with the manifest.
Checkpoint *checkpoint_open_sound(const char *directory, int64_t *iteration, Peers peers, char *note,
                                  size_t note_bytes, Error *err);
// Opens the checkpoint of *iteration, or where that is negative the latest one, whose number it
// becomes. One that cannot be used is an error that names the sound one before it: a tool does not
// take another in silence. note: that of checkpoint_find. Peers of one rank.
Checkpoint *checkpoint_open_asked(const char *directory, int64_t *iteration, Peers peers, char *note,
                                  size_t note_bytes, Error *err);
void checkpoint_close(Checkpoint *checkpoint);
const RunState *checkpoint_state(const Checkpoint *checkpoint);
// That of a node: the run's, where nodes have none of their own or there was no such node.
const RunState *checkpoint_node_state(const Checkpoint *checkpoint, int node);
const char *checkpoint_arguments(const Checkpoint *checkpoint);  // JSON text
// That the checkpoint's parameters are the model's: equal names and whole shapes. Else one line
// that names the first difference.
bool checkpoint_check_tensors(const Checkpoint *checkpoint, const Tensor *tensors, int count, Error *err);
// False for kinds that --no-save-optim left out.
bool checkpoint_has(const Checkpoint *checkpoint, SliceKind kind);
// How many nodes have the kind; 1 where it belongs to all of them; 0 where it is not there.
int checkpoint_nodes(const Checkpoint *checkpoint, SliceKind kind);
// Reads a slice, gathered from whichever shards hold it, in whatever layout it was saved. Not
// collective. Errors (EXIT_CHECKPOINT): a tensor, range or node that is in no shard, weights of a
// build with another precision, a damaged shard.
bool checkpoint_read(const Checkpoint *checkpoint, const Slice *slice, void *host, Error *err);

LLMC_END
