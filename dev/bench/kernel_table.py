#!/usr/bin/env python3
"""Summarizes a trace of kernel_trace.c: launches and time of each kernel per step, and idle time.

    dev/bench/kernel_table.py trace.csv [--marker NAME] [--skip 5] [--rows 60] [--sequence]

A step ends at the last launch of the kernel whose name contains NAME. The default is the sum of the
losses, which runs once per micro-batch. The first `skip` steps and the last one are excluded.
--sequence lists the launches of one step in order instead.
"""
import argparse
import collections
import re
import subprocess


def short(name):
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    return name if len(name) < 110 else name[:70] + ".." + name[-38:]


def demangle(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines())) if done.returncode == 0 else {n: n for n in names}


def busy(spans):
    total, end = 0, 0
    for s, e in sorted(spans):
        if e > end:
            total += e - max(s, end)
            end = e
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--marker", default="loss_sum")
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--rows", type=int, default=60)
    arguments = parser.parse_args()
    records = []
    for line in open(arguments.trace):
        start, end, stream, name = line.rstrip("\n").split(",", 3)
        records.append((int(start), int(end), int(stream), name))
    records.sort()
    marks = [i for i, r in enumerate(records) if arguments.marker in r[3]]
    first, last = marks[arguments.skip], marks[-2]
    steps = len(marks) - 2 - arguments.skip
    chosen = records[first + 1 : last + 1]
    names = demangle(sorted({r[3] for r in chosen}))
    if arguments.sequence:
        one = records[marks[arguments.skip] + 1 : marks[arguments.skip + 1] + 1]
        for s, e, stream, name in one:
            print("%9.1f %8.1f us  stream %3d  %s" %
                  ((s - one[0][0]) / 1e3, (e - s) / 1e3, stream, short(names[name])))
        return
    total = collections.defaultdict(lambda: [0, 0])
    for s, e, stream, name in chosen:
        total[(stream, name)][0] += 1
        total[(stream, name)][1] += e - s
    wall = records[last][1] - records[first][1]
    print("%.3f ms per step over %d steps; at least one kernel running for %.3f ms" %
          (wall / steps / 1e6, steps, busy([r[:2] for r in chosen]) / steps / 1e6))
    for (stream, name), (count, ns) in sorted(total.items(), key=lambda x: -x[1][1])[: arguments.rows]:
        print("%9.3f ms %7.1f x %9.1f us  stream %3d  %s" %
              (ns / steps / 1e6, count / steps, ns / count / 1e3, stream, short(names[name])))


if __name__ == "__main__":
    main()
