#!/usr/bin/env python3
"""Generates the table and the JSON file of dev/bench/save.sh from its runs.

    save_table.py stamp FILE < OUTPUT
        copies OUTPUT to FILE and puts the arrival time in seconds before each line
    save_table.py table LOGS OUT.json MODEL ITERS INTERVAL WAYS
        writes the table

Step times are the intervals between the log lines of iterations, because the trainer's own times
exclude saves. Columns:
  step      median ms of steps that are not near a save, without the first five
  begins    ms from the log line "saving" until training continues. A blocking save is complete by then
  after     ms of the step after a save, including `begins`, then of the second and the third step. In
            the first of them, copies to host memory overlap with compute, and the update waits for them
  excess %  increase of `after` over the median step of the run without saves
  lost      total cost of a save in ms: sum of the increases of all steps until the next save
  waits     ms that a save waited for the previous one; the other columns do not include them
  complete  seconds from "saving" until the checkpoint is on disk and named in the tracker file. The
            trainer polls background saves once per step

Each figure is the maximum over all saves. The step columns exclude saves that waited for the previous
save, because the update of the saved step finishes in that time, so the next step appears too short.
"""
import os
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import cell, json_lines, print_columns, write_records

FIRST = 5  # warm-up steps, which are excluded
NEAR = 3   # steps after a save that may be affected by it
PATTERNS = {
    "iteration": re.compile(r" iteration +(\d+)/"),
    "saving": re.compile(r"^saving checkpoint at iteration +(\d+) "),
    "scheduled": re.compile(r"scheduled an async checkpoint save at iteration +(\d+) "),
    "saved": re.compile(r"successfully saved checkpoint at iteration +(\d+) "),
}


def stamp(path):
    with open(path, "w") as file:
        for line in iter(sys.stdin.readline, ""):
            file.write("%.6f %s" % (time.monotonic(), line))
            file.flush()


def stamps(path):
    """Returns {kind of log line: {iteration: seconds}} for a run."""
    found = {kind: {} for kind in PATTERNS}
    with open(path) as file:
        for line in file:
            seconds, text = line.split(" ", 1)
            for kind, pattern in PATTERNS.items():
                match = pattern.search(text)
                if match:
                    found[kind].setdefault(int(match.group(1)), float(seconds))
    return found


def waited(s, save):
    """Returns the seconds that a save waited for the previous one."""
    earlier = [seconds for other, seconds in s["saved"].items() if other < save]
    return max(0.0, max(earlier) - s["iteration"][save]) if earlier else 0.0


def steps(s):
    """Returns {iteration: ms}, without waits for earlier saves."""
    line = s["iteration"]
    wait = lambda i: waited(s, i) if i in s["saving"] else 0.0
    return {i: 1e3 * (line[i] - line[i - 1] - wait(i - 1)) for i in line if i - 1 in line}


def one_save(s, took, save, interval, base):
    begun = s["scheduled"].get(save, s["saved"][save])
    after = [took[save + k] for k in range(1, NEAR + 1) if save + k in took]
    r = {"iteration": save, "begins_ms": 1e3 * (begun - s["saving"][save]), "waits_ms": 1e3 * waited(s, save),
         "complete_s": s["saved"][save] - s["saving"][save], "after_ms": after}
    if after and base and not r["waits_ms"]:
        r["excess_percent"] = 100 * (after[0] / base - 1)
        r["lost_ms"] = sum(took[i] - base for i in range(save + 1, save + interval + 1) if i in took)
    return r


