#!/usr/bin/env python3
"""Applies a tolerance rule to results of ops_dump: error(GPU) <= 2 x error(CPU, bf16) + one rounding.

    compare_dumps.py REFERENCE CPU GPU

REFERENCE is from the CPU backend in fp32 (PRECISION=fp32), CPU from the CPU backend in bf16, GPU from the
CUDA backend, all with the same inputs. The error of a result is its difference from REFERENCE. The rule
applies to the root mean square and to the maximum over the elements.

One rounding is 2^-9 (bf16) of the result's root mean square, because GPU kernels round intermediate
tensors that the CPU backend keeps in fp32. The same holds for fp32 sums of rounded addends (dlogits,
gradients of attention). Other fp32 sums get 2^-16, because the order of additions differs. Results marked
exact must be bitwise identical to the CPU's.

Prints one ok / not ok line per result and a count. Exit code 0 if all passed. Needs only the standard
library.
"""
import array
import math
import sys

ROUNDED_INPUTS = ("head_",)  # ops that round the addends of their fp32 sums


def read(path):
    with open(path, "rb") as file:
        if file.readline() != b"opsdump1\n":
            sys.exit(f"{path} is not a result of ops_dump")
        results = {}
        while line := file.readline():
            name, kind, compare, count = line.decode().split()
            raw = file.read(int(count) * (2 if kind == "b" else 4))
            halves = () if kind == "f" else (w << 16 for w in array.array("H", raw))
            words = array.array("I", raw if kind == "f" else halves)
            if len(words) != int(count):
                sys.exit(f"{path} ends inside {name}")
            results[name] = (kind, compare, array.array("f", words.tobytes()), raw)
        return results


def errors(values, reference):
    """Root mean square and maximum of |values - reference|; inf if a value is not finite."""
    total = largest = 0.0
    for value, expected in zip(values, reference):
        difference = abs(value - expected)
        if not math.isfinite(difference):
            return math.inf, math.inf
        total += difference * difference
        largest = max(largest, difference)
    return math.sqrt(total / max(len(values), 1)), largest


def allowance(name, kind):
    return 2.0**-9 if kind == "b" or name.startswith(ROUNDED_INPUTS) else 2.0**-16


def compare_result(name, reference, cpu, gpu):
    kind, compare, values, raw = gpu
    if kind != cpu[0] or len(values) != len(cpu[2]) or len(values) != len(reference[2]):
        return False, "results of different kinds or sizes"
    if compare == "e":
        different = sum(a != b for a, b in zip(values, cpu[2])) if raw != cpu[3] else 0
        return raw == cpu[3], f"{different} of {len(values)} elements differ"
    zeros = array.array("f", bytes(4 * len(values)))
    rms, largest = errors(reference[2], zeros)
    cpu_rms, cpu_largest = errors(cpu[2], reference[2])
    gpu_rms, gpu_largest = errors(values, reference[2])
    rounding = allowance(name, kind)
    ok = gpu_rms <= 2 * cpu_rms + rounding * rms and gpu_largest <= 2 * cpu_largest + 2 * rounding * largest
    scale = rms or 1.0
    ours = f"rms error {gpu_rms / scale:.2e}, largest {gpu_largest / (largest or 1.0):.2e}"
    return ok, f"{ours}; CPU {cpu_rms / scale:.2e}, {cpu_largest / (largest or 1.0):.2e}"


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    reference, cpu, gpu = (read(path) for path in sys.argv[1:])
    failed = 0
    for name in cpu:
        if name not in gpu or name not in reference:
            ok, words = False, "missing"
        else:
            ok, words = compare_result(name, reference[name], cpu[name], gpu[name])
        failed += not ok
        print(f"{'ok' if ok else 'not ok'} - {name}: {words}")
    for name in gpu.keys() - cpu.keys():
        failed += 1
        print(f"not ok - {name}: not in the CPU's results")
    print(f"compare_dumps: {len(cpu) - failed} passed, {failed} failed")
    sys.exit(1 if failed or not cpu else 0)


main()
