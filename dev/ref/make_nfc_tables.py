#!/usr/bin/env python3
"""Makes llmc/data/nfc_tables.h: canonical decompositions and combining classes, for llmc/data/nfc.c.

    pip install tokenizers
    dev/ref/make_nfc_tables.py >llmc/data/nfc_tables.h

They are Python's, without what the NFC of Hugging Face's `tokenizers` does not know: its tables are those
of Unicode 9. Vocabularies are trained with that NFC, so ids must come from the same one.
"""
import sys
import unicodedata

from tokenizers import normalizers

theirs = normalizers.NFC().normalize_str
CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def decompositions():
    """Rows (composed, first, second): those that are composed again, and those that are not."""
    both, one_way = [], []
    for c in CHARACTERS:
        parts = unicodedata.decomposition(chr(c)).split()
        if not parts or parts[0].startswith("<"):
            continue
        first, second = [int(x, 16) for x in parts] if len(parts) == 2 else (int(parts[0], 16), 0)
        apart = chr(first) + (chr(second) if second else "")
        composes = bool(second) and unicodedata.normalize("NFC", apart) == chr(c)
        if composes and theirs(apart) == chr(c):
            both.append((c, first, second))
        elif not composes and theirs(chr(c)) != chr(c):
            one_way.append((c, first, second))
    return both, one_way


def known_mark(c):
    """Whether `tokenizers` knows the class of this mark: a mark that it takes for a letter stops others."""
    return all(theirs(t) == unicodedata.normalize("NFC", t)
               for t in ("a" + chr(c) + "\u0301", chr(c) + "\u0327\u0301\u0328"))


def classes():
    rows = []
    for c in CHARACTERS:
        k = unicodedata.combining(chr(c))
        if not k or not known_mark(c):
            continue
        if rows and rows[-1][1] == c - 1 and rows[-1][2] == k:
            rows[-1][1] = c
        else:
            rows.append([c, c, k])
    return rows


def write_table(name, rows, hexadecimal):
    words = ["{" + ",".join(f"0x{x:X}" if i < hexadecimal and x else str(x) for i, x in enumerate(row)) + "}"
             for row in rows]
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) > 95:
            lines.append("    " + line.rstrip())
            line = ""
        line += word + ", "
    print(f"static const uint32_t {name}[][3] = {{")
    print("\n".join(lines + ["    " + line.rstrip()]) + "\n};")


both, one_way = decompositions()
print(f"""\
// Made by dev/ref/make_nfc_tables.py; do not edit. Unicode's canonical decompositions and combining
// classes as used by Hugging Face's `tokenizers`. Included by nfc.c only.
#pragma once
#include <stdint.h>

// clang-format off
// A character and its canonical decomposition into two; composed again by NFC.""")
write_table("nfc_pairs", both, 3)
print("\n// Decompositions that NFC does not compose again; 0: decomposes into a single character.")
write_table("nfc_one_way", one_way, 3)
print("\n// Range of marks (first, last) and their combining class.")
write_table("nfc_classes", classes(), 2)
print("// clang-format on")
print(f"pairs {len(both)}, one way {len(one_way)}", file=sys.stderr)
