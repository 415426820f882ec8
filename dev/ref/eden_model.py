#!/usr/bin/env python3
"""Reference implementation of EDEN and its rotation in numpy, written from sdp4bit/README.md without
using code of sdp4bit.

    python3 dev/ref/eden_model.py             writes test/golden/eden/eden.golden; takes seconds
    python3 dev/ref/eden_model.py --errors    prints a table of errors
    python3 dev/ref/eden_model.py --bias      prints the bias on groups with outliers; takes minutes

Needs numpy. The golden file has the format of make_goldens.py and is read by
test/unit/sdp4bit/test_eden.c:
    key                   i32   seed, step, purpose and source of the rotation's signs
    logical               i32   logical offset of each group
    input                 f32   (groups, 256)
    rotated               f32   (groups, 256)
    levels.B              f32   Lloyd-Max levels for B bits
    codes.B               i32   (groups, 8 B) packed codes of a group, in 32-bit words
    scales.B              f32   (groups)
    back.B                f32   (groups, 256) values after decoding and rotating back
    error.B               f32   relative squared error on Gaussian input (errors_of)
A group with rotated values that are not finite decodes to NaN; which NaN is unspecified.
"""
import math
import os
import sys

import numpy as np

GROUP = 256
f32 = np.float32


# --- levels --------------------------------------------------------------------------------------

def lloyd_max(bits):
    """Returns the positive levels of the optimal symmetric quantizer with 2^bits levels for a unit Gaussian."""
    count = 2 ** (bits - 1)
    level = [(k + 0.5) * 3 / count for k in range(count)]
    tail = lambda t: 0.5 * math.erfc(t / math.sqrt(2))
    density = lambda t: math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    for _ in range(10000):
        edge = [0.0] + [(a + b) / 2 for a, b in zip(level, level[1:])] + [40.0]
        new = [(density(a) - density(b)) / (tail(a) - tail(b)) for a, b in zip(edge, edge[1:])]
        moved, level = max(abs(a - b) for a, b in zip(level, new)), new
        if moved < 1e-15:
            break
    return np.array(level).astype(f32)


# --- the rotation --------------------------------------------------------------------------------

