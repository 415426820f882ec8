#!/usr/bin/env bash
# Tests how dev/bench/elastic_trial.py computes waits from the times of steps and rounds.
set -u
cd "$(dirname "$0")/../../.." || exit 1
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench python3 - <<'END'
from elastic_trial import Process, blocked, waits

failures = 0


def same(name, got, wanted):
    global failures
    close = abs(got - wanted) < 1e-6
    print("ok " + name if close else f"not ok {name}: {got} instead of {wanted}")
    failures += not close


def process(steps, rounds, done=True):
    made = Process()
    made.steps, made.rounds, made.done = steps, rounds, done
    return made


# A step per second, so that two steps take 2 s. Failures: (start, end, kind, name).
STEPS = [float(t) for t in range(101)]
ROUNDS = STEPS[2:99:2]
without = lambda low, high: [t for t in ROUNDS if not low < t < high]
longest = lambda group, failed=(): max(gap[0] for gap in waits({"one": [group]}, failed, 2))
same("rounds every two steps", longest(process(STEPS, ROUNDS)), 0)
same("a wait for another group", longest(process(STEPS, without(40, 50)), [(40, 45, "freeze", "two")]), 8)
same("a group's own failure", longest(process(STEPS, without(40, 50)), [(40, 45, "freeze", "one")]), 0)
restart = [(41, 42, "restart", "rendezvous")]
same("a restart of the rendezvous", longest(process(STEPS, without(40, 50)), restart), 8)
same("no round before the end", longest(process(STEPS, without(40, 101), done=False)), 58)
same("no round after the start", longest(process(STEPS, without(0, 20))), 18)

gap = [t for t in STEPS if not 60 < t < 67]
same("an interruption of training", blocked({"one": [process(gap, ROUNDS)]}, restart), 7)
raise SystemExit(failures > 0)
END
