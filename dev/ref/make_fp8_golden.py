#!/usr/bin/env python3
"""Generates test/golden/fp8/codes.h: FP8 codes of all bf16 numbers, as other libraries compute them.

    dev/ref/make_fp8_golden.py >test/golden/fp8/codes.h

Needs numpy, and PyTorch >= 2.1 or ml_dtypes (the types of JAX); with both they must agree. The numbers are
clamped to the range of the format first, because these libraries do not saturate. Codes of positive
numbers only grow, so the golden file has the first bf16 number of each code.
"""
import importlib.util
import sys

import numpy as np

FORMATS = {'e4m3': ('float8_e4m3fn', 448.0), 'e5m2': ('float8_e5m2', 57344.0)}


def cast_by_torch(x, name):
    import torch
    return torch.from_numpy(x).to(getattr(torch, name)).view(torch.uint8).numpy()


def cast_by_ml_dtypes(x, name):
    import ml_dtypes
    return x.astype(getattr(ml_dtypes, name)).view(np.uint8)


LIBRARIES = {'torch': cast_by_torch, 'ml_dtypes': cast_by_ml_dtypes}


def first_numbers(casts, name, largest):
    """Returns the bits of the first positive bf16 number of each code."""
    bits = np.arange(0x7F80, dtype=np.uint32)  # finite, positive
    x = np.minimum((bits << 16).view(np.float32), np.float32(largest))
    codes = [cast(x, name) for cast in casts]
    negative = [cast(-x, name) for cast in casts]
    for c, n in zip(codes, negative):
        if not np.array_equal(c, codes[0]) or not np.array_equal(n, c | 0x80):
            sys.exit(f'{name}: the libraries or the signs differ')
    if np.any(np.diff(codes[0].astype(int)) < 0) or len(np.unique(codes[0])) != codes[0][-1] + 1:
        sys.exit(f'{name}: codes are missing or not in order')
    return np.searchsorted(codes[0], np.arange(codes[0][-1] + 1))


def main():
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    if not found:
        sys.exit('neither torch nor ml_dtypes is installed')
    versions = ', '.join(f'{name} {__import__(name).__version__}' for name in found)
    print(f'// Made by dev/ref/make_fp8_golden.py with {versions}: the first positive bf16 number, as\n'
          '// bits, of each FP8 code.\n#pragma once\n#include <stdint.h>')
    for key, (name, largest) in FORMATS.items():
        numbers = first_numbers([LIBRARIES[name] for name in found], name, largest)
        print(f'static const uint16_t first_bf16_of_{key}[{len(numbers)}] = {{')
        for row in range(0, len(numbers), 13):
            print('    ' + ', '.join(f'0x{n:04X}' for n in numbers[row:row + 13]) + ',')
        print('};')


if __name__ == '__main__':
    main()
