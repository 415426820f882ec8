// Checks before the first step that all machines have the same program, flags, data and checkpoint
// folders. Otherwise a machine with an old copy would silently train with another learning rate or
// other data. Collective over world; every rank compares itself with rank 0 and returns its own
// result; the caller makes the ranks agree.
#pragma once
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Call after plan_run, before memory is allocated or data is read. Errors: EXIT_ENVIRONMENT for
// another version, commit or backend; EXIT_USAGE for the first flag that differs. Paths may differ
// between machines. The number of paths may not, except for outputs that only rank 0 writes.
bool same_flags(const Config *config, Peers world, Error *err);
// Compares the data shards of every split: sizes, first and last bytes of the files, weights.
// Error: EXIT_DATA. Always true for mock data.
bool same_data(const Loader *loader, Peers world, Error *err);
// Checks that every rank sees a temporary file that rank 0 creates in the folder, within 5 seconds
// to allow for slow network file systems. Error: EXIT_CHECKPOINT. Returns true if rank 0 cannot
// create the file; the first save reports why.
bool same_save_folder(const char *directory, Peers world, Error *err);
// Checks that this rank sees the checkpoint if rank 0 does. Error: EXIT_CHECKPOINT.
bool same_checkpoint(const char *directory, int64_t iteration, Peers world, Error *err);

LLMC_END
