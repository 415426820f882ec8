#!/usr/bin/env python3
"""Compares the gradients of one transformer layer with PyTorch, at the size of a real model (default
GPT-125M), which would be too large for a golden file.

PyTorch in fp32 (the reference), PyTorch in bf16 and this program get the same bf16 weights and tokens,
which this program reads from a file. For every tensor, the error of this program may be at most twice
the error of PyTorch in bf16, for both the root mean square and the largest error.

With --fp8-format, the layer's four linears run in FP8 with one scale per tensor, in this program and in
PyTorch (fp8.py). The reference stays PyTorch in fp32 without FP8. The error of each of the four weights'
gradients must also be at least half of PyTorch's, because a layer in bf16 would pass the other checks.

    python3 dev/ref/layer_gradients.py build/test/gpu/layer_dump [--seq-length 2048] [--rows 2]
        [--deterministic] [--fp8-format hybrid | e4m3]      needs PyTorch

Uses a GPU if PyTorch finds one. Prints "ok NAME" and "not ok NAME: why" lines and a summary. Exits with 1
if a check failed.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch

import fp8
import make_goldens as model

LINEARS = ("query_key_value.weight", "dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight")
DEVIATION = 0.04  # std of matrix elements; makes attention nonuniform and logits about 1


def initial_weights(generator):
    """Returns bf16 weights. Biases and LayerNorm weights are random, so that every term has an effect."""
    weights = {}
    for name, shape in model.parameter_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            value = DEVIATION * noise
        else:
            value = 1 + 0.1 * noise if "norm.weight" in name else 0.05 * noise
        weights[name] = value.bfloat16().float()
    return weights


def read_golden(path):
    """Returns the flattened tensors of a golden file (format: make_goldens.py)."""
    raw = np.fromfile(path, dtype=np.uint8)
    text = int(bytes(raw[:20]).split()[2])
    tensors = {}
    for line in bytes(raw[:text]).decode().split("\n")[1:]:
        if line and not line.startswith("#"):
            name, kind, shape, offset = line.split()
            start = text + int(offset)
            dtype = np.dtype({"f32": np.float32, "u8": np.uint8}[kind])
            flat = raw[start:start + dtype.itemsize * int(shape)].view(dtype)
            tensors[name] = torch.from_numpy(flat.copy())
    return tensors


def without_noise(name, flat):
    """Removes the bias gradient of the k rows. This bias does not change the softmax: the rest is noise."""
    if not name.endswith("query_key_value.bias"):
        return flat
    return flat.view(model.NH, 3, model.HD)[:, ::2].reshape(-1)


def errors(ours, reference):
    difference = (ours.double() - reference.double()).abs()
    return difference.pow(2).mean().sqrt().item(), difference.max().item()


def compare(name, ours, theirs, reference, rule="PyTorch bf16", at_least=0.0):
    """Returns true if the error is within the limit. The additional tolerance, as in
    test/unit/model/test_gpt.c, covers fp32 rounding and single outliers. rule: what computed `theirs`.
    at_least: smallest rms error allowed, relative to the rms error of `theirs`."""
    scale = reference.abs().max().item()
    (rms, worst), (rms_theirs, worst_theirs) = errors(ours, reference), errors(theirs, reference)
    good = rms <= 2 * rms_theirs + 1e-6 * scale and worst <= 2 * worst_theirs + 1e-3 * scale  # false for NaN
    good = good and rms >= at_least * rms_theirs
    figures = f"rms error {rms:.2e}, {rule} {rms_theirs:.2e}; largest {worst:.2e}, {worst_theirs:.2e}"
    figures += f"; scale {scale:.2e}"
    print(f"{'ok' if good else 'not ok'} {name}: {figures}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-attention-heads", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fp8-format", choices=["hybrid", "e4m3"])
    options = parser.parse_args()
    model.L, model.C, model.NH = 1, options.hidden_size, options.num_attention_heads
    model.T, model.Vp, model.B = options.seq_length, options.vocab_size, options.rows
    model.HD = model.C // model.NH

    generator = torch.Generator().manual_seed(4321)
    weights = initial_weights(generator)
    tokens = torch.randint(0, model.Vp, (model.B, model.T + 1), generator=generator)
    # Half of the tokens come from a small set, so that many positions use the same row of the
    # embedding.
    frequent = torch.rand(tokens.shape, generator=generator) < 0.5
    tokens = torch.where(frequent, tokens % 50, tokens)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    with tempfile.TemporaryDirectory() as folder:
        files = os.path.join(folder, "input"), os.path.join(folder, "output")
        out = model.Writer()
        out.add("config", [model.L, model.C, model.NH, model.T, model.Vp, model.B], "i32")
        out.add("tokens", inputs, "i32")
        out.add("targets", targets, "i32")
        for name, value in weights.items():
            out.add("weight." + name, value, "bf16")
        out.write(files[0])
        flags = ["--deterministic"] * options.deterministic + fp8.flags(options.fp8_format)
        subprocess.run([options.program, *files, *flags], check=True)
        ours = read_golden(files[1])

    device = fp8.device(options.fp8_format)
    if device == "cuda":
        torch.set_default_device(device)
    weights = {name: value.to(device) for name, value in weights.items()}
    inputs, targets = inputs.to(device), targets.to(device)
    fp32 = model.gradients(weights, torch.float32, inputs, targets, 1.0)
    linear = fp8.linear(options.fp8_format) if options.fp8_format else torch.nn.functional.linear
    bf16 = model.gradients(weights, torch.bfloat16, inputs, targets, 1.0, linear)
    rule = "PyTorch FP8" if options.fp8_format else "PyTorch bf16"
    losses = (run["losses"].reshape(-1).float().cpu() for run in (ours, bf16, fp32))
    good = [compare("losses of the positions", *losses, rule=rule)]
    for name in weights:
        tensors = (ours["gradient." + name], bf16["gradient"][name].cpu(), fp32["gradient"][name].cpu())
        in_fp8 = options.fp8_format and name.endswith(LINEARS)
        good.append(compare("gradient of " + name, *(without_noise(name, t.reshape(-1)) for t in tensors),
                            rule=rule, at_least=0.5 if in_fp8 else 0.0))
    print(f"layer_gradients: {sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
