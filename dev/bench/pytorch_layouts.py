#!/usr/bin/env python3
"""Measures Megatron-LM's tensor parallelism in PyTorch for comparison with dev/bench/layouts.sh: separately
compiled blocks, NCCL, CUDA graphs, fused AdamW; weights, gradients and moments in bf16. Rank 0 prints one
JSON line.

    python3 -m torch.distributed.run --nproc-per-node T dev/bench/pytorch_layouts.py 1.3b-8
        [--sequence-parallel] [--micro-batch 1] [--micro-batches 8] [--steps 10] [--sequence 2048]
        [--device cuda|cpu]

The model is NAME-N of pytorch_gpt.py, the first N layers with a vocabulary of 1024. All ranks hold the
embedding and the LM head. Each rank holds its heads of QKV and the projection, and its columns of the MLP.
Without --sequence-parallel, an all-reduce follows each of the two row-parallel products in forward, and
each of the two column-parallel ones in backward. With it, these are reduce-scatters and all-gathers of rows,
and norms and residuals have 1/T of the rows. --device cpu only checks the losses (gloo).
"""
import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn as nn
import torch.nn.functional as F

from pytorch_gpt import Block, Embedding, Head, Model, gpt_shape


def summed(x):  # (B, S, C)
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


# Collectives along dimension 0 need no copies. With one sample, neither do the transpositions.
def gathered(x):  # (B, S/T, C) -> (B, S, C)
    rows = x.transpose(0, 1).contiguous()
    return collectives.wait_tensor(
        collectives.all_gather_tensor(rows, 0, dist.group.WORLD)).transpose(0, 1)


def scattered(x):  # (B, S, C) -> (B, S/T, C)
    rows = x.transpose(0, 1).contiguous()
    return collectives.wait_tensor(
        collectives.reduce_scatter_tensor(rows, "sum", 0, dist.group.WORLD)).transpose(0, 1)


def own_rows(x):  # (B, S, C) -> (B, S/T, C)
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def unchanged(x):
    return x.view_as(x)


def operation(forward, backward):
    """Returns an autograd function that applies `forward`, and `backward` to the gradient."""
    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)
    return Operation


# Input of a column-parallel product, and output of a row-parallel one.
ENTER, LEAVE = operation(unchanged, summed), operation(summed, unchanged)
ENTER_ROWS, LEAVE_ROWS = operation(gathered, scattered), operation(scattered, gathered)
# This rank's rows of the embeddings, and all rows for the LM head, which all ranks compute.
SPLIT, GATHER = operation(own_rows, gathered), operation(gathered, own_rows)


class ShardedBlock(nn.Module):
    """This rank's part of `full`, a pytorch_gpt.Block."""

    def __init__(self, full, sequence):
        super().__init__()
        count, rank = dist.get_world_size(), dist.get_rank()
        width = full.proj.out_features
        self.heads, self.size = full.heads // count, width // full.heads
        self.ln1, self.ln2 = full.ln1, full.ln2
        self.enter, self.leave = (ENTER_ROWS, LEAVE_ROWS) if sequence else (ENTER, LEAVE)

        def part(tensor, dim):
            return nn.Parameter(tensor.detach().chunk(count, dim)[rank].clone())

        shape = (3, full.heads, self.size)
        self.qkv = part(full.qkv.weight.view(*shape, width), 1)  # (3, H/T, D, C)
        self.qkv_bias = part(full.qkv.bias.view(shape), 1)  # (3, H/T, D)
        self.proj, self.proj_bias = part(full.proj.weight, 1), full.proj.bias  # (C, C/T)
        self.fc1, self.fc1_bias = part(full.fc1.weight, 0), part(full.fc1.bias, 0)  # (4C/T, C)
        self.fc2, self.fc2_bias = part(full.fc2.weight, 1), full.fc2.bias  # (C, 4C/T)

    def forward(self, x):
        entered = self.enter.apply(self.ln1(x))
        rows, length, width = entered.shape
        qkv = F.linear(entered, self.qkv.view(-1, width), self.qkv_bias.view(-1))
        q, k, v = qkv.view(rows, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, length, -1)
        x = x + (self.leave.apply(F.linear(attended, self.proj)) + self.proj_bias)
        hidden = F.gelu(F.linear(self.enter.apply(self.ln2(x)), self.fc1, self.fc1_bias), approximate="tanh")
        return x + (self.leave.apply(F.linear(hidden, self.fc2)) + self.fc2_bias)


