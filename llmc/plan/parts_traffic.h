// What the parts of a model that is cut send each other: tensor, sequence and pipeline parallelism.
// Bytes that the rank which sees the ranks as `mesh` sends. For --plan (plan_report.c,
// plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// To a neighboring stage with a micro-batch, each way, for each chunk of layers.
double parts_hidden_bytes(const Config *c, const Mesh *mesh);
// To the tensor-parallel group with a micro-batch, and in how many sums and gathers. An all-reduce
// is one of each.
double parts_tensor_bytes(const Config *c, const Mesh *mesh);
int parts_tensor_messages(const Config *c, const Mesh *mesh);
// To the tensor-parallel group in a step: the gradients of LayerNorms under sequence parallelism,
// and of the norms of queries and keys.
double parts_norms_bytes(const Config *c, const Mesh *mesh);
// From the first stage to the last and back in a step: the gradient of tied word
// embeddings.
double parts_words_bytes(const Config *c, const Mesh *mesh);

LLMC_END
