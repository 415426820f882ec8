#!/usr/bin/env python3
"""Generates the table and the JSON file of dev/bench/elastic_trial.sh from its logs.

    elastic_trial.py LOGS OUT.json LOCAL_STEPS GRACE MBIT RTT MINUTES CPUS

Rows are the disturbed run `trial` and the undisturbed runs `seedN`. Columns:
  groups     number of processes that have trained: 4, and one more for every restart
  goodput %  tokens that have counted, as a share of all tokens computed, as the groups report it.
             A process that was killed reports it for the last time before the step in which it died
  recount %  the same, computed from the iterations that the logs contain: each chunk of parameters
             has counted up to the step of its last offer
  wait s     longest wait for a round, beyond the compute time of --local-steps steps, of a group that
             was not disturbed itself, while the rendezvous restarts, too. Groups train meanwhile.
             Includes delays because other programs used the CPU
  restart s  the same, only of waits that end within 20 s of a restart of the rendezvous
  blocked s  longest interruption of training in such a group, apart from evaluations and saves
  differ     reports of different hashes of the outer weights
  loss       validation loss at the end, and tokens that have counted then

Losses are compared at equal tokens: `expected` is the loss of each undisturbed run, interpolated at
the tokens of `trial`.
"""
import bisect
import glob
import math
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import cell, number_column, print_columns, write_records

SETTLE = 20.0  # seconds after a failure in which a group rejoins
ITERATION = re.compile(r" iteration +(\d+)/")
FIGURES = re.compile(r"replica groups: (\d+) present \| (\d+) chunk syncs, (\d+) with this group \| "
                     r"sync time [\d.]+ s, ([\d.]+) steps .* goodput ([\d.]+) %")
VALIDATION = re.compile(r"validation loss at iteration (\d+) (?!on test).*lm loss value: ([\d.E+-]+)")
OWN_WORK = re.compile(r"validation loss|save-checkpoint|saving checkpoint|test set")
JOINED = re.compile(r"joined the run at ")


class Process:
    """What a process of a group has logged from joining until its end."""

    def __init__(self):
        self.steps = []   # times
        self.rounds = []  # times of lines with closed rounds
        self.own = []     # (steps at the time, steps of staleness) of own contributions
        self.pauses = []  # times of evaluations and saves
        self.losses = []  # (time, validation loss)
        self.goodput = 0.0
        self.done = False  # has reached the last sync
        self.chunks = 0    # in the last sync, which has at least one round of each chunk


def processes(path):
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            stamp, _, text = line.rstrip("\n").partition(" ")
            if JOINED.search(text):
                found.append(Process())
            if not found or not re.fullmatch(r"[\d.]+", stamp):
                continue
            p, seconds = found[-1], float(stamp)
            figures, loss = FIGURES.search(text), VALIDATION.search(text)
            if ITERATION.match(text):
                p.steps.append(seconds)
            elif "after training is done" in text:
                p.done = True
            elif figures:
                if figures.group(2) != "0" and not p.done:
                    p.rounds.append(seconds)
                p.own += [(len(p.steps) + 1, float(figures.group(4)))] * int(figures.group(3))
                p.goodput = float(figures.group(5)) / 100
                if p.done:
                    p.chunks = int(figures.group(3))
            elif OWN_WORK.search(text):
                p.pauses.append(seconds)
            if loss:
                p.losses.append((seconds, float(loss.group(2))))
    return found


def failures(logs):
    """Returns (start, end, kind, name) of all failures, with the time to rejoin."""
    found, begun = [], {}
    path = os.path.join(logs, "trial.events")
    for line in open(path, encoding="utf-8") if os.path.exists(path) else ():
        seconds, *words = line.split()
        if words[0] == "end":
            found.append((begun.pop(tuple(words[1:3])), float(seconds), *words[1:3]))
        else:
            begun[tuple(words[:2])] = float(seconds)
    return found + [(start, start, *key) for key, start in begun.items()]


def recount(process, chunks):
    """Returns the steps of a process that have counted, as a mean over the chunks."""
    last = process.own[-chunks:]
    return sum(step - stale for step, stale in last) / chunks if last else 0.0


def pauses_in(process, start, end):
    """Returns the seconds of [start, end] that a group evaluated or saved."""
    steps, total = process.steps, 0.0
    for i in range(max(1, bisect.bisect(steps, start)), min(len(steps) - 1, bisect.bisect(steps, end)) + 1):
        if bisect.bisect(process.pauses, steps[i - 1]) < bisect.bisect(process.pauses, steps[i]):
            total += steps[i] - steps[i - 1]
    return total


def waits(groups, disturbed, local_steps):
    """Returns (seconds, end, group) of the gaps between rounds beyond the compute time. A process that
    has not reached the end of the run waits until its last step."""
    found = []
    for name, all_processes in groups.items():
        own = [(start, end + SETTLE) for start, end, kind, who in disturbed if who == name and kind != "slow"]
        for p in all_processes:
            if len(p.steps) < 2:
                continue
            compute = local_steps * statistics.median(b - a for a, b in zip(p.steps, p.steps[1:]))
            rounds = [p.steps[0], *p.rounds, *([] if p.done else p.steps[-1:])]
            for a, b in zip(rounds, rounds[1:]):
                if not any(start < b and a < end for start, end in own):
                    found.append((max(0.0, b - a - compute - pauses_in(p, a, b)), b, name))
    return found


