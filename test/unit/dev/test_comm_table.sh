#!/usr/bin/env bash
# Tables of dev/bench/comm.sh (dev/bench/comm_table.py), made from synthetic logs: number of
# measured steps, selection of runs, and memory.
set -u
cd "$(dirname "$0")/../../.." || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench:dev python3 - "$folder" <<'END'
import contextlib, io, json, os, sys
import comm_table as table

logs, failures = sys.argv[1], 0


def same(name, got, wanted):
    global failures
    print("ok " + name if got == wanted else f"not ok {name}: {got} instead of {wanted}")
    failures += got != wanted


def write(path, *made):
    os.makedirs(os.path.dirname(os.path.join(logs, path)), exist_ok=True)
    with open(os.path.join(logs, path), "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in made)


def printed(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*arguments)
    return out.getvalue()


# --- steps of an interval ---
for seconds, most, *wanted in (
        (0.05, 4, 4, 20), (0.01, 4, 4, 30), (0.12, 4, 4, 8), (0.26, 4, 4, 4), (0.6, 4, 4, 4), (0.9, 4, 3, 3),
        (2, 4, 2, 2), (9, 4, 2, 2), (0.05, 40, 40, 40), (0.5, 40, 6, 6), (0.3, 1, 2, 3), (2, 1, 2, 2)):
    got = [table.fewest_steps(seconds, most), table.full_steps(seconds, most)]
    same(f"steps of {seconds} s, --iters {most}", got, wanted)
same("an interval of local steps contains all outer syncs",
     [table.fewest_steps(1.2, 30, preset) for preset in ("sdp4bit", "local", "local+sums")], [2, 30, 30])
same("an interval of local steps has at most --iters steps", table.fewest_steps(1.2, 4, "local"), 4)


def synced(preset, megabytes, **more):
    bucket = {"grad_node": 1e6 * megabytes, "grad_rail": 0, "weight_rail": 0, "weight_node": 0,
              "first": 0, "end": 3, "elements": 1}
    return {"kind": "arm", "arm": preset, "nodes": 1, "per_node": 4, "parameters": 1000,
            "memory": {"weights": 2000, "gradients": 4000}, "buckets": [bucket], **more}


def start(**more):
    return {"kind": "start", "world_size": 4, "nodes": 1, "commit": "c", "device": "d", "parameters": 1000,
            "arguments": {"emulate_nodes": False, "num_layers": 4}, **more}


def interval(ms, iterations=4, sent=0):
    timing = {"elapsed_ms": ms, "tokens_per_second": 1.0, "tflops_per_gpu": 1.0,
              "exposed_gradients_ms": 0.0, "exposed_weights_ms": 0.0, "exposed_most_ms": 0.0}
    return {"kind": "interval", "iterations": iterations, "inter_node_bytes": sent, "intra_node_bytes": 0,
            "loss": 1.0, "timing": timing}


def timers(forward, backward):
    return {"kind": "timers", "timing": {"forward-compute": [0, forward], "backward-compute": [0, backward],
                                         "optimizer-inner-step": [0, 1.0]}}


def bandwidth(rate):
    return {"kind": "plain", "device": "d", "commit": "c", **{name: rate for name in table.PLAIN.values()}}


write("sync/m/inside.jsonl", bandwidth(1.0), synced("fp32", 0), synced("bf16", 0))  # a megabyte takes 1 ms
# The compute time of a step is 4 x (2 + 4.5) + 2 + 2 = 30 ms.
for name, layers, forward, backward in (("full-1", 4, 13, 25), ("full-2", 4, 23, 45), ("half-1", 2, 8, 13),
                                        ("half-2", 2, 14, 24)):
    run = start(arguments={"num_layers": layers})
    write(f"one/m/1/{name}.jsonl", run, timers(99, 99), timers(forward, backward))
plan = lambda left: table.plan_steps(logs, "m", "1", "inside", left, 1.0, 4, ["fp32", "bf16", "qwd"])[0]
computing = table.compute_ms(table.one_rank(logs, "m", "1"))
short = 2 * 4 * computing / 1e3
many = min(30, int(1e3 / computing))
same("short steps run for a second", plan(100), [("fp32", many), ("bf16", many), ("qwd", 0)])
same("longer intervals do not displace presets", plan(2 * (1 + short) + 0.001),
     [("fp32", 4), ("bf16", 4), ("qwd", 0)])
longer = 2 * (many - 4) * computing / 1e3
same("the first preset gets the remaining time", plan(2 * (1 + short) + longer + 0.001),
     [("fp32", many), ("bf16", 4), ("qwd", 0)])
same("a preset that does not fit is skipped", plan(1 + short + 0.001),
     [("fp32", 4), ("bf16", 0), ("qwd", 0)])
write("one/m/1/half-2.jsonl", start(arguments={"num_layers": 2}), timers(14, 24))
same("layer times of a run that ended during the warm-up", table.one_rank(logs, "m", "1"), None)

# --- selection of runs ---
at = "train/m/1/inside/"
write(at + "fp32.jsonl", start(), interval(9.0), interval(7.0, 2))
write(at + "bf16.jsonl", start(), interval(9.0))
write(at + "qwd.jsonl", start(), interval(9.0), interval(5.0), start(), interval(8.0))
rows = table.read_rows(logs)
same("a preset that ended during the warm-up has no row, even with an earlier complete run",
     [(r["arm"], r["ms"]) for r in rows], [("fp32", 7.0)])
same("rows with few steps are listed", printed(table.print_few_steps, rows),
     "measured with fewer than 3 steps (number of steps): m 1 one node fp32 gradients (2)\n")
write(at + "fp32.jsonl", start(), interval(9.0), interval(7.0, 3))
same("three steps are enough", printed(table.print_few_steps, table.read_rows(logs)), "")

# --- bandwidths ---
first = lambda r: (r["plain"]["all_to_all_node"], r["buckets"][0]["grad_node"])
sockets = lambda: {preset: first(r) for preset, r in table.read_sync(logs, "m", "sockets").items()}
write("sync/m/sockets.jsonl", bandwidth(1.0), synced("fp32", 1), synced("bf16", 2), bandwidth(2.0),
      synced("bf16", 3))
same("the last record of a preset, with the bandwidths of the same call", sockets(),
     {"fp32": (1.0, 1e6), "bf16": (2.0, 3e6)})
write("sync/m/sockets.jsonl", synced("fp32", 1))
same("a preset without bandwidths is ignored", sockets(), {})
with open(os.path.join(logs, "sync/m/sockets.jsonl"), "w") as file:
    file.write("\n".join(('{"kind": "plain", "dev' + json.dumps(bandwidth(9.0)), "",
                          json.dumps(bandwidth(3.0)), json.dumps(synced("fp32", 1)),
                          '{"kind": "arm", "arm": "bf')))
same("a line truncated by a killed call is ignored", sockets(), {"fp32": (3.0, 1e6)})
os.remove(os.path.join(logs, "sync/m/sockets.jsonl"))

# --- memory ---
def memory(planned, before, taken):
    timing = {"free_before_bytes": 1 << 30, "taken_before_bytes": before, "taken_bytes": taken,
              "beside_plan_bytes": taken - before - planned}
    return {"kind": "memory", "iteration": 4, "planned_bytes": planned, "allocated_bytes": planned,
            "timing": timing}


def taken(preset):
    row = next(r for r in table.memory_rows(logs) if r["arm"] == preset)
    most = table.largest_taken(row["measured"])
    names = ("micro_batch", "planned_per_parameter", "taken_per_parameter", "before_bytes",
             "beside_plan_bytes")
    return row["sum"], most and tuple(most[name] for name in names)


same("memory of a preset that did not train", taken("bf16"), (6.0, None))
write(at + "fp32.jsonl", start(), interval(9.0), memory(1000, 1, 2), interval(7.0),
      start(), interval(9.0), memory(9000, 3 << 20, 20000), interval(7.0))
write("train/m/8/inside/fp32.jsonl", start(), interval(9.0), memory(19000, 1 << 20, 90000))
write("train/m/1/logical/fp32.jsonl", start(nodes=2), interval(9.0), memory(9000, 1 << 20, 99000))
same("memory in use: last run of the smallest micro-batch with this shape", taken("fp32"),
     (6.0, (1, 9.0, 20.0, 3 << 20, 20000 - 9000 - (3 << 20))))
measured = table.memory_rows(logs)[0]["measured"]
same("memory of all runs", [(m["micro_batch"], m["network"], m["taken_bytes"]) for m in measured],
     [(1, "inside", 20000), (8, "inside", 90000)])
shown = printed(table.print_memory, table.memory_rows(logs))
same("memory in the table",
     [line.split("|")[-1].split() for line in shown.splitlines() if line.startswith("m ")],
     [["1", "9.000", "20.000"], ["-", "-", "-"]])
same("memory in use before the first run", "1 to 3 MiB were in use before their allocations" in shown, True)
raise SystemExit(failures > 0)
END
