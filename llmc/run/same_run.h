// What all ranks of a run must share, though each machine has a copy of its own: the program, the
// flags, the data, the folders of checkpoints. A machine with an old copy would train on without a
// word, half of the shards by another learning rate or other text. Asked before the first step.
// Collective over world, whose rank 0 is what the others are compared with. Each returns this
// rank's own finding: the caller lets the ranks agree.
#pragma once
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Once every rank has made its plan, before memory is taken or data are read. Errors:
// EXIT_ENVIRONMENT for another version, commit or backend; EXIT_USAGE for the first flag that
// differs. Paths may differ from machine to machine. Their number may not, but for what rank 0
// alone writes.
bool same_flags(const Config *config, Peers world, Error *err);
// The shards of every split: their sizes, the two ends of their files, their weights. Error:
// EXIT_DATA. Mock data are the same everywhere.
bool same_data(const Loader *loader, Peers world, Error *err);
// All see a file that rank 0 makes in the folder for a moment, within some seconds: a network's
// file system may be late. Error: EXIT_CHECKPOINT. True on all ranks where rank 0 can make none:
// the first save tells why.
bool same_save_folder(const char *directory, Peers world, Error *err);
// All see the checkpoint that rank 0 sees. Error: EXIT_CHECKPOINT.
bool same_checkpoint(const char *directory, int64_t iteration, Peers world, Error *err);

LLMC_END
