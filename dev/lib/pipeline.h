// An ordered parallel map with bounded memory. One reader fills slots, workers process them in any
// order, and one writer consumes them in the order in which they were filled. The pipeline manages
// only slot indices; the caller owns the contents. Used by preprocess_data.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Pipeline Pipeline;

Pipeline *pipeline_create(int slots);
void pipeline_free(Pipeline *pipeline);

// For the reader: waits for a free slot, then either passes it to the workers or signals the end of
// the input.
int pipeline_read_begin(Pipeline *pipeline);
void pipeline_read_end(Pipeline *pipeline);
void pipeline_no_more_input(Pipeline *pipeline);
// For workers: waits for the oldest slot that no worker has taken. Returns -1 at the end of the
// input.
int pipeline_work_begin(Pipeline *pipeline);
void pipeline_work_end(Pipeline *pipeline, int slot);
// For the writer: waits up to `milliseconds` for the next slot in order. Returns PIPELINE_TIMEOUT
// if it is not ready yet, PIPELINE_END after the last slot.
enum { PIPELINE_END = -1, PIPELINE_TIMEOUT = -2 };
int pipeline_write_begin(Pipeline *pipeline, int milliseconds);
void pipeline_write_end(Pipeline *pipeline);

LLMC_END
