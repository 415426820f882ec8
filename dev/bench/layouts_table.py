#!/usr/bin/env python3
"""Generates the table and the JSON file of dev/bench/layouts.sh from the JSON logs of its runs.

    layouts_table.py FOLDER OUT.json

Exits with 1 if no run on one GPU succeeded, because there is nothing to compare with.
"""
import glob
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import json_lines, number_column as number, print_columns, write_records

# Values that must agree with one GPU, and the relative tolerance. The last loss has a larger
# tolerance, because rounding errors grow during training.
CLOSE = (("first_loss", 0.001), ("first_norm", 0.01), ("loss", 0.01))


def newest(records, kind):
    return next((r for r in reversed(records) if r["kind"] == kind), None)


def layout_row(path):
    """Returns the row of a run, or None if it ended before its second interval."""
    records = json_lines(path)
    intervals = [r for r in records if r["kind"] == "interval"]
    if len(intervals) < 2:
        return None
    start, timing = newest(records, "start"), intervals[-1]["timing"]
    flags, timers = start["arguments"], newest(records, "timers")["timing"]
    tensor, stages = flags["tensor_model_parallel_size"], flags["pipeline_model_parallel_size"]
    memory = newest(records, "memory")["timing"]
    first = next(r for r in records if r["kind"] == "train")
    chunk = flags["num_layers_per_virtual_pipeline_stage"] or flags["num_layers"] // stages
    return {"model": os.path.basename(path).rsplit(".", 2)[0], "layers": flags["num_layers"],
            "tensor": tensor, "stages": stages, "sequence": flags["sequence_parallel"],
            "chunks": flags["num_layers"] // stages // chunk,
            "ranks": start["world_size"], "micro_batch": flags["micro_batch_size"],
            "micro_batches": flags["global_batch_size"] // flags["micro_batch_size"],
            "ms": timing["elapsed_ms"], "forward_backward_ms": timers["forward-backward"][1],
            "tokens_per_second_per_gpu": timing["tokens_per_second"] / start["world_size"],
            "peak_gib": memory["taken_bytes"] / 2**30, "loss": intervals[-1]["loss"],
            "first_loss": first["loss"], "first_norm": first["grad_norm"],
            "commit": start["commit"], "device": start["device"], "libraries": start["libraries"]}


def add_bound(row, alone):
    """Adds the bound: the work of one GPU divided evenly, plus the idle time of the pipeline, which is
    shorter if stages have several chunks."""
    count = row["micro_batches"]
    idle = (count + (row["stages"] - 1) / row["chunks"]) / count
    rest = alone["ms"] - alone["forward_backward_ms"]
    row["bound_ms"] = (alone["forward_backward_ms"] * idle + rest) / row["ranks"]
    row["of_bound"] = row["bound_ms"] / row["ms"]
    row["speedup"] = alone["ms"] / row["ms"]


def pytorch_rows(path):
    """Returns the rows of pytorch_layouts.py, with the speedup over one GPU."""
    rows = json_lines(path)
    alone = {r["model"]: r["ms"] for r in rows if r["tensor"] == 1}
    return [{**r, "speedup": alone[r["model"]] / r["ms"]} for r in rows if r["model"] in alone]


def main():
    folder, out = sys.argv[1:]
    rows = list(filter(None, map(layout_row, glob.glob(os.path.join(folder, "*.jsonl")))))
    alone = {r["model"]: r for r in rows if r["ranks"] == 1}
    rows = [r for r in rows if r["model"] in alone]
    rows.sort(key=lambda r: (r["model"], r["ranks"], r["stages"], r["chunks"], r["sequence"]))
    if not rows:
        sys.exit("error: no run on one GPU succeeded; see the messages above")
    for row in rows:
        add_bound(row, alone[row["model"]])
    peers = pytorch_rows(os.path.join(folder, "pytorch.json"))
    print_columns((
        ("model", -8, lambda r: r["model"]), number("layers", 6, "d", "layers"),
        number("T", 3, "d", "tensor"), number("P", 3, "d", "stages"),
        number("chunks", 6, "d", "chunks"),
        ("seq", 4, lambda r: "yes" if r["sequence"] else "no"),
        number("ms/step", 10, ".2f", "ms"), number("tokens/s/GPU", 13, ".0f", "tokens_per_second_per_gpu"),
        number("x one GPU", 10, ".2f", "speedup"), number("bound ms", 10, ".2f", "bound_ms"),
        number("of bound", 9, ".1%", "of_bound"), number("GiB", 6, ".1f", "peak_gib"),
        number("loss", 8, ".4f", "loss")), rows)
    for row in rows:
        for name, apart in CLOSE:
            if abs(row[name] / alone[row["model"]][name] - 1) > apart:
                print(f"warning: {row['model']}, T {row['tensor']}, P {row['stages']}: "
                      f"{name} differs from one GPU")
    if peers:
        print_columns((
            ("PyTorch", -8, lambda r: r["model"]), number("layers", 6, "d", "layers"),
            number("T", 3, "d", "tensor"), ("seq", 4, lambda r: "yes" if r["sequence"] else "no"),
            number("ms/step", 10, ".2f", "ms"), number("x one GPU", 10, ".2f", "speedup"),
            number("GiB", 6, ".1f", "peak_gib"), number("loss", 8, ".4f", "loss")), peers)
    write_records(out, {"what": "training steps with tensor and pipeline parallelism in one node",
                        "command": os.environ.get("COMMAND_LINE", "dev/bench/layouts.sh"),
                        "bound": "(forward and backward of one GPU * (m + (P - 1) / chunks) / m + the rest) "
                                 "/ (T * P)",
                        "rows": rows, **({"pytorch_rows": peers} if peers else {})})


if __name__ == "__main__":
    main()
