// An ordered parallel map with bounded memory. One reader fills slots, workers process them in any
// order, one writer takes them in the order in which they were filled. This hands out their
// numbers; their contents belong to the caller. Used by preprocess_data.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Pipeline Pipeline;

Pipeline *pipeline_create(int slots);
void pipeline_free(Pipeline *pipeline);

// The reader: waits for a free slot. Then it either hands the slot on or says that there is no more
// input.
int pipeline_read_begin(Pipeline *pipeline);
void pipeline_read_end(Pipeline *pipeline);
void pipeline_no_more_input(Pipeline *pipeline);
// A worker: waits for the oldest slot that nobody works on; -1 when the input has ended.
int pipeline_work_begin(Pipeline *pipeline);
void pipeline_work_end(Pipeline *pipeline, int slot);
// The writer: waits until the next slot in order is done, at most milliseconds. PIPELINE_END after
// the last, PIPELINE_TIMEOUT when it is not done yet.
enum { PIPELINE_END = -1, PIPELINE_TIMEOUT = -2 };
int pipeline_write_begin(Pipeline *pipeline, int milliseconds);
void pipeline_write_end(Pipeline *pipeline);

LLMC_END
