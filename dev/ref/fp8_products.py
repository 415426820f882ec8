#!/usr/bin/env python3
"""Compares FP8 quantization and products with PyTorch.

This program quantizes and multiplies random matrices. Scales and codes must be bitwise identical to
PyTorch's casts. PyTorch multiplies the same codes (torch._scaled_mm). Relative to an fp64 product of the
codes, the error of this program may be at most twice the error of PyTorch, for both the root mean square
and the largest error.

    python3 dev/ref/fp8_products.py build/test/gpu/fp8_dump      needs PyTorch

Uses a GPU if PyTorch finds one that computes FP8 products, else PyTorch emulates them in fp32. Prints
"ok NAME" and "not ok NAME: why" lines and a summary. Exits with 1 if a check failed.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch

import fp8
import make_goldens as model
from layer_gradients import compare, read_golden

TYPES = ["e4m3", "e5m2"]  # Fp8Type
# Tokens, columns and rows of a linear layer's weight (OC, C).
LAYERS = [(16, 16, 16), (48, 80, 112), (256, 192, 64), (1024, 768, 2304), (2048, 1024, 4096)]
SMALL_LAYERS = 3  # on CPUs


def cases(layers):
    """Returns tuples of m, n, k, type of a, type of b, fp32 result, fast accumulation, bias."""
    result = []
    for N, C, OC in layers:
        for bias in False, True:
            for fast in False, True:
                result.append((N, OC, C, 0, 0, False, fast, bias))
        for gradient in 0, 1:
            for fast in False, True:
                result.append((N, C, OC, gradient, 0, False, fast, False))
            result.append((OC, C, N, gradient, 0, True, False, False))
    return result


def write_input(path, listed):
    """Returns the matrices of each case: a, b and bias or None."""
    generator = torch.Generator().manual_seed(4321)
    draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()
    out, matrices = model.Writer(), []
    out.add("cases", [[int(x) for x in case[:7]] for case in listed], "i32")
    for i, (m, n, k, _, _, _, _, has_bias) in enumerate(listed):
        # Means other than 0, so that sums do not cancel.
        a, b, bias = 1e-3 * (draw(m, k) + 0.5), draw(n, k) + 0.5, draw(n) if has_bias else None
        out.add(f"a.{i}", a, "bf16")
        out.add(f"b.{i}", b, "bf16")
        if has_bias:
            out.add(f"bias.{i}", bias, "bf16")
        matrices.append((a, b, bias))
    out.write(path)
    return matrices


def bits_of(codes, kind):
    """Returns the bytes of codes. On CPUs, codes are fp32 numbers that have these values."""
    if codes.dtype != torch.float32:
        return codes.view(torch.uint8)
    _, _, mantissa, smallest = fp8.FORMATS[kind]
    exponent = (torch.frexp(codes)[1] - 1).masked_fill(codes == 0, smallest).clamp(min=smallest)
    # Units in the last place; a normal number's exponent counts from 1, its mantissa from 0.
    units = torch.ldexp(codes.abs(), mantissa - exponent).int()
    return (units + ((exponent - smallest) << mantissa) | torch.signbit(codes).int() << 7).to(torch.uint8)


def check_codes(name, ours, scales, x, kind):
    """Returns whether scale and codes of x are PyTorch's, and PyTorch's codes."""
    scale, inverse = fp8.scale_for(x.abs().max(), kind)
    codes = fp8.encode(x, scale, kind)
    wrong = (bits_of(codes, kind).cpu().reshape(-1) != ours).sum().item()
    good = wrong == 0 and scale.item() == scales[0].item() and inverse.item() == scales[1].item()
    words = f"{wrong} of {ours.numel()} codes differ; scale {scales[0].item():g}, PyTorch {scale.item():g}"
    if not good:
        print(f"not ok {name}: {words}")
    return good, codes, inverse


def check_case(number, case, matrices, ours):
    m, n, k, type_a, type_b, wide, fast, has_bias = case
    kinds = TYPES[type_a], TYPES[type_b]
    name = f"({m}, {k}) x ({n}, {k})^T {kinds[0]} x {kinds[1]}" + ", bias" * has_bias + ", fast" * fast
    name += ", fp32" * wide
    scales = ours[f"scales.{number}"]
    same_a, a, inverse_a = check_codes("codes of a: " + name, ours[f"a.{number}"], scales[:2], matrices[0],
                                       kinds[0])
    same_b, b, inverse_b = check_codes("codes of b: " + name, ours[f"b.{number}"], scales[2:], matrices[1],
                                       kinds[1])
    bias, dtype = matrices[2], torch.float32 if wide else torch.bfloat16
    theirs = fp8.product(a, b, inverse_a, inverse_b, bias, dtype, fast)
    exact = (a.float().double() @ b.float().double().t()) * (inverse_a.double() * inverse_b.double())
    exact = exact if bias is None else exact + bias.double()
    results = (t.reshape(-1).cpu() for t in (ours[f"d.{number}"], theirs, exact))
    return same_a and same_b, compare(name, *results, rule="PyTorch FP8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    options = parser.parse_args()
    reason = fp8.missing()
    if reason:
        print(f"# emulated: {reason}")
    device = "cpu" if reason else "cuda"
    listed = cases(LAYERS[:SMALL_LAYERS] if reason else LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        files = os.path.join(folder, "input"), os.path.join(folder, "output")
        matrices = write_input(files[0], listed)
        subprocess.run([options.program, *files], check=True)
        ours = read_golden(files[1])
    good, same = [], True
    for number, case in enumerate(listed):
        moved = [None if t is None else t.to(device) for t in matrices[number]]
        same_codes, close = check_case(number, case, moved, ours)
        same, good = same and same_codes, good + [close]
    print(f"{'ok' if same else 'not ok'} scales and codes are bitwise identical to PyTorch's")
    good.append(same)
    print(f"fp8_products: {sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
