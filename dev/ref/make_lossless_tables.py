#!/usr/bin/env python3
"""Writes sdp4bit/lossless_tables.h: how often the coder of lossless weights expects each symbol.

usage: dev/ref/make_lossless_tables.py >sdp4bit/lossless_tables.h

Changes of weights are modeled by Student's t distribution with three degrees of freedom. Of the
shapes that were tried on a small GPT's checkpoints it costs least: within 0.1 bit of tables made
for each iteration. Needs Python's standard library alone. sdp4bit/README.md tells how the symbols
are made of weights.
"""
import math
import sys

PRECISION = 10                # bits: frequencies of a context add up to 2^PRECISION
SYMBOLS = 16                  # the last one is the escape
SMALLEST, LARGEST = -6, 7     # log2 of the rms change in ulps, in the contexts of changes
FRESH_SHIFT, FRESH_OFFSET = 8, 4
ESCAPE_BITS = 16
COST_UNIT = 256               # costs are in 1/256 bit


def shift_of(t):
    """Lowest bits of a change that travel as they are, for a change of about 2^t ulps."""
    return max(0, t - 1)


def change_probability(d, rms):
    """P(d): an exact change of that rms, rounded to whole ulps from anywhere within an ulp.

    The second difference of the twice integrated density, which is y / pi * atan(y / rms).
    """
    def integral(y):
        return y / math.pi * math.atan(y / rms)
    return integral(d + 1) - 2 * integral(d) + integral(d - 1)


def changes(t):
    rms, cell = 2.0 ** t, 1 << shift_of(t)
    values = [change_probability(v // 2 if v % 2 == 0 else -(v + 1) // 2, rms)
              for v in range((SYMBOLS - 1) * cell)]
    sums = [math.fsum(values[q * cell:(q + 1) * cell]) for q in range(SYMBOLS - 1)]
    return sums + [1 - math.fsum(sums)]


def fresh():
    """The exponents of new weights, where the change is larger than the old weight."""
    def below(x):  # P(|change| < x), x in units of its rms
        return 2 / math.pi * (x / (1 + x * x) + math.atan(x))
    # Symbol q is the binade [2^(7 - OFFSET - q), twice that) of the rms.
    sums = [below(2.0 ** (8 - FRESH_OFFSET - q)) - below(2.0 ** (7 - FRESH_OFFSET - q))
            for q in range(SYMBOLS - 1)]
    return sums + [1 - math.fsum(sums)]


def frequencies(probabilities):
    whole = 1 << PRECISION
    f = [max(1, round(p * whole)) for p in probabilities]
    f[f.index(max(f))] += whole - sum(f)
    return f


def costs(f, extra):
    bits = [PRECISION - math.log2(count) for count in f]
    return [round(COST_UNIT * (b + (ESCAPE_BITS if q == SYMBOLS - 1 else extra))) for q, b in enumerate(bits)]


def write_macro(name, rows):
    lines = [f"#define {name} {{"]
    lines += ["    {" + ", ".join(f"{x}" for x in row) + "}," for row in rows]
    lines[-1] = lines[-1][:-1] + "}"
    width = max(len(line) for line in lines)
    return "\n".join([line.ljust(width) + " \\" for line in lines[:-1]] + [lines[-1]])


def all_frequencies():
    rows = [frequencies(changes(t)) for t in range(SMALLEST, LARGEST + 1)]
    return rows + [frequencies(fresh()), frequencies([1.0] + [0.0] * (SYMBOLS - 1))]


def all_costs():
    extras = [shift_of(t) for t in range(SMALLEST, LARGEST + 1)] + [FRESH_SHIFT, 0]
    return [costs(f, e) for f, e in zip(all_frequencies(), extras)]


def main():
    sys.stdout.write(f"""\
// Made by dev/ref/make_lossless_tables.py; do not edit. How often the coder of lossless weights
// expects each symbol, of 2^{PRECISION}: (contexts, symbols). Included by lossless.h.
#pragma once

// clang-format off
{write_macro("LOSSLESS_FREQUENCIES", all_frequencies())}

// What a symbol costs with its extra bits, in 1/{COST_UNIT} bit.
{write_macro("LOSSLESS_COSTS", all_costs())}
// clang-format on
""")


if __name__ == "__main__":
    main()
