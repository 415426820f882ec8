#!/usr/bin/env python3
"""Measures PyTorch on the same GPU for comparison, with GPT-3-style models and Llamas.

Uses torch.compile, fused AdamW and SDPA. Prints one JSON line per model with tokens/s, ms per step and
peak memory.

    python3 dev/bench/pytorch_gpt.py 125m:32 350m:16 1.3b:8 llama_1.1b:8 [--weights bf16]
                                     [--steps 20] [--sequence 2048] [--way WAY] [--attention]

--weights fp32   bf16 autocast and norm clipping, like nanoGPT; as precise as this trainer
--weights bf16   weights, gradients and AdamW moments in bf16, no clipping. This is PyTorch's fastest
                 configuration, but less precise than this trainer
--way WAY        attention backend for a Llama, with a name that --attention prints [the fastest]
--attention      only measures attention with every SDPA backend, in ms per layer

Llama uses one matrix product for queries, keys and values, and one for gate and up.
"""
import argparse
import contextlib
import json
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MODELS = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "1.3b": (24, 2048, 16)}
# Layers, hidden size, heads, groups, MLP size, vocabulary, tied word embeddings.
LLAMAS = {"llama_125m": (12, 768, 12, 12, 2048, 50304, True),
          "llama_1.1b": (22, 2048, 32, 4, 5632, 32000, False)}
VOCABULARY = 50304


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


class GPT(nn.Module):
    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, groups, ffn, expand):
        super().__init__()
        self.heads, self.groups, self.size, self.expand = heads, groups, width // heads, expand
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def turned(self, x, turns):
        cosines, sines = turns
        front, rear = x.chunk(2, dim=-1)
        return (x * cosines + torch.cat((-rear, front), dim=-1) * sines).to(x.dtype)

    def forward(self, x, turns):
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), dim=1)
        attended = attention(self.turned(q, turns), self.turned(k, turns), v, self.expand)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers, width, heads, groups, ffn, vocabulary, tied, length, expand):
        super().__init__()
        size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, ffn, expand) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines))
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


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


def attention_sizes(name):
    return LLAMAS[name][1:4] if name in LLAMAS else (*MODELS[name][1:], MODELS[name][2])


def make_model(name, rows, length, way):
    """Returns the model, its vocabulary size, and a context that selects the attention backend."""
    if name in MODELS:
        return GPT(*MODELS[name], length), VOCABULARY, contextlib.nullcontext()
    way = way or attention_ways(rows, length, *attention_sizes(name))[0][2]
    return Llama(*LLAMAS[name], length, expands(way)), LLAMAS[name][5], backend_of(way)


def measure(name, rows, length, steps, fp32, way):
    torch.manual_seed(1)
    model, vocabulary, chosen_attention = make_model(name, rows, length, way)
    torch.cuda.reset_peak_memory_stats()
    model.to("cuda", torch.float32 if fp32 else torch.bfloat16)
    step_model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    ids = torch.randint(vocabulary, (rows, length + 1), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=fp32):
            loss = step_model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        if fp32:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    with chosen_attention:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    kind = " fp32 weights" if fp32 else " bf16 weights"
    print(json.dumps({"program": "pytorch " + torch.__version__ + kind, "model": name, "micro_batch": rows,
                      "ms": 1e3 * seconds, "tokens_per_second": rows * length / seconds,
                      "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": float(loss)}),
          flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", help="name:micro-batch")
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--attention", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for model in arguments.models:
        name, rows = model.split(":")
        if arguments.attention:
            print_attention(name, int(rows), arguments.sequence)
            continue
        measure(name, int(rows), arguments.sequence, arguments.steps, arguments.weights == "fp32",
                arguments.way)
        torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
