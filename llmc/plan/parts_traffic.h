// Traffic of tensor, sequence and pipeline parallelism: bytes sent by the rank that `mesh`
// describes. For --plan (plan_report.c, plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Bytes to a neighboring stage per micro-batch and chunk of layers, in each direction.
double parts_hidden_bytes(const Config *c, const Mesh *mesh);
// Bytes to the tensor-parallel group per micro-batch, and the number of reductions and gathers. An
// all-reduce counts as one of each.
double parts_tensor_bytes(const Config *c, const Mesh *mesh);
int parts_tensor_messages(const Config *c, const Mesh *mesh);
// Bytes to the tensor-parallel group per step: gradients of LayerNorms with sequence parallelism,
// and of query and key norms.
double parts_norms_bytes(const Config *c, const Mesh *mesh);
// Bytes between the first and the last stage per step, in each direction: gradients of tied word
// embeddings.
double parts_words_bytes(const Config *c, const Mesh *mesh);

LLMC_END