def blocked(groups, disturbed):
    found = [0.0]
    for name, all_processes in groups.items():
        own = [(start, end + SETTLE) for start, end, kind, who in disturbed if who == name and kind != "slow"]
        for p in all_processes:
            for a, b in zip(p.steps, p.steps[1:]):
                if not any(start < b and a < end for start, end in own):
                    found.append(b - a - pauses_in(p, a, b))
    return max(found)


def loss_curve(groups, share):
    """Returns [(steps of all groups that have counted, validation loss)]. share: goodput.

    The k-th last evaluation of each group is one point, a mean over the groups."""
    steps = sorted(t for group in groups.values() for p in group for t in p.steps)
    last = [group[-1].losses[::-1] for group in groups.values()]
    curve = []
    for k in range(min(len(losses) for losses in last)):
        times, values = zip(*(losses[k] for losses in last))
        done = statistics.mean(bisect.bisect(steps, seconds) for seconds in times)
        curve.append((share * done, statistics.mean(values)))
    return sorted(curve)


def interpolate(curve, x):
    """Returns the loss at x, linear in the logarithm of the steps; beyond the ends, of the last interval."""
    i = min(max(bisect.bisect([a for a, _ in curve], x), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)


def run_row(logs, run, local_steps):
    paths = sorted(glob.glob(os.path.join(logs, run + ".*.lines")))
    groups = {os.path.basename(path).split(".")[1]: processes(path) for path in paths}
    every = [p for group in groups.values() for p in group if p.steps]
    disturbed = failures(logs) if run == "trial" else []
    computed = sum(len(p.steps) for p in every)
    chunks = min((p.chunks for p in every if p.chunks), default=1)
    gaps = waits(groups, disturbed, local_steps)
    longest = lambda some: max((gap[0] for gap in some), default=0.0)
    servers = [(start, end + SETTLE) for start, end, kind, _ in disturbed if kind == "restart"]
    away = lambda gap: any(start < gap[1] < end for start, end in servers)
    share = sum(p.goodput * len(p.steps) for p in every) / computed
    curve = loss_curve(groups, share)
    text = "".join(open(path, encoding="utf-8", errors="replace").read() for path in paths)
    return {"run": run, "processes": len(every), "steps": computed, "goodput": share,
            "recount": sum(recount(p, chunks) for p in every) / computed, "chunks": chunks,
            "rounds": sum(len(p.own) for p in every),
            "longest_wait_s": longest(gaps),
            "longest_wait_rendezvous_s": longest(filter(away, gaps)) if servers else None,
            "blocked_s": blocked(groups, disturbed),
            "different_hashes": len(re.findall(r"hash(?:es)? .*differ", text)),
            "loss": curve[-1][1], "counted_steps": curve[-1][0], "curve": curve,
            "failures": [f"{kind} {name} {end - start:.0f} s"
                         for start, end, kind, name in sorted(disturbed)]}


def main(logs, out, local_steps, grace, mbit, rtt, minutes, cpus):
    names = sorted({os.path.basename(p).split(".")[0] for p in glob.glob(os.path.join(logs, "*.lines"))})
    rows = [run_row(logs, run, int(local_steps)) for run in ["trial"] + [n for n in names if n != "trial"]]
    trial, others = rows[0], rows[1:]
    for row in others:
        row["expected"] = interpolate(row["curve"], trial["counted_steps"])
    percent = lambda key: lambda row: 100 * row[key]
    print_columns((
        ("run", -6, lambda row: row["run"]), number_column("groups", 6, "d", "processes"),
        number_column("steps", 7, "d", "steps"), number_column("goodput %", 10, ".1f", percent("goodput")),
        number_column("recount %", 10, ".1f", percent("recount")),
        number_column("wait s", 8, ".2f", "longest_wait_s"),
        number_column("restart s", 10, ".2f", "longest_wait_rendezvous_s"),
        number_column("blocked s", 10, ".2f", "blocked_s"),
        number_column("differ", 7, "d", "different_hashes"),
        number_column("loss", 8, ".4f", "loss"), number_column("expected", 9, ".4f", "expected")), rows)
    target = lambda text, met: print("%s: %s" % (text, "met" if met else "missed"))
    target("goodput at least 88 %", min(trial["goodput"], trial["recount"]) >= 0.88)
    target("waits of at most one grace period of %s s" % grace, trial["longest_wait_s"] <= float(grace))
    target("training blocked for at most one grace period", trial["blocked_s"] <= float(grace))
    target("equal hashes", all(row["different_hashes"] == 0 for row in rows))
    expected = [row["expected"] for row in others]
    if expected:
        noise = max(expected) - min(expected)
        print("loss %+.4f over the mean of the undisturbed runs, which differ by %.4f" %
              (trial["loss"] - statistics.mean(expected), noise))
    write_records(out, {
        "what": "elastic replica groups with failures", "command": os.environ["COMMAND_LINE"],
        "commit": os.environ["COMMIT"], "local_steps": int(local_steps), "grace_s": float(grace),
        "mbit": float(mbit), "rtt_ms": float(rtt), "minutes": float(minutes),
        "cores_per_group": float(cpus), "rows": rows})


if __name__ == "__main__":
    main(*sys.argv[1:])
