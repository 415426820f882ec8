// Inspects a --load directory without a checkpoint of this program. If a run has only just started
// there, training starts from scratch; anything else is a user error, and the run would silently
// train from random weights. Called by checkpoint_load.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Fails with EXIT_CHECKPOINT if the directory contains another program's files; the message names
// the program and the file. unless_fresh: also fails for any file that no run writes before its
// first checkpoint. Checks names only, a few levels deep. Returns true if the directory does not
// exist.
bool foreign_refuse(const char *folder, bool unless_fresh, Error *err);

LLMC_END
