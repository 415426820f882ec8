#!/usr/bin/env python3
"""Generates the table and the JSON file of dev/bench/elastic_overhead.sh from the JSON logs of its runs.

    elastic_overhead.py FOLDER OUT.json
"""
import glob
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import json_lines, number_column as number, print_columns, write_records


def step_ms(path):
    """Returns the median time of a step over all intervals but the first."""
    intervals = [r for r in json_lines(path) if r["kind"] == "interval"]
    return statistics.median(r["timing"]["elapsed_ms"] for r in intervals[1:])


def main():
    folder, out = sys.argv[1:]
    rows = []
    logs = [p for p in glob.glob(os.path.join(folder, "mpi.*")) if not p.endswith(".out")]
    for path in sorted(logs, key=lambda p: int(p.rsplit(".", 1)[1])):
        repetition = int(path.rsplit(".", 1)[1])
        groups = [step_ms(os.path.join(folder, f"groups.{repetition}.{name}")) for name in ("one", "two")]
        rows.append({"repetition": repetition, "mpi_ms": step_ms(path), "groups_ms": max(groups)})
    start = next(r for r in json_lines(logs[0]) if r["kind"] == "start")
    medians = {name: statistics.median(r[name] for r in rows) for name in ("mpi_ms", "groups_ms")}
    overhead = medians["groups_ms"] / medians["mpi_ms"] - 1
    print_columns((number("repetition", 10, "d", "repetition"), number("MPI, ms/step", 13, ".2f", "mpi_ms"),
                   number("groups, ms/step", 16, ".2f", "groups_ms")), rows)
    print(f"medians {medians['mpi_ms']:.2f} and {medians['groups_ms']:.2f} ms: overhead {100 * overhead:+.1f} %")
    write_records(out, {
        "what": "time of a step of two groups of one CPU rank with local steps: one MPI job of two nodes, and two "
                "replica groups (the slower one). Medians over intervals of H steps",
        "command": os.environ.get("COMMAND_LINE", "dev/bench/elastic_overhead.sh"),
        "commit": start["commit"], "device": start["device"], "libraries": start["libraries"],
        "local_steps": start["arguments"]["local_steps"], "parameters": start["parameters"],
        "overhead": overhead, "rows": rows})


if __name__ == "__main__":
    main()
