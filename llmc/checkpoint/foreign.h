// What a folder given as --load holds when it holds no checkpoint of this program. A run that has
// just begun starts from scratch. Anything else is a mistake of the user's: training would begin
// with random weights where a model was meant. Called by checkpoint_load.c.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// False with EXIT_CHECKPOINT when another program's files lie below the folder: names the program
// and the file. unless_fresh: false as well for any file that no run writes before its first
// checkpoint. Looks at names alone, a few levels deep. True for a folder that is not there.
bool foreign_refuse(const char *folder, bool unless_fresh, Error *err);

LLMC_END
