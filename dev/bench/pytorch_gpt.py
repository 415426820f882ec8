#!/usr/bin/env python3
"""Measures PyTorch on the same GPU for comparison, with GPT-3-style models and Llamas.

Uses separately compiled modules, fused AdamW and SDPA. Prints one JSON line per model with tokens/s, ms
per step, peak memory and the losses of the first and the last step.

    python3 dev/bench/pytorch_gpt.py 125m:32 350m:16 1.3b:8 llama_1.1b:8 [--weights bf16]
                                     [--steps 20] [--sequence 2048] [--way WAY] [--attention]
                                     [--compile modules|model|none] [--compile-mode MODE]
                                     [--residual bf16|fp32] [--float8 RECIPE] [--device cuda|cpu]

A model NAME-N, such as 6.7b-8, is the first N layers with a vocabulary of 1024.

--weights fp32   bf16 autocast and norm clipping, like nanoGPT; as precise as this trainer
--weights bf16   weights, gradients and AdamW moments in bf16, no clipping. This is PyTorch's fastest
                 configuration, but less precise than this trainer
--compile modules  compiles the embedding, each block, and the LM head with its loss on their own;
         model   the whole model as one graph
         none    eager, to check the losses
--compile-mode   mode of torch.compile
--residual bf16  data type of the residual stream with fp32 weights; this trainer's is bf16. With fp32,
                 the embeddings set it, as in nanoGPT
--float8 RECIPE  runs the linear layers of all blocks in FP8 with torchao; the LM head stays in bf16
         tensorwise  one scale per tensor, computed from the tensor itself
         rowwise     one scale per row
--way WAY        attention backend, with a name that --attention prints [the fastest]
--attention      only measures attention with every SDPA backend, in ms per layer
--device cpu     only to check the losses, with the model "tiny" and a short --sequence

Llama uses one matrix product for queries, keys and values, and one for gate and up.
"""
import argparse
import contextlib
import dataclasses
import json
import time

import torch
import torch._functorch.config
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MODELS = {"tiny": (2, 64, 2), "small": (4, 64, 4), "125m": (12, 768, 12), "350m": (24, 1024, 16),
          "1.3b": (24, 2048, 16), "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32)}
# Layers, hidden size, heads, groups, MLP size, vocabulary, tied word embeddings.
LLAMAS = {"llama_tiny": (2, 64, 4, 2, 192, 512, False),
          "llama_125m": (12, 768, 12, 12, 2048, 50304, True),
          "llama_1.1b": (22, 2048, 32, 4, 5632, 32000, False)}
VOCABULARY, FEW_LAYERS_VOCABULARY = 50304, 1024


class Embedding(nn.Module):
    """Token embeddings, with learned positions if `length` is set, rounded to `residual`."""

    def __init__(self, vocabulary, width, length, residual):
        super().__init__()
        self.tokens, self.residual = nn.Embedding(vocabulary, width), residual
        self.positions = nn.Embedding(length, width) if length else None

    def forward(self, ids):
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        return x.to(self.residual)


class Head(nn.Module):
    """Final norm, output projection and cross-entropy, in one module so that the loss is fused."""

    def __init__(self, norm, width, vocabulary, tied):
        super().__init__()
        self.norm, self.output = norm, nn.Linear(width, vocabulary, bias=False)
        if tied is not None:
            self.output.weight = tied

    def forward(self, x, targets):
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


class Model(nn.Module):
    """`tables`: tensors that every block takes after its input."""

    def __init__(self, embedding, blocks, head, *tables):
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleList(blocks), head
        self.tables = len(tables)
        for i, table in enumerate(tables):
            self.register_buffer(f"table{i}", table)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, targets):
        x, tables = self.embedding(ids), [getattr(self, f"table{i}") for i in range(self.tables)]
        for block in self.blocks:
            x = block(x, *tables)
        return self.head(x, targets)

    def compile_parts(self, what, mode):
        parts = {"modules": (self.embedding, *self.blocks, self.head), "model": (self,), "none": ()}
        for part in parts[what]:
            part.compile(mode=mode, dynamic=False)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


def make_gpt(layers, width, heads, vocabulary, length, residual):
    embedding = Embedding(vocabulary, width, length, residual)
    head = Head(nn.LayerNorm(width), width, vocabulary, embedding.tokens.weight)
    return Model(embedding, [Block(width, heads) for _ in range(layers)], head)


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, groups, ffn, expand):
        super().__init__()
        self.heads, self.groups, self.size, self.expand = heads, groups, width // heads, expand
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def turned(self, x, cosines, sines):
        front, rear = x.chunk(2, dim=-1)
        return (x * cosines + torch.cat((-rear, front), dim=-1) * sines).to(x.dtype)

    def forward(self, x, *turns):
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), dim=1)
        attended = attention(self.turned(q, *turns), self.turned(k, *turns), v, self.expand)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def make_llama(layers, width, heads, groups, ffn, vocabulary, tied, length, residual, expand):
    size = width // heads
    embedding = Embedding(vocabulary, width, None, residual)
    head = Head(nn.RMSNorm(width, eps=1e-5), width, vocabulary, embedding.tokens.weight if tied else None)
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size))
    angles = torch.cat((angles, angles), dim=-1)
    blocks = [LlamaBlock(width, heads, groups, ffn, expand) for _ in range(layers)]
    return Model(embedding, blocks, head, angles.cos(), angles.sin())


