#!/usr/bin/env python3
"""Makes the table and the JSON file of dev/bench/single_gpu.sh from the JSON lines of its runs: single_gpu_table.py FOLDER OUT.json"""
import glob
import json
import os
import subprocess
import sys

SHAPES = {"125m": (12, 768), "350m": (24, 1024), "1.3b": (24, 2048), "2.7b": (32, 2560), "6.7b": (32, 4096)}
VOCABULARY, LENGTH = 50304, 2048


def flops_per_token(model):
    """Megatron's formula (whole attention) and 6N + 6*L*C*T (causal attention halved)."""
    layers, width = SHAPES[model]
    parameters = VOCABULARY * width + LENGTH * width + layers * (12 * width * width + 13 * width) + 2 * width
    megatron = 72 * layers * width**2 * (1 + LENGTH / (6 * width) + VOCABULARY / (12 * layers * width))
    return megatron, 6 * parameters + 6 * layers * width * LENGTH


def matmul_peak():
    """Measured rate of one 8192^3 bf16 product, FLOP/s, or None without PyTorch."""
    script = (
        "import torch,time\n"
        "a=torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16);b=torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16)\n"
        "for _ in range(10): a@b\n"
        "torch.cuda.synchronize();t=time.perf_counter()\n"
        "for _ in range(50): a@b\n"
        "torch.cuda.synchronize();print(50*2*8192**3/(time.perf_counter()-t))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def our_rows(folder):
    for path in sorted(glob.glob(os.path.join(folder, "*.jsonl"))):
        model, rows, mode = os.path.basename(path)[: -len(".jsonl")].rsplit(".", 2)
        records = [json.loads(line) for line in open(path)]
        intervals = [r for r in records if r["kind"] == "interval"]
        if not intervals:
            continue
        start = next(r for r in records if r["kind"] == "start")
        memory = next((r["timing"] for r in records if r["kind"] == "memory"), {})  # all that the GPU holds: plan, context, libraries
        timing = intervals[-1]["timing"]
        yield {"program": "sdp4bit.c " + mode, "model": model, "micro_batch": int(rows), "ms": timing["elapsed_ms"],
               "tokens_per_second": timing["tokens_per_second"], "commit": start["commit"], "device": start["device"], "loss": intervals[-1]["loss"],
               "peak_gib": memory.get("taken_bytes", 0) / 2**30}


def main():
    folder, out = sys.argv[1:]
    rows = list(our_rows(folder))
    peers = os.path.join(folder, "pytorch.json")
    if os.path.exists(peers):
        rows += [json.loads(line) for line in open(peers)]
    peak = matmul_peak()
    order = list(SHAPES)
    rows.sort(key=lambda r: (order.index(r["model"]), r["program"]))
    print("%-32s %-6s %5s %9s %11s %9s %9s %8s %8s" % ("", "model", "batch", "ms/step", "tokens/s", "TFLOP/s", "causal", "of peak", "GiB"))
    for r in rows:
        megatron, causal = flops_per_token(r["model"])
        r["tflops_megatron"] = megatron * r["tokens_per_second"] / 1e12
        r["tflops_causal"] = causal * r["tokens_per_second"] / 1e12
        share = "%7.1f%%" % (100e12 * r["tflops_causal"] / peak) if peak else "-"
        print("%-32s %-6s %5d %9.2f %11.0f %9.1f %9.1f %8s %8.1f" % (r["program"], r["model"], r["micro_batch"], r["ms"], r["tokens_per_second"], r["tflops_megatron"],
                                                         r["tflops_causal"], share, r["peak_gib"]))
    with open(out, "w") as file:
        json.dump({"what": "training speed on one GPU, sequence 2048, no dropout", "command": "dev/bench/single_gpu.sh", "matmul_peak_flops": peak, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