class ShardedModel(nn.Module):
    def __init__(self, full, sequence):
        super().__init__()
        self.embedding, self.head, self.sequence = full.embedding, full.head, sequence
        self.blocks = nn.ModuleList(ShardedBlock(block, sequence) for block in full.blocks)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        x = SPLIT.apply(x) if self.sequence else x
        for block in self.blocks:
            x = block(x)
        return self.head(GATHER.apply(x) if self.sequence else x, targets)

    def partial_gradients(self):
        """Returns the parameters whose gradients are sums over this rank's rows only."""
        if not self.sequence:
            return []
        return [p for b in self.blocks for p in (*b.ln1.parameters(), *b.ln2.parameters(), b.proj_bias,
                                                 b.fc2_bias)]


def make(options, device):
    torch.manual_seed(1)
    layers, width, heads, vocabulary = gpt_shape(options.model)
    embedding = Embedding(vocabulary, width, options.sequence, torch.bfloat16)
    head = Head(nn.LayerNorm(width), width, vocabulary, embedding.tokens.weight)
    full = Model(embedding, [Block(width, heads) for _ in range(layers)], head)
    ids = torch.randint(vocabulary, (options.micro_batch, options.sequence + 1))
    batch = [part.contiguous().to(device) for part in (ids[:, :-1], ids[:, 1:])]
    model = full if dist.get_world_size() == 1 else ShardedModel(full, options.sequence_parallel)
    return model.to(device, torch.bfloat16), batch


def captured(run):
    """Returns a function that replays `run`, a micro-batch, as a CUDA graph. Otherwise the host limits the
    speed: it launches hundreds of small graphs and collectives per step. `run` must be compiled already."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = run()

    def replay():
        graph.replay()
        return loss
    return replay


def train(model, batch, options, synchronize):
    """Returns ms per step and the first and last loss, with as many warm-up steps as measured ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    partial = model.partial_gradients() if isinstance(model, ShardedModel) else []

    def micro_batch():
        loss = model(*batch) / options.micro_batches
        loss.backward()
        return loss

    def step(run):
        optimizer.zero_grad(set_to_none=False)  # CUDA graphs need fixed addresses
        for _ in range(options.micro_batches):
            loss = run()
        if partial:
            flat = torch.cat([p.grad.flatten() for p in partial])
            dist.all_reduce(flat)
            for p, part in zip(partial, flat.split([p.numel() for p in partial])):
                p.grad.copy_(part.view_as(p))
        optimizer.step()
        return loss * options.micro_batches

    first = step(micro_batch).item()
    run = captured(micro_batch) if options.device == "cuda" else micro_batch
    for _ in range(options.steps - 1):
        loss = step(run)
    synchronize()
    start = time.perf_counter()
    for _ in range(options.steps):
        loss = step(run)
    synchronize()
    return 1e3 * (time.perf_counter() - start) / options.steps, first, loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name-layers, such as 1.3b-8")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model, batch = make(options, device)
    for module in (model.embedding, *model.blocks, model.head) if cuda else ():
        module.compile(dynamic=False)
    ms, first, last = train(model, batch, options, torch.cuda.synchronize if cuda else lambda: None)
    if dist.get_rank() == 0:
        print(json.dumps({
            "program": f"pytorch {torch.__version__}, NCCL", "model": options.model.partition("-")[0],
            "layers": len(model.blocks), "tensor": dist.get_world_size(), "stages": 1,
            "sequence": options.sequence_parallel, "micro_batch": options.micro_batch,
            "micro_batches": options.micro_batches, "ms": ms, "first_loss": first, "loss": last,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
