#!/usr/bin/env python3
"""Makes the table and the JSON file of dev/bench/save.sh from its runs.

    save_table.py stamp FILE < OUTPUT        writes lines "SECONDS LINE": when each line came
    save_table.py table LOGS OUT.json MODEL ITERS INTERVAL WAYS

A step's time is that between two lines of iterations: the trainer's own figure leaves saves out.
Columns:
  step      median ms of the steps that do not follow a save closely; the first five are left out
  begins    ms from the line "saving" until training goes on. A save in the foreground is complete
            then
  after     ms of the step after a save, `begins` included; then of the second and the third step.
            The copies into host memory run beside the first of them. Its update waits for their end
  excess %  after over the median step of the run without saves
  lost      all that a save costs: ms by which all steps until the next save exceed that median
  waits     ms that a save waited for the one before. It is in no other column
  complete  seconds from "saving" until the checkpoint is on the disk and the tracker names it. A
            save in the background is looked after once per step

Each figure is the largest of all saves. Saves that waited for the one before are left out of the
columns on steps: behind a wait the saved step's update has ended, and the next step looks too
short.
"""
import os
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import cell, json_lines, print_columns, write_records

FIRST = 5  # steps that are left out
NEAR = 3   # steps that follow a save closely
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
    """{kind: {iteration: seconds}} of a run."""
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
    """Seconds that a save waited for the one before it."""
    earlier = [seconds for other, seconds in s["saved"].items() if other < save]
    return max(0.0, max(earlier) - s["iteration"][save]) if earlier else 0.0


def steps(s):
    """{iteration: ms}, without waits for a save before."""
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
        sys.exit("error: the run %s has not all its lines: iterations %s missing, saves %s" %
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
    """The saves behind which steps are looked at."""
    return [save for save in row.get("saves", []) if save["after_ms"] and not save["waits_ms"]]


def largest(name, width, form, get, saves=lambda row: row.get("saves", [])):
    """A column of the largest figure of a row's saves; get(save): None where it has none."""
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
        print("the step after a save in the background: %+.1f %% at most; the aim of 5 %% is %s" %
              (max(excess), "met" if max(excess) <= 5 else "missed"))
    late = sum(1 for row in rows for save in row.get("saves", []) if save["waits_ms"] and save["after_ms"])
    if late:
        print("%d saves waited for the one before and are left out of the columns on steps;\n"
              "a larger --save-interval lets them count" % late)
    print("All in ms but where the column says else. dev/bench/save_table.py explains the columns.\n"
          "One save of each run is at its end: no step follows it.")


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
        write_records(out, {"what": "what saving costs", "command": command, "model": model,
                            "save_interval": int(interval), "rows": rows})
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
