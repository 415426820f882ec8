#!/usr/bin/env python3
"""Generates the table and the JSON file of dev/bench/single_gpu.sh from the JSON logs of its runs.

    single_gpu_table.py FOLDER OUT.json
"""
import glob
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import json_lines, number_column as number, print_columns, write_records

SHAPES = {"125m": (12, 768), "350m": (24, 1024), "1.3b": (24, 2048), "2.7b": (32, 2560), "6.7b": (32, 4096)}
VOCABULARY, FEW_LAYERS_VOCABULARY, LENGTH = 50304, 1024, 2048
# Layers, hidden size, key/value heads per head, MLP size, vocabulary, untied word embeddings.
LLAMAS = {"llama_125m": (12, 768, 1, 2048, 50304, False), "llama_1.1b": (22, 2048, 1 / 8, 5632, 32000, True)}
ORDER = [*SHAPES, *LLAMAS]


def flops_per_token(model):
    """Returns FLOPs per token by Megatron-LM's formula, which counts full attention, and for causal
    attention: 6N + 6*L*C*T."""
    if model in LLAMAS:
        layers, width, shared, ffn, vocabulary, untied = LLAMAS[model]
        matrices = layers * width * ((2 + 2 * shared) * width + 3 * ffn) + vocabulary * width
        norms, attention = (2 * layers + 1) * width, 6 * layers * width * LENGTH
        return 6 * matrices + 2 * attention, 6 * (matrices + norms) + attention
    name, _, first_layers = model.partition("-")  # 6.7b-8: the first 8 layers
    layers, width = SHAPES[name]
    layers, vocabulary = (int(first_layers), FEW_LAYERS_VOCABULARY) if first_layers else (layers, VOCABULARY)
    parameters = vocabulary * width + LENGTH * width + layers * (12 * width * width + 13 * width) + 2 * width
    megatron = 72 * layers * width**2 * (1 + LENGTH / (6 * width) + vocabulary / (12 * layers * width))
    return megatron, 6 * parameters + 6 * layers * width * LENGTH


PEAK = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
for _ in range(10): a @ b
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(50): a @ b
torch.cuda.synchronize()
print(50 * 2 * 8192**3 / (time.perf_counter() - start))
"""


def matmul_peak():
    """Measures the FLOP/s of an 8192^3 bf16 matrix product. Returns None without PyTorch."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def our_rows(folder):
    for path in sorted(glob.glob(os.path.join(folder, "*.jsonl"))):
        model, rows, mode = os.path.basename(path)[: -len(".jsonl")].rsplit(".", 2)
        records = json_lines(path)
        intervals = [r for r in records if r["kind"] == "interval"]
        if not intervals:
            continue
        start = next(r for r in records if r["kind"] == "start")
        # peak_gib is all GPU memory in use: memory plan, context and libraries.
        memory = next((r["timing"] for r in records if r["kind"] == "memory"), {})
        timing = intervals[-1]["timing"]
        yield {"program": "sdp4bit.c " + mode, "model": model, "micro_batch": int(rows),
               "ms": timing["elapsed_ms"], "tokens_per_second": timing["tokens_per_second"],
               "commit": start["commit"], "device": start["device"], "loss": intervals[-1]["loss"],
               "peak_gib": memory.get("taken_bytes", 0) / 2**30}


def main():
    folder, out = sys.argv[1:]
    rows = list(our_rows(folder)) + json_lines(os.path.join(folder, "pytorch.json"))
    peak = matmul_peak()
    rows.sort(key=lambda r: (ORDER.index(r["model"].partition("-")[0]), r["model"], r["program"]))
    for r in rows:
        r["tflops_megatron"], r["tflops_causal"] = (
            flops * r["tokens_per_second"] / 1e12 for flops in flops_per_token(r["model"]))
    print_columns((
        ("", -39, lambda r: r["program"]), ("model", -10, lambda r: r["model"]),
        number("batch", 5, "d", "micro_batch"), number("ms/step", 9, ".2f", "ms"),
        number("tokens/s", 11, ".0f", "tokens_per_second"), number("TFLOP/s", 9, ".1f", "tflops_megatron"),
        number("causal", 9, ".1f", "tflops_causal"),
        number("of peak", 8, ".1%", lambda r: 1e12 * r["tflops_causal"] / peak if peak else None),
        number("GiB", 8, ".1f", "peak_gib")), rows)
    write_records(out, {"what": "training speed on one GPU, sequence 2048, no dropout",
                        "command": "dev/bench/single_gpu.sh", "matmul_peak_flops": peak, "rows": rows})


if __name__ == "__main__":
    main()
