#!/usr/bin/env python3
"""Generates test/golden/blend/core.jsonl: the sample order of blends in Megatron-LM's dataset builder.

    python3 dev/ref/make_blend_golden.py [output file]          needs numpy, takes seconds

Reimplements megatron-core's BlendedMegatronDatasetBuilder, BlendedDataset and GPTDataset from their
documented behavior, with numpy's generator and without code of llmc/data. One of three rules determines
the number of samples requested from each shard and the length of the blend:

    rule       samples per shard                        length of the blend
    fork       ceil(target * weight * 1.005)            sum over the shards (the paper's fork)
    surplus X  ceil(ceil(target * weight) * (1 + X))    sum of ceil(target * weight) (megatron-core from
                                                        0.11, --mid-level-dataset-surplus X)
    list       all, weighted by their number            the target, if there are as many samples

Without a target, the rule list takes every sample once.

The file has one line per case: "shards" are the sequence lengths of each shard, "draws" the first
(shard, sample) pairs, and "fnv" the 64-bit FNV-1a hash of all tokens of the blend in order, each as four
little-endian bytes. Token p of shard k is (7919 k + 31 p) mod 60000.
"""
import json
import math
import re
import sys

import numpy as np

DRAWS = 40


def split_bounds(text):
    weights = [float(x) for x in re.findall(r"[.0-9]+", text)]
    weights = [w / sum(weights) for w in weights + [0.0] * (3 - len(weights))]
    bounds = [0.0]
    for w in weights:
        bounds.append(bounds[-1] + w)
    return bounds


class GPT:
    """One split of a shard, in samples of S + 1 tokens."""

    def __init__(self, tokens, lengths, beg, end, wanted, S, seed):
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.sequences = [tokens[starts[i]:starts[i + 1]] for i in range(len(lengths))]
        total = int(sum(lengths[beg:end]))
        epochs = 1
        while wanted is not None and epochs * total < wanted * S + 1:
            epochs += 1
        apart, before = False, 0
        if epochs > 1:
            before = ((epochs - 1) * total - 1) // S
            apart = wanted - before < int(0.80 * ((total - 1) // S))
        rng = np.random.RandomState(seed)

        def documents(n):
            index = np.tile(np.arange(beg, end, dtype=np.int32), n)
            rng.shuffle(index)
            return index

        order = np.concatenate([documents(epochs - 1), documents(1)]) if apart else documents(epochs)
        self.stream = np.concatenate([self.sequences[i] for i in order])
        self.S = S
        count = (epochs * total - 1) // S
        parts = [np.arange(0, before), np.arange(before, count)] if apart else [np.arange(count)]
        parts = [part.astype(np.uint32) for part in parts]
        for part in parts:
            rng.shuffle(part)
        self.shuffled = np.concatenate(parts)

    def __len__(self):
        return len(self.shuffled)

    def __getitem__(self, i):
        k = int(self.shuffled[i])
        return self.stream[k * self.S:k * self.S + self.S + 1]


def normalize(weights):
    w = np.array(weights, dtype=np.float64)
    return (w / np.sum(w)).tolist()


def blend(weights, size):
    drawn, table = [0] * len(weights), []
    for k in range(size):
        lags = [w * max(float(k), 1.0) - d for w, d in zip(weights, drawn)]
        best = lags.index(max(lags))
        table.append((best, drawn[best]))
        drawn[best] += 1
    return table


def exhaust(sizes):
    total, drawn, table = sum(sizes), [0] * len(sizes), []
    unspent = {i for i, s in enumerate(sizes) if s}
    while unspent:
        k = max(float(len(table)), 1.0)
        best = max(sorted(unspent), key=lambda i: sizes[i] / float(total) * k - drawn[i])
        table.append((best, drawn[best]))
        drawn[best] += 1
        if drawn[best] == sizes[best]:
            unspent.remove(best)
    return table


def build(case):
    bounds = split_bounds(case["split"])
    S, seed, target, weights = case["seq"], case["seed"], case["target"], case["weights"]
    weights = normalize(weights) if weights else None
    parts = []
    for k, lengths in enumerate(case["shards"]):
        n = len(lengths)
        beg, end = int(round(bounds[case["index"]] * n)), int(round(bounds[case["index"] + 1] * n))
        tokens = (7919 * k + 31 * np.arange(sum(lengths), dtype=np.int64)) % 60000
        if weights is None:
            wanted = None
        elif case["surplus"] is None:
            wanted = math.ceil(target * weights[k] * 1.005)
        else:
            wanted = math.ceil(math.ceil(target * weights[k]) * (1 + case["surplus"]))
        parts.append(GPT(tokens, lengths, beg, end, wanted, S, seed))
        parts[-1].wanted = wanted
    if weights is None:
        sizes = [len(p) for p in parts]
        table = exhaust(sizes) if target is None else blend(normalize(sizes), min(target, sum(sizes)))
    elif case["surplus"] is None:
        table = blend(normalize(weights), sum(p.wanted for p in parts))
    else:
        table = blend(normalize(weights), sum(math.ceil(target * w) for w in weights))
    return parts, table


def fnv(parts, table):
    value = 0xCBF29CE484222325
    for shard, sample in table:
        for byte in np.asarray(parts[shard][sample], dtype="<u4").tobytes():
            value = ((value ^ byte) * 0x100000001B3) % 2 ** 64
    return value


def main():
    rng = np.random.RandomState(20)
    out = open(sys.argv[1] if len(sys.argv) > 1 else "test/golden/blend/core.jsonl", "w")
    written = 0
    while written < 60:
        count = int(rng.randint(2, 12))
        shards = [[int(x) for x in rng.randint(0, 30, size=rng.randint(20, 60))] for _ in range(count)]
        rule = written % 4  # fork, surplus, list, list without a target
        weights = None if rule > 1 else [float(round(x, 3)) for x in rng.uniform(0.05, 5, size=count)]
        case = {
            "shards": shards, "weights": weights,
            "split": ["80,15,5", "969, 30, 1", "1,1,1", "100,0,0"][rng.randint(4)],
            "index": int(rng.randint(3)), "seq": int(rng.choice([4, 8, 13])),
            "seed": int(rng.choice([1234, 7])),
            "target": None if rule == 3 else int(rng.randint(10, 400)),
            "surplus": float(rng.choice([0.005, 0.1])) if rule == 1 else None,
        }
        bounds = split_bounds(case["split"])
        i = case["index"]
        ranges = [(int(round(bounds[i] * len(s))), int(round(bounds[i + 1] * len(s)))) for s in shards]
        if bounds[i + 1] <= bounds[i] or any(sum(s[a:b]) <= case["seq"] for s, (a, b) in zip(shards, ranges)):
            continue  # both programs report a split without samples as an error
        parts, table = build(case)
        if any(sample >= len(parts[shard]) for shard, sample in table):
            continue  # megatron-core raises an IndexError; in this program the blend ends
        draws = [list(map(int, d)) for d in table[:DRAWS]]
        case.update(samples=len(table), draws=draws, fnv="%016x" % fnv(parts, table))
        out.write(json.dumps(case, separators=(",", ":")) + "\n")
        written += 1


if __name__ == "__main__":
    main()