def run_row(logs, way, iters, interval, base):
    s = stamps(os.path.join(logs, way + ".lines"))
    took = steps(s)
    missing = [i for i in range(1, iters + 1) if i not in s["iteration"]]
    wanted = [] if way == "none" else list(range(interval, iters + 1, interval))
    if missing or sorted(s["saved"]) != wanted or sorted(s["saving"]) != wanted:
        sys.exit("error: the log of the run %s is incomplete: iterations %s missing, saves %s" %
                 (way, missing[:3], sorted(s["saved"])))
    calm = [ms for i, ms in took.items() if i > FIRST and not any(0 < i - save <= NEAR for save in wanted)]
    row = {"way": way, "step_ms": statistics.median(calm), "steps_measured": len(calm)}
    start = next(r for r in json_lines(os.path.join(logs, way + ".jsonl")) if r["kind"] == "start")
    row.update({"commit": start["commit"], "device": start["device"], "ranks": start["world_size"],
                "parameters": start["parameters"]})
    if wanted:
        row["saves"] = [one_save(s, took, save, interval, base) for save in wanted]
        with open(os.path.join(logs, way + ".sizes")) as file:
            sizes = dict(line.split() for line in file)
        row.update({"bytes": int(sizes["bytes"]), "filesystem": sizes["filesystem"],
                    "pinned_bytes_per_rank": int(sizes["pinned"])})
    return row


def counted(row):
    """Returns the saves whose following steps are included in the step columns."""
    return [save for save in row.get("saves", []) if save["after_ms"] and not save["waits_ms"]]


def largest(name, width, form, get, saves=lambda row: row.get("saves", [])):
    """Returns a column with the maximum over the saves of a row. get(save) may return None."""
    figures = lambda row: [v for v in map(get, saves(row)) if v is not None]
    return name, width, lambda row: cell(max(figures(row), default=None), form)


def print_rows(rows):
    after = lambda k: lambda save: save["after_ms"][k] if len(save["after_ms"]) > k else None
    gigabytes = lambda name, width, key: (
        name, width, lambda row: cell(row[key] / 1e9 if key in row else None, ".3f"))
    print_columns((
        ("saves", -6, lambda row: row["way"]), ("step", 9, lambda row: cell(row["step_ms"], ".1f")),
        largest("begins", 9, ".1f", lambda save: save["begins_ms"]),
        largest("after", 9, ".1f", after(0), counted), largest("second", 9, ".1f", after(1), counted),
        largest("third", 9, ".1f", after(2), counted),
        largest("excess %", 9, ".1f", lambda save: save.get("excess_percent"), counted),
        largest("lost", 9, ".1f", lambda save: save.get("lost_ms"), counted),
        largest("waits", 9, ".1f", lambda save: save["waits_ms"]),
        largest("complete s", 10, ".2f", lambda save: save["complete_s"]),
        gigabytes("GB", 8, "bytes"), gigabytes("pinned GB/rank", 14, "pinned_bytes_per_rank")), rows)
    excess = [save["excess_percent"] for row in rows if row["way"] == "async" for save in counted(row)
              if "excess_percent" in save]
    if excess:
        print("the step after a background save: at most %+.1f %%; the target of 5 %% is %s" %
              (max(excess), "met" if max(excess) <= 5 else "missed"))
    late = sum(1 for row in rows for save in row.get("saves", []) if save["waits_ms"] and save["after_ms"])
    if late:
        print("%d saves waited for the previous one and are excluded from the step columns;\n"
              "increase --save-interval to include them" % late)
    print("In ms unless noted. dev/bench/save_table.py describes the columns.\n"
          "The last save of each run is not followed by a step.")


def main():
    if sys.argv[1:2] == ["stamp"] and len(sys.argv) == 3:
        stamp(sys.argv[2])
    elif sys.argv[1:2] == ["table"] and len(sys.argv) == 8:
        logs, out, model, iters, interval, ways = sys.argv[2:]
        rows, base = [], None
        for way in sorted(ways.split(), key=("none", "async", "sync").index):
            rows.append(run_row(logs, way, int(iters), int(interval), base))
            base = rows[0]["step_ms"] if rows[0]["way"] == "none" else None
        print_rows(rows)
        command = os.environ.get("COMMAND_LINE", "dev/bench/save.sh")
        write_records(out, {"what": "cost of checkpoint saves", "command": command, "model": model,
                            "save_interval": int(interval), "rows": rows})
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