def attention(q, k, v, expand):
    sharers = q.shape[1] // k.shape[1]
    if expand and sharers > 1:
        k, v = k.repeat_interleave(sharers, dim=1), v.repeat_interleave(sharers, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=sharers > 1 and not expand)


def attention_ways(rows, length, width, heads, groups):
    """Returns [(ms of forward and backward per layer, ms of forward, backend)], fastest first."""
    size, found = width // heads, []
    qkv = torch.randn(rows, length, heads + 2 * groups, size, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in qkv.transpose(1, 2).split((heads, groups, groups), dim=1))
    gradient = torch.randn(rows, heads, length, size, device="cuda", dtype=torch.bfloat16)

    def run(expand, backward):
        out = attention(q, k, v, expand)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    def ms(*how):
        for _ in range(3):
            run(*how)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run(*how)
        torch.cuda.synchronize()
        return 100 * (time.perf_counter() - start)

    for way in WAYS:
        if way.endswith(",expanded") and groups == heads:
            continue
        try:
            with backend_of(way):
                found.append((ms(expands(way), True), ms(expands(way), False), way))
        except RuntimeError:  # unsupported by the backend
            pass
    return sorted(found)


# SDPA backends. "expanded": keys and values are copied for each head instead of shared.
WAYS = [backend + keys for backend in ("default", "flash", "cudnn") for keys in ("", ",expanded")]


def expands(way):
    return way.endswith(",expanded")


def backend_of(way):
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    backend = backends.get(way.split(",")[0])
    return sdpa_kernel([backend]) if backend else contextlib.nullcontext()


def print_attention(name, rows, length):
    for both, forward, way in attention_ways(rows, length, *attention_sizes(name)):
        print(json.dumps({"model": name, "micro_batch": rows, "way": way, "ms": both, "forward_ms": forward}),
              flush=True)


def gpt_shape(name):
    """Returns layers, hidden size, heads and vocabulary of a GPT."""
    name, _, first_layers = name.partition("-")
    layers, width, heads = MODELS[name]
    return (int(first_layers), width, heads, FEW_LAYERS_VOCABULARY) if first_layers else (
        layers, width, heads, VOCABULARY)


def attention_sizes(name):
    if name in LLAMAS:
        return LLAMAS[name][1:4]
    _, width, heads, _ = gpt_shape(name)
    return width, heads, heads


def make_model(name, length, way, residual):
    """Returns the model and its vocabulary size."""
    if name not in LLAMAS:
        shape = gpt_shape(name)
        return make_gpt(*shape, length, residual), shape[3]
    return make_llama(*LLAMAS[name], length, residual, expands(way)), LLAMAS[name][5]


def convert_to_float8(model, recipe, emulate):
    """Converts the linear layers of all blocks. `emulate`: rounds to FP8, but multiplies without it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for block in model.blocks:
        convert_to_float8_training(block, config=config)


def measure(name, rows, length, options):
    torch.manual_seed(1)
    device, fp32 = options.device, options.weights == "fp32"
    way = options.way or attention_ways(rows, length, *attention_sizes(name))[0][2]
    residual = torch.float32 if fp32 and options.residual == "fp32" else torch.bfloat16
    model, vocabulary = make_model(name, length, way, residual)
    ids = torch.randint(vocabulary, (rows, length + 1))
    batch = [part.contiguous().to(device) for part in (ids[:, :-1], ids[:, 1:])]
    model.to(device, torch.float32 if fp32 else torch.bfloat16)
    if options.float8:
        convert_to_float8(model, options.float8, emulate=device == "cpu")
    model.compile_parts(options.compile, options.compile_mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=fp32):
            loss = model(*batch)
        loss.backward()
        if fp32:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    with backend_of(way):
        start = time.perf_counter()
        first_loss = step().item()
        compile_seconds = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            loss = step()
        synchronize()
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        synchronize()
    seconds = (time.perf_counter() - start) / max(options.steps, 1)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    program = f"pytorch {torch.__version__} {options.weights} weights" + (", FP8" if options.float8 else "")
    print(json.dumps({"program": program, "model": name, "float8": options.float8, "micro_batch": rows,
                      "ms": 1e3 * seconds, "tokens_per_second": rows * length / seconds, "peak_gib": peak,
                      "loss": loss.item(), "first_loss": first_loss, "compile": options.compile,
                      "compile_mode": options.compile_mode,
                      "residual": str(residual)[len("torch."):], "way": way,
                      "compile_seconds": compile_seconds}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", help="name:micro-batch")
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--compile", choices=["modules", "model", "none"], default="modules")
    parser.add_argument("--compile-mode", default="default")
    parser.add_argument("--residual", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--float8", choices=["tensorwise", "rowwise"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        options.way = "default"
    torch.set_float32_matmul_precision("high")
    # This cache ignores the SDPA backend, so it could return a graph with another one.
    torch._functorch.config.enable_autograd_cache = False
    for model in options.models:
        name, rows = model.split(":")
        if options.attention:
            print_attention(name, int(rows), options.sequence)
            continue
        measure(name, int(rows), options.sequence, options)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
