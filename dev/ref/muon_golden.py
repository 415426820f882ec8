#!/usr/bin/env python3
"""Muon in plain Python and double precision: momentum, Newton-Schulz, and the update of weights, as
Emerging-Optimizers and Megatron-LM define them. Writes test/golden/muon/updates.h, which
test/unit/state/test_muon.c reads.

    dev/ref/muon_golden.py > test/golden/muon/updates.h
"""
import math
import struct

QUINTIC = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
           (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
CUBIC5 = [(3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
          (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0)]
# Position in enum MuonCoefficients, coefficients.
SETS = {"quintic": (1, QUINTIC), "cubic5": (6, CUBIC5)}
STEPS, MU, CLIP, LR, DECAY, EXTRA = 3, 0.9, 0.5, 0.02, 0.1, 0.2


def fp32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def value_of(seed, i):
    """The test's input: a hash of (seed, i), as a number between -1 and 1."""
    x = (i * 2654435761 + seed * 40503) & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 2246822519 & 0xFFFFFFFF
    x ^= x >> 13
    return (x >> 8) * 2.0 ** -23 - 1.0


def product(a, b):
    columns = list(zip(*b))
    return [[math.fsum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def transposed(a):
    return [list(row) for row in zip(*a)]


def newton_schulz(u, coefficients):
    tall = len(u) > len(u[0])
    x = transposed(u) if tall else u
    norm = max(math.sqrt(math.fsum(v * v for row in x for v in row)), 1e-15)
    x = [[v / norm for v in row] for row in x]
    for a, b, c in coefficients:
        a, b, c = fp32(a), fp32(b), fp32(c)
        gram = product(x, transposed(x))
        square = product(gram, gram)
        mix = [[b * g + c * s for g, s in zip(*rows)] for rows in zip(gram, square)]
        x = [[a * v + m for v, m in zip(*rows)] for rows in zip(x, product(mix, x))]
    return transposed(x) if tall else x


def train(groups, parts, columns, nesterov, coefficients):
    """Returns master weights and momentum after STEPS steps, row by row. A group of rows has parts[0]
    queries, parts[1] keys, parts[2] values."""
    group_rows = sum(parts)
    rows = groups * group_rows
    mu, lr, decay = fp32(MU), fp32(LR), fp32(DECAY)
    at = [[r * columns + c for c in range(columns)] for r in range(rows)]
    w = [[value_of(0, i) for i in row] for row in at]
    m = [[0.0] * columns for _ in range(rows)]
    for step in range(1, STEPS + 1):
        g = [[CLIP * value_of(step, i) for i in row] for row in at]
        m = [[mu * x + (1 - mu) * y for x, y in zip(*both)] for both in zip(m, g)]
        u = [[mu * x + (1 - mu) * y for x, y in zip(*both)] for both in zip(m, g)] if nesterov else m
        first = 0
        for part in parts:
            own = [r for r in range(rows) if first <= r % group_rows < first + part]
            first += part
            if not own:
                continue
            scale = EXTRA * math.sqrt(max(len(own), columns))
            for r, o in zip(own, newton_schulz([u[r] for r in own], coefficients)):
                w[r] = [x * (1 - lr * decay) - lr * scale * y for x, y in zip(w[r], o)]
    return w, m


CASES = [  # name, groups, rows of a group's parts, columns, Nesterov, coefficients
    ("wide", 1, (6, 0, 0), 20, False, "quintic"),
    ("tall, Nesterov", 1, (18, 0, 0), 7, True, "quintic"),
    ("grouped queries, keys and values", 2, (8, 4, 4), 12, False, "quintic"),
    ("cubic", 1, (8, 0, 0), 12, False, "cubic5"),
]


def main():
    most = max(groups * sum(parts) * columns for _, groups, parts, columns, _, _ in CASES)
    print("// Made by dev/ref/muon_golden.py: weights and momentum after three steps of Muon.")
    print("#pragma once")
    print("#include <stdbool.h>\n")
    print(f"enum {{ GOLDEN_MOST = {most} }};")
    print("typedef struct Golden {\n    const char *name;\n    int groups, part[3], group_rows, columns;\n"
          "    bool nesterov;\n    int coefficients;  // enum MuonCoefficients\n"
          "    double master[GOLDEN_MOST], momentum[GOLDEN_MOST];\n} Golden;")
    print("static const Golden goldens[] = {")
    for name, groups, parts, columns, nesterov, coefficients in CASES:
        number, steps = SETS[coefficients]
        w, m = train(groups, parts, columns, nesterov, steps)
        print(f'    {{"{name}",\n     {groups},\n     {{{", ".join(map(str, parts))}}},\n     {sum(parts)},\n'
              f"     {columns},\n     {str(nesterov).lower()},\n     {number},")
        for values, end in ((w, ","), (m, "},")):
            flat = [f"{v:.12f}" for row in values for v in row]
            lines = [", ".join(flat[i:i + 6]) for i in range(0, len(flat), 6)]
            print("     {" + ",\n      ".join(lines) + "}" + end)
    print("};")


if __name__ == "__main__":
    main()
