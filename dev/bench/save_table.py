#!/usr/bin/env python3
"""Stamps the lines of dev/bench/save.sh's runs with the time at which they come, and makes its table and JSON file of them.

    save_table.py stamp FILE < OUTPUT                     lines "SECONDS LINE"
    save_table.py table LOGS OUT.json MODEL ITERS INTERVAL WAYS

A step's time is that between two lines of iterations: the trainer's own figure leaves saves out. Columns:
  step     median ms of the steps that do not follow a save closely (the first five are left out)
  begins   ms from the line "saving" until training goes on; a save in the foreground is complete then
  after    ms of the step after a save, `begins` included; then the second and the third. The copies into host memory run beside the first of them, whose
           update waits for their end. The largest of all saves that did not wait for the one before: behind a wait the update of the step that is saved has
           ended, and the step looks shorter than it is
  excess   after over the median step of the run without saves, in %
  lost     ms by which all steps from a save until the next are longer than that run's median: all that a save costs
  waits    ms that a save waited for the one before, which would be too soon in training; the largest. It is in no other column
  complete seconds from "saving" until the checkpoint is on the disk and the tracker names it; a save in the background is looked after once per step
"""
import json
import os
import re
import statistics
import sys
import time

FIRST = 5  # steps that are left out
NEAR = 3   # steps that follow a save closely
ITERATION = re.compile(r" iteration +(\d+)/")
SAVING = re.compile(r"^saving checkpoint at iteration +(\d+) ")
SCHEDULED = re.compile(r"scheduled an async checkpoint save at iteration +(\d+) ")
SAVED = re.compile(r"successfully saved checkpoint at iteration +(\d+) ")


def stamp(path):
    with open(path, "w") as file:
        for line in iter(sys.stdin.readline, ""):
            file.write("%.6f %s" % (time.monotonic(), line))
            file.flush()


def stamps(path):
    """{kind: {iteration: seconds}} of a run."""
    found = {kind: {} for kind in ("iteration", "saving", "scheduled", "saved")}
    with open(path) as file:
        for line in file:
            seconds, text = line.split(" ", 1)
            for kind, pattern in (("iteration", ITERATION), ("saving", SAVING), ("scheduled", SCHEDULED), ("saved", SAVED)):
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
    return {i: 1e3 * (line[i] - line[i - 1] - (waited(s, i - 1) if i - 1 in s["saving"] else 0.0)) for i in line if i - 1 in line}


def one_save(s, took, save, interval, base):
    begun = s["scheduled"].get(save, s["saved"][save])
    after = [took[save + k] for k in range(1, NEAR + 1) if save + k in took]
    r = {"iteration": save, "begins_ms": 1e3 * (begun - s["saving"][save]), "waits_ms": 1e3 * waited(s, save), "complete_s": s["saved"][save] - s["saving"][save], "after_ms": after}
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
        sys.exit("error: the run %s has not all its lines: iterations %s missing, saves %s" % (way, missing[:3], sorted(s["saved"])))
    calm = [ms for i, ms in took.items() if i > FIRST and not any(0 < i - save <= NEAR for save in wanted)]
    row = {"way": way, "step_ms": statistics.median(calm), "steps_measured": len(calm)}
    with open(os.path.join(logs, way + ".jsonl")) as file:
        start = next(r for r in map(json.loads, file) if r["kind"] == "start")
    row.update({"commit": start["commit"], "device": start["device"], "ranks": start["world_size"], "parameters": start["parameters"]})
    if wanted:
        row["saves"] = [one_save(s, took, save, interval, base) for save in wanted]
        with open(os.path.join(logs, way + ".sizes")) as file:
            sizes = dict(line.split() for line in file)
        row.update({"bytes": int(sizes["bytes"]), "filesystem": sizes["filesystem"], "pinned_bytes_per_rank": int(sizes["pinned"])})
    return row


def show(value, form):
    return "-" if value is None else format(value, form)


def print_rows(rows):
    print("%-6s %9s %9s %9s %9s %9s %9s %9s %9s %10s %8s %14s" %
          ("saves", "step", "begins", "after", "second", "third", "excess %", "lost", "waits", "complete s", "GB", "pinned GB/rank"))
    for r in rows:
        saves = r.get("saves", [])
        followed = [x for x in saves if x["after_ms"] and not x["waits_ms"]]
        most = lambda name, among: max((x[name] for x in among if name in x), default=None)
        near = [max((x["after_ms"][k] for x in followed if len(x["after_ms"]) > k), default=None) for k in range(NEAR)]
        cells = [r["step_ms"], most("begins_ms", saves), *near, most("excess_percent", followed), most("lost_ms", followed), most("waits_ms", saves), most("complete_s", saves)]
        print("%-6s " % r["way"] + " ".join("%9s" % show(v, ".1f") for v in cells[:-1]) + " %10s %8s %14s" %
              (show(cells[-1], ".2f"), show(r["bytes"] / 1e9 if saves else None, ".3f"), show(r["pinned_bytes_per_rank"] / 1e9 if saves else None, ".3f")))
    worst = next((x for r in rows if r["way"] == "async" for x in [[s["excess_percent"] for s in r["saves"] if "excess_percent" in s]] if x), None)
    if worst:
        print("the step after a save in the background: %+.1f %% at most; the aim of 5 %% is %s" % (max(worst), "met" if max(worst) <= 5 else "missed"))
    late = sum(1 for r in rows for x in r.get("saves", []) if x["waits_ms"] and x["after_ms"])
    if late:
        print("%d saves waited for the one before and are left out of the columns on steps; a larger --save-interval lets them count" % late)
    print("ms where nothing else is said; the columns are told in dev/bench/save_table.py. One save of each run is at its end: no step follows it")


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
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        with open(out, "w") as file:
            json.dump({"what": "what saving costs", "command": os.environ.get("COMMAND_LINE", "dev/bench/save.sh"), "model": model, "save_interval": int(interval), "rows": rows}, file, indent=1)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
