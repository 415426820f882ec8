#!/usr/bin/env python3
"""Checks an exported PEFT folder against a model and the model with the adapters merged.

    check_peft.py MODEL ADAPTERS MERGED

All three are folders of convert_checkpoint. Keys and shapes must be PEFT's, and for every matrix
MERGED must be MODEL + lora_alpha / r * lora_B lora_A, up to the rounding of MERGED. Prints the
number of adapters. Needs only the standard library.
"""
import json
import struct
import sys


def read(path):
    """Returns {name: (shape, values)} of a safetensors file, row by row."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
        tensors[name] = (entry["shape"], struct.unpack(f"<{len(raw) // 4}f", raw), entry["dtype"])
    return tensors


def check_matrix(name, config, tensors):
    """Compares a matrix of the merged model."""
    model, adapters, merged = tensors
    stem = "base_model.model." + name[:-len(".weight")]
    (rank, columns), a, _ = adapters[stem + ".lora_A.weight"]
    (rows, other), b, _ = adapters[stem + ".lora_B.weight"]
    shape, w, _ = model[name]
    _, result, dtype = merged[name]
    turned = config["fan_in_fan_out"]
    if rank != config["r"] or other != rank or shape != ([columns, rows] if turned else [rows, columns]):
        sys.exit(f"{name}: shapes {shape}, A ({rank}, {columns}), B ({rows}, {other})")
    scale, largest = config["lora_alpha"] / rank, 0.0
    for i in range(rows):
        for j in range(columns):
            at = j * rows + i if turned else i * columns + j
            delta = sum(b[i * rank + k] * a[k * columns + j] for k in range(rank))
            wanted = w[at] + scale * delta
            allowed = abs(wanted) * (2.0 ** -8 if dtype == "BF16" else 1e-6) + 1e-6
            largest = max(largest, abs(delta))
            if abs(result[at] - wanted) > allowed:
                sys.exit(f"{name}[{i}, {j}] is {result[at]}, expected {wanted}")
    if largest == 0:
        sys.exit(f"{name}: the adapter is zero")


def main():
    model_folder, adapter_folder, merged_folder = sys.argv[1:]
    with open(adapter_folder + "/adapter_config.json", encoding="utf-8") as file:
        config = json.load(file)
    tensors = [read(f"{model_folder}/model.safetensors"), read(f"{adapter_folder}/adapter_model.safetensors"),
               read(f"{merged_folder}/model.safetensors")]
    if config["peft_type"] != "LORA" or config["bias"] != "none" or config["task_type"] != "CAUSAL_LM":
        sys.exit("adapter_config.json")
    adapted = [name for name in tensors[0] if name.endswith(".weight") and
               any(name.endswith(f".{module}.weight") for module in config["target_modules"])]
    if len(tensors[1]) != 2 * len(adapted):
        sys.exit(f"{len(tensors[1])} tensors for {len(adapted)} matrices")
    for name in tensors[0]:
        if name in adapted:
            check_matrix(name, config, tensors)
        elif tensors[0][name][1] != tensors[2][name][1]:
            sys.exit(f"{name} has no adapter but changed")
    print(len(adapted))


if __name__ == "__main__":
    main()
