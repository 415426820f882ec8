// Writes TensorBoard event files (TFRecord framing with masked CRC32C, hand-coded Event protobufs).
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Tensorboard Tensorboard;
// Creates dir, its parents and a file events.out.tfevents.<unix_s>.<host>.<pid>.<n> with a version
// record. Error: EXIT_ENVIRONMENT.
Tensorboard *tensorboard_open(const char *dir, Error *err);
void tensorboard_close(Tensorboard *tb);
// Writes a scalar as fp32, like TensorBoard's own writers. On a full disk records are lost, but the
// run continues (append.h).
void tensorboard_scalar(Tensorboard *tb, const char *tag, int64_t step, double value);
// Writes a text for TensorBoard's Text tab (Markdown), as the text plugin's string tensor.
void tensorboard_text(Tensorboard *tb, const char *tag, int64_t step, const char *text);
// Encodes one record for golden tests and returns its length. Writes it to out if it fits into
// capacity bytes. tag NULL: the version record.
size_t tensorboard_encode(uint8_t *out, size_t capacity, double wall_time, int64_t step, const char *tag,
                          float value);

LLMC_END