def philox(key, counter):
    """Returns the four words of Philox4x32-7 for a counter."""
    c, k = list(counter), list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def signs_of(seed, step, purpose, logical):
    """Returns the signs of 256 elements, starting at a logical offset. Each word has 32 signs."""
    sign = []
    for word in range(logical // 32, logical // 32 + GROUP // 32):
        block = word // 4
        bits = philox((seed, purpose), (block & 0xFFFFFFFF, block >> 32, step, 0))[word % 4]
        sign += [-1 if bits >> i & 1 else 1 for i in range(32)]
    return np.array(sign, f32)


def hadamard(x):
    """Applies the Hadamard transform to each row, in stages with strides 1, 2, 4, ..., not normalized."""
    rows, n = x.shape
    stride = 1
    while stride < n:
        pairs = x.reshape(rows, n // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([low + high, low - high], axis=2).reshape(rows, n)
        stride *= 2
    return x


# --- one hop -------------------------------------------------------------------------------------

def tree(x):
    """Sums each row by a perfect binary tree over adjacent pairs."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x


def encode(y, bits, levels):
    """Returns codes and scales of rotated groups (rows)."""
    largest = np.abs(y).max(axis=1, keepdims=True)
    finite = np.isfinite(y).all(axis=1, keepdims=True)
    coded = finite & (largest >= f32(2.0 ** -126))
    lift = np.where(largest < f32(2.0 ** -40), f32(2.0 ** 80), f32(1))
    lift = np.where(largest >= f32(2.0 ** 50), f32(2.0 ** -80), lift)
    z = np.where(coded, np.abs(y), f32(1)) * lift
    squares = tree(z * z)
    rms = np.sqrt(squares) * f32(0.0625)
    unit = rms * f32(0.5) + np.where(coded, largest, f32(1)) * lift * f32(1 / 6)
    v = z * (f32(1) / unit)
    code = np.zeros(y.shape, np.int64)
    for low, high in zip(levels, levels[1:]):
        code += v > f32(0.5) * (low + high)
    product = tree(z * levels[code])
    scale = (squares / product) * (f32(1) / lift)
    sent = coded & np.isfinite(scale)
    code = np.where(sent, code + np.where(np.signbit(y), len(levels), 0), 0)
    scale = np.where(sent, scale, np.where(finite & ~coded, f32(0), f32(np.nan)))
    return code, scale


def decode(code, scale, levels):
    value = levels[code % len(levels)]
    return np.where(code < len(levels), value, -value) * scale


def pack(code, bits):
    """Packs the codes of each row into a bit stream of 32-bit words."""
    rows = []
    for row in code:
        stream = sum(int(c) << (bits * i) for i, c in enumerate(row))
        rows.append([stream >> (32 * w) & 0xFFFFFFFF for w in range(GROUP * bits // 32)])
    return np.array(rows, np.uint32).view(np.int32)


# --- errors --------------------------------------------------------------------------------------

def rounded(x, rng, group=128, most=127):
    """Quantizes to int8 with stochastic rounding and decodes, like the intra-node hop."""
    x = x.reshape(-1, group)
    step = np.abs(x).max(axis=1, keepdims=True) / most
    return (np.floor(x / step + rng.random(x.shape)) * step).reshape(-1, GROUP)


def errors_of(bits, levels):
    """Returns relative squared errors on Gaussian input: for one EDEN hop, and for a mean over 4 nodes of
    8 ranks with int8 in groups of 128 inside the nodes and EDEN between them."""
    rng = np.random.default_rng(bits)
    y = rng.standard_normal((1 << 14, GROUP)).astype(f32)
    one = ((decode(*encode(y, bits, levels), levels) - y) ** 2).sum() / (y.astype(float) ** 2).sum()
    mean, sent = 0.0, 0.0
    for node in range(4):
        ranks = [rng.standard_normal((1 << 12, GROUP)) for _ in range(8)]
        inside = sum(rounded(x, rng) for x in ranks).astype(f32)
        mean = mean + sum(ranks)
        sent = sent + decode(*encode(inside, bits, levels), levels).astype(float)
    return one, ((sent - mean) ** 2).sum() / (mean ** 2).sum()


def bias_of(x, bits, levels, rotations, trials=40000, batch=4000):
    """Returns two errors of one group x over random signs: the largest bias of an element, relative to the
    root mean square error of an element, and the relative squared error. rotations: their number."""
    rng, total, squares = np.random.default_rng(bits), np.zeros(GROUP), 0.0
    for _ in range(trials // batch):
        signs = [rng.choice([f32(-1), f32(1)], (batch, GROUP)) for _ in range(rotations)]
        y = np.repeat(x.astype(f32)[None], batch, axis=0)
        for sign in signs:
            y = hadamard(y * sign) * f32(1 / 16)
        back = decode(*encode(y, bits, levels), levels)
        for sign in reversed(signs):
            back = hadamard(back) * f32(1 / 16) * sign
        total += back.sum(axis=0, dtype=float)
        squares += float(((back - x) ** 2).sum())
    bias, error = np.abs(total / trials - x).max(), squares / trials
    return bias / math.sqrt(error / GROUP), error / float((x ** 2).sum())


def outlier_groups():
    rng, five = np.random.default_rng(1), [3, 40, 77, 150, 201]
    spikes = 0.01 * rng.standard_normal(GROUP)
    spikes[five] = 1, -0.8, 1.3, 0.6, 1.1
    return {"five elements, the others 1 %": spikes, "Student's t, 2 degrees": rng.standard_t(2, GROUP),
            "Student's t, 3 degrees": rng.standard_t(3, GROUP), "Gaussian": rng.standard_normal(GROUP)}


def print_biases():
    print("largest bias of an element / root mean square error; relative squared error")
    for name, x in outlier_groups().items():
        for bits in (4, 3, 2):
            found = [bias_of(x, bits, lloyd_max(bits), rotations) for rotations in (1, 2)]
            print(f"{name:30} {bits} bits"
                  + "".join(f"  {k} rotation(s) {bias:.3f} {error:.4f}" for k, (bias, error) in
                            enumerate(found, 1)), flush=True)


# --- the golden file -----------------------------------------------------------------------------

def inputs():
    """Returns different groups: Gaussian, heavy-tailed, sparse, tiny, huge, zero and not finite."""
    rng = np.random.default_rng(7)
    normal = lambda: rng.standard_normal(GROUP)
    one, two = np.zeros(GROUP), np.zeros(GROUP)
    one[77], two[3], two[200] = -2.5, 1.0, 0.3
    groups = [normal(), 1e-4 * normal(), normal() * np.where(rng.random(GROUP) < 0.02, 20, 1),
              rng.laplace(size=GROUP), one, two, 1e-13 * normal(), 1e-38 * normal(), 1e-42 * normal(),
              1e16 * normal(), 1e36 * normal(), np.zeros(GROUP), np.full(GROUP, -0.125)]
    groups = np.array(groups).astype(f32)
    spoilt = np.array([normal(), normal(), 0 * normal()]).astype(f32)
    spoilt[0][5], spoilt[1][250], spoilt[2][:] = np.nan, np.inf, f32(3e38)
    return np.concatenate([groups, spoilt])


def write_golden(path, tensors):
    """Writes a golden file in the format of make_goldens.py."""
    lines, data, offset = ["# Made by dev/ref/eden_model.py, which tells what the tensors are."], b"", 0
    for name, x in tensors:
        kind = {"float32": "f32", "int32": "i32"}[str(x.dtype)]
        lines.append(f"{name} {kind} {','.join(str(n) for n in x.shape)} {offset}")
        raw = x.tobytes()
        data += raw + bytes(-len(raw) % 64)
        offset = len(data)
    text = "\n".join(lines) + "\n"
    size = (len("golden 1 123456\n") + len(text) + 63) // 64 * 64
    head = f"golden 1 {size}\n" + text
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(head.encode() + b"\n" * (size - len(head)) + data)


def golden_tensors():
    seed, step, purpose = 20240901, 3, 7
    x = inputs()
    # Some offsets are not multiples of 128: the signs of these groups come from three counters.
    logical = np.array([32 * (11 * g + 1) for g in range(len(x))], np.int32)
    signs = np.array([signs_of(seed, step, purpose, int(at)) for at in logical])
    with np.errstate(all="ignore"):
        y = hadamard(x * signs)
        tensors = [("key", np.array([seed, step, purpose, 0], np.int32)), ("logical", logical), ("input", x),
                   ("rotated", y)]
        for bits in (4, 3, 2):
            levels = lloyd_max(bits)
            code, scale = encode(y, bits, levels)
            back = hadamard(decode(code, scale, levels)) * f32(1 / GROUP) * signs
            tensors += [(f"levels.{bits}", levels), (f"codes.{bits}", pack(code, bits)),
                        (f"scales.{bits}", scale[:, 0]), (f"back.{bits}", back),
                        (f"error.{bits}", np.array(errors_of(bits, levels), f32))]
    return tensors


def main():
    if sys.argv[1:] == ["--bias"]:
        print_biases()
        return
    if sys.argv[1:] == ["--errors"]:
        print("bits   with scale   one hop   4 x 8 ranks, int8 within nodes")
        for bits in (4, 3, 2):
            one, two = errors_of(bits, lloyd_max(bits))
            print(f"{bits}      {bits + 32 / GROUP:<10}   {one:.5f}   {two:.5f}")
        return
    here = os.path.dirname(os.path.abspath(__file__))
    write_golden(os.path.join(here, "../../test/golden/eden/eden.golden"), golden_tensors())


if __name__ == "__main__":
    main()
