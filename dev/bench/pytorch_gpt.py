#!/usr/bin/env python3
"""The peer on the same GPU: a GPT-3-style model in PyTorch.

It uses torch.compile, fused AdamW and SDPA. Prints one JSON line per model: tokens/s, ms per step,
peak memory.

    python3 dev/bench/pytorch_gpt.py 125m:32 350m:16 1.3b:8 [--weights bf16] [--steps 20]
                                     [--sequence 2048]

--weights fp32   bf16 autocast and norm clipping, as nanoGPT trains and as precise as this trainer
--weights bf16   weights, gradients and AdamW's moments in bf16, no clipping: PyTorch's fastest
                 form, which does less than this trainer
"""
import argparse
import json
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

MODELS = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "1.3b": (24, 2048, 16)}
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


def measure(name, rows, length, steps, fp32):
    layers, width, heads = MODELS[name]
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    model = GPT(layers, width, heads, length).to("cuda", torch.float32 if fp32 else torch.bfloat16)
    step_model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    ids = torch.randint(VOCABULARY, (rows, length + 1), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=fp32):
            loss = step_model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        if fp32:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

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
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for model in arguments.models:
        name, rows = model.split(":")
        measure(name, int(rows), arguments.sequence, arguments.steps, arguments.weights == "fp32")
        torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
