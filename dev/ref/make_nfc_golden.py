#!/usr/bin/env python3
"""Prints the hashes in test/unit/data/test_nfc.c. They are computed from the results of the NFC normalizer
in Hugging Face's `tokenizers` for all code points and for random sequences.

    pip install tokenizers xxhash
    dev/ref/make_nfc_golden.py
"""
import re

import xxhash
from tokenizers import normalizers

TEST = "test/unit/data/test_nfc.c"
MASK = (1 << 64) - 1
normalize = normalizers.NFC().normalize_str


def results(sequences):
    digest = xxhash.xxh3_64()
    for characters in sequences:
        digest.update(normalize("".join(map(chr, characters))).encode() + b"\n")
    return digest.intdigest()


def plane(number):
    for c in range(number << 16, (number + 1) << 16):
        if not 0xD800 <= c < 0xE000:
            yield from ([c], [0x61, c, 0x301], [c, 0x327, 0x301, 0x328], [0x301, c, 0x327, c],
                        [c, 0x1161, 0x11A8, c, 0x338, 0x307])


def splitmix64(state):
    """The random number generator of test/random.h."""
    while True:
        state = state + 0x9E3779B97F4A7C15 & MASK
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def random_sequences():
    with open(TEST, encoding="utf-8") as file:
        table = re.search(r"blocks\[\]\[2\] = \{(.*?)\};", file.read(), re.S).group(1)
    blocks = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"\{(\w+), (\w+)\}", table)]
    random = splitmix64(1)
    for _ in range(300000):
        sequence = []
        for _ in range(2 + next(random) % 15):
            first, last = blocks[next(random) % len(blocks)]
            sequence.append(first + next(random) % (last - first + 1))
        yield sequence


for i in range(17):
    print(f"plane {i}: 0x{results(plane(i)):016X}")
print(f"random 0x{results(random_sequences()):016X}")
