#!/usr/bin/env python3
"""Makes dev/bench/comm.sh's tables, JSON file and plot from the logs of its runs, and says which arms fit its time.

    comm_table.py table LOGS OUT.json [OUT.svg]          of whole training steps
    comm_table.py sync LOGS OUT.json                     of synchronisation alone
    comm_table.py steps LOGS MODEL ROWS NETWORK LEFT START MOST ARM...   lines "ARM STEPS" or "ARM 0", then "seconds SUM"
    comm_table.py unfinished LOGS MODEL ROWS NETWORK ARM...               those of the arms that have no row, a line each

LOGS/sync/MODEL/NETWORK.jsonl     sync_only's lines, of one call or several
LOGS/one/MODEL/ROWS/RUN.jsonl     one rank: RUN is full-1, full-2, half-1, half-2 (layers, micro-batches per step)
LOGS/train/MODEL/ROWS/NETWORK/ARM.jsonl, loopback   the trainer's lines, and train_arms's
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from comm_bound import HOPS, PLAIN, layer_times, step_bound
from plotting import BETWEEN, COLOURS, TOP, Panel, key, page

SUMS = "+sums"  # the same arm with --verify-wire
ARMS = tuple(arm + sums for arm in ("fp32", "bf16", "qwd", "tlq-hs", "ulq", "sdp4bit", "qw", "tlq") for sums in ("", SUMS))
TITLES = {"fp32": "fp32 gradients", "bf16": "bf16 gradients", "qwd": "qWD", "qw": "qW", "tlq": "TLq", "tlq-hs": "TLq-HS", "ulq": "ULq", "sdp4bit": "SDP4Bit"}
TITLES.update({arm + SUMS: title.replace(" gradients", "") + " + sums" for arm, title in TITLES.items()})
INTERVALS = 2  # of a whole run: one to warm up, the one that counts
# Bytes per value that travel with groups of 128 and, for weights, 2048: codes, and one fp32 scale per group.
INT8, INT4, INT4_WEIGHT = 1 + 4 / 128, 0.5 + 4 / 128, 0.5 + 4 / 2048


def lines(path):
    if not os.path.exists(path):
        return []
    found = []
    with open(path) as file:
        for line in file:
            try:
                found.append(json.loads(line))
            except ValueError:  # cut short by a call that was ended, or empty
                pass
    return found


def folders(path):
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def network_title(network):
    return {"inside": "one node", "logical": "nodes in name only", "sockets": "sockets, unshaped"}.get(network, network + " Gb/s")


def network_order(network):
    names = ["inside", "logical", "sockets"]
    return (names.index(network), 0.0) if network in names else (3, -float(network))


def read_sync(logs, model, network):
    """{arm: its newest line, and as "plain" the plain collectives of the same call}: several calls add theirs to one file, perhaps on several machines."""
    plain, found = None, {}
    for r in lines(os.path.join(logs, "sync", model, network + ".jsonl")):
        if r["kind"] == "plain":
            plain = r
        elif plain:
            found[r["arm"]] = {**r, "plain": plain}
    return found


def last_run(path):
    """Lines of the newest run in a file that several runs have appended to."""
    found = lines(path)
    starts = [i for i, r in enumerate(found) if r["kind"] == "start"]
    return found[starts[-1]:] if starts else []


def timers_of(path):
    """(layers, {timer: ms per step of the slowest rank}) of a run's last interval; (0, {}) when it ended in the first, which warms up."""
    run = last_run(path)
    timers = [r["timing"] for r in run if r["kind"] == "timers"]
    return (run[0]["arguments"]["num_layers"], {name: span[1] for name, span in timers[-1].items()}) if len(timers) >= INTERVALS else (0, {})


def one_rank(logs, model, rows):
    """(layers, times of the parts of a step, AdamW's ms) measured on one rank; None when a run is missing."""
    found = {name: timers_of(os.path.join(logs, "one", model, rows, name + ".jsonl")) for name in ("full-1", "full-2", "half-1", "half-2")}
    if not all(timers for _, timers in found.values()):
        return None
    pair = lambda name: (found[name][1]["forward-compute"], found[name][1]["backward-compute"])
    times = layer_times({"one": pair("full-1"), "two": pair("full-2")}, {"one": pair("half-1"), "two": pair("half-2")}, found["full-1"][0], found["half-1"][0])
    return found["full-1"][0], times, found["full-1"][1]["optimizer-inner-step"]


def compute_ms(one):
    layers, times, update = one
    return layers * (times["forward"] + times["backward"]) + times["head"] + times["tail"]


# --- which arms fit -------------------------------------------------------------------------------------------------------------------------

FULL = 1.0        # seconds that an interval of short steps lasts: the one before it, as long, brings a GPU near the clock that it keeps
FULL_STEPS = 30   # at most, where --iters does not ask for more
LONG = 3.0        # seconds beyond which an interval has fewer steps than --iters
# An interval begins and ends behind a synchronisation of the compute stream, which does not wait for the gathers under way. Where the interval that warms up had one
# step, an unknown part of that first step's weights has travelled before the clock starts, and of one step nothing makes up for it: fp32 gradients at 1.3B and
# 10 Gb/s a node showed 126 ms of 3.17 s too little. Intervals of two steps wait as long for the same bytes as longer ones.
FEWEST = 2


def fewest_steps(step, most):
    """Of an interval, for steps of so many seconds."""
    return max(FEWEST, min(most, round(LONG / step)))


def full_steps(step, most):
    return max(fewest_steps(step, most), min(FULL_STEPS, int(FULL / step)))


def step_seconds(plain, buckets, computing):
    """What a step takes at most, or nearly: nothing overlaps. computing: ms."""
    sent = sum(b[hop] / (1e6 * plain[PLAIN[hop]]) for b in buckets for hop in HOPS if b[hop])
    return (computing + 1.2 * sent) / 1e3


def plan_steps(logs, model, rows, network, left, start, most, arms):
    """Steps of each arm's interval (it runs two) within the time that is left, and the seconds they take; 0: left out. Intervals get longer than the fewest steps
    take in what is left when every arm has those: no arm is left out for another's sake."""
    synced = read_sync(logs, model, network)
    one = one_rank(logs, model, rows)
    computing = compute_ms(one) if one else 1000.0
    chosen, seconds, spent = {}, {}, 0.0
    for arm in arms:
        chosen[arm] = 0
        if arm not in synced:
            continue
        seconds[arm] = step_seconds(synced[arm]["plain"], synced[arm]["buckets"], computing)
        steps = fewest_steps(seconds[arm], most)
        if spent + start + 2 * steps * seconds[arm] <= left:
            chosen[arm] = steps
            spent += start + 2 * steps * seconds[arm]
    for arm in (a for a in arms if chosen[a]):
        more = 2 * (full_steps(seconds[arm], most) - chosen[arm]) * seconds[arm]
        if spent + more <= left:
            chosen[arm] = full_steps(seconds[arm], most)
            spent += more
    return [(arm, chosen[arm]) for arm in arms], spent


# --- the table of steps -----------------------------------------------------------------------------------------------------------------------


def loopback_of(folder, arm):
    """Bytes on the loopback while the arm ran, as the kernel counts them; None when nobody looked."""
    found = [r["loopback_bytes"] for r in lines(os.path.join(folder, "loopback")) if r["arm"] == arm]
    return found[-1] if found else None


def finished(logs, model, rows, network, arm):
    """(start, intervals) of an arm's newest run; None when that has not come to its end."""
    run = last_run(os.path.join(logs, "train", model, rows, network, arm + ".jsonl"))
    intervals = [r for r in run if r["kind"] == "interval"]
    return (run[0], intervals) if len(intervals) >= INTERVALS else None


def row_of(logs, model, rows, network, arm):
    run = finished(logs, model, rows, network, arm)
    if not run:
        return None
    start, intervals = run
    synced = read_sync(logs, model, network).get(arm)
    last = intervals[-1]
    timing = last["timing"]
    row = {"model": model, "micro_batch": int(rows), "network": network, "arm": arm, "ranks": start["world_size"], "nodes": start["nodes"], "commit": start["commit"],
           "device": start["device"], "parameters": start["parameters"], "steps_measured": last["iterations"], "ms": timing["elapsed_ms"], "tokens_per_second": timing["tokens_per_second"],
           "tflops_per_gpu": timing["tflops_per_gpu"], "node_bytes": last["inter_node_bytes"], "inside_bytes": last["intra_node_bytes"], "loss": last.get("loss"),
           "exposed_gradients_ms": timing["exposed_gradients_ms"], "exposed_weights_ms": timing["exposed_weights_ms"], "exposed_most_ms": timing.get("exposed_most_ms")}
    row["plain"] = {name: synced["plain"][name] for name in PLAIN.values()} if synced else None
    passed = loopback_of(os.path.join(logs, "train", model, rows, network), arm)
    if passed is not None and start["nodes"] > 1 and start["arguments"]["emulate_nodes"] and last["inter_node_bytes"]:
        steps = sum(r["iterations"] for r in intervals)
        row["loopback_bytes"] = passed / steps / start["nodes"]  # per step and node, what NCCL's start sends included
        row["loopback_ratio"] = row["loopback_bytes"] / last["inter_node_bytes"]
    one = one_rank(logs, model, rows)
    if one and synced:
        layers, times, update = one
        row["compute_ms"] = compute_ms(one)
        row["bound_ms"] = step_bound(layers, times, update, start["world_size"], synced["buckets"], synced["plain"])
        row["over_bound"] = row["ms"] / row["bound_ms"]
    return row


def read_rows(logs):
    rows = []
    for model in folders(os.path.join(logs, "train")):
        for batch in folders(os.path.join(logs, "train", model)):
            for network in folders(os.path.join(logs, "train", model, batch)):
                rows += [row_of(logs, model, batch, network, arm) for arm in ARMS]
    rows = [r for r in rows if r]
    rows.sort(key=lambda r: (r["parameters"], r["model"], -r["micro_batch"], network_order(r["network"]), ARMS.index(r["arm"])))
    for r in rows:
        for baseline in ("fp32", "bf16"):
            other = next((o for o in rows if o["arm"] == baseline and all(o[k] == r[k] for k in ("model", "micro_batch", "network"))), None)
            if other:
                r["over_" + baseline] = other["ms"] / r["ms"]
    return rows


FEW_STEPS = 3


def print_few_steps(rows):
    few = ["%s %d %s %s (%d)" % (r["model"], r["micro_batch"], network_title(r["network"]), TITLES[r["arm"]], r["steps_measured"]) for r in rows if r["steps_measured"] < FEW_STEPS]
    if few:
        print("measured with fewer than %d steps (how many): %s" % (FEW_STEPS, "; ".join(few)))


def cell(value, form):
    return "-" if value is None else format(value, form)


def print_rows(rows):
    head = ("%-6s %5s %-18s %-15s %9s %9s %6s %11s %8s %7s %7s %10s %7s %10s %10s %7s" %
            ("model", "batch", "network", "arm", "ms/step", "bound", "ratio", "tokens/s", "TFLOP/s", "x fp32", "x bf16", "MB / node", "kernel", "gradients", "weights", "most"))
    print(head)
    for r in rows:
        print("%-6s %5d %-18s %-15s %9.2f %9s %6s %11.0f %8s %7s %7s %10.2f %7s %10.2f %10.2f %7s" %
              (r["model"], r["micro_batch"], network_title(r["network"]), TITLES[r["arm"]], r["ms"], cell(r.get("bound_ms"), ".2f"), cell(r.get("over_bound"), ".3f"),
               r["tokens_per_second"], cell(r["tflops_per_gpu"], ".1f"), cell(r.get("over_fp32"), ".2f"), cell(r.get("over_bf16"), ".2f"), r["node_bytes"] / 1e6,
               cell(r.get("loopback_ratio"), ".3f"), r["exposed_gradients_ms"], r["exposed_weights_ms"], cell(r.get("exposed_most_ms"), ".2f")))
    print("TFLOP/s: Megatron-LM's formula, per GPU. MB / node: sent out of each node per step, counted by the program; kernel: the loopback's own counter over it. "
          "gradients, weights: ms that computing waited for them on the rank that waited least; most: for both, on the rank that waited most (GPUs differ in speed). "
          "bound: dev/bench/comm_bound.py")


def print_sums(rows, figures):
    """A line for each arm that was measured with checksums and without; figures(row): its ms, and what a rank or node sends as (name, bytes) pairs."""
    same = lambda a, b: all(a[k] == b[k] for k in ("model", "network", "nodes", "per_node", "micro_batch") if k in a)
    for row in rows:
        plain = next((r for r in rows if r["arm"] + SUMS == row["arm"] and same(r, row)), None)
        if not plain:
            continue
        (ms, sent), (before, sent_before) = figures(row), figures(plain)
        traffic = "; ".join("%s %.3f MB and %d bytes" % (name, old / 1e6, new - old) for (name, new), (_, old) in zip(sent, sent_before))
        print("checksums (--verify-wire), %s, %s, %s: %.2f -> %.2f ms (%+.2f %%); %s" %
              (row["model"], network_title(row["network"]), TITLES[plain["arm"]], before, ms, 100 * (ms / before - 1), traffic))


# --- memory -----------------------------------------------------------------------------------------------------------------------------------


def formula(arm, nodes, per_node):
    """Bytes per parameter of the official release's layout, with the whole shard as one bucket: (always, while gradients are exchanged)."""
    ranks = nodes * per_node
    arm = arm.split("+")[0]  # eight bytes per message are not counted
    always = 2 + 4 + 12 / ranks  # bf16 weights, fp32 gradients, master and two moments of the own shard
    if arm in ("qwd", "sdp4bit", "qw"):
        always += INT4_WEIGHT  # receive buffer
    if arm in ("fp32", "bf16", "qwd", "qw") or ranks == 1:
        return always, 0.0
    inner = INT4 if arm == "ulq" else INT8
    if nodes == 1:
        return always, 2 * inner
    return always, 2 * INT4 if per_node == 1 else 2 * inner + INT4 / per_node


def taken_by(path):
    """(nodes, ranks per node, bytes) of a run's rank 0, from the trainer's line "memory" after its first interval; None without one. planned: activations and all;
    taken: what the whole device had lost then, before: what it had before the run's plan was allocated, by the process's context and by the runs in it before.
    On CPU ranks all is of the process, which keeps what earlier runs freed: only its first run's figures are its own."""
    run = last_run(path)
    found = next((r for r in run if r["kind"] == "memory"), None)
    if not found:
        return None
    start, timing = run[0], found["timing"]
    return start["nodes"], start["world_size"] // start["nodes"], {"planned_bytes": found["planned_bytes"], "allocated_bytes": found["allocated_bytes"],
        "before_bytes": timing["taken_before_bytes"], "taken_bytes": timing["taken_bytes"], "beside_plan_bytes": timing["beside_plan_bytes"],
        "planned_per_parameter": found["planned_bytes"] / start["parameters"], "taken_per_parameter": timing["taken_bytes"] / start["parameters"]}


def measured_memory(logs, model, arm, nodes, per_node):
    """What the runs of this arm on ranks of this shape took, the smallest micro-batch first."""
    made = []
    for batch in folders(os.path.join(logs, "train", model)):
        for network in sorted(folders(os.path.join(logs, "train", model, batch)), key=network_order):
            found = taken_by(os.path.join(logs, "train", model, batch, network, arm + ".jsonl"))
            if found and found[:2] == (nodes, per_node):
                made.append({"micro_batch": int(batch), "network": network, **found[2]})
    return sorted(made, key=lambda m: m["micro_batch"])


def largest_taken(measured):
    """Of the smallest micro-batch, whose activations hide least; None without runs."""
    return max((m for m in measured if m["micro_batch"] == measured[0]["micro_batch"]), key=lambda m: m["taken_bytes"]) if measured else None


def memory_rows(logs):
    rows = []
    for model in folders(os.path.join(logs, "sync")):
        seen = set()
        for network in sorted((name[:-len(".jsonl")] for name in folders(os.path.join(logs, "sync", model))), key=network_order):
            for arm, r in read_sync(logs, model, network).items():
                shape = (arm, r["nodes"], r["per_node"])
                if shape in seen:
                    continue
                seen.add(shape)
                always, transient = formula(*shape)
                per = {group: size / r["parameters"] for group, size in r["memory"].items()}
                rows.append({"model": model, "arm": arm, "nodes": r["nodes"], "per_node": r["per_node"], "bytes_per_parameter": per, "sum": sum(per.values()),
                             "release_always": always, "release_transient": transient, "measured": measured_memory(logs, model, *shape)})
    rows.sort(key=lambda r: (r["model"], r["nodes"], r["per_node"], ARMS.index(r["arm"])))
    return rows


def print_memory(rows):
    if not rows:
        return
    print("\nmemory per GPU, bytes per parameter, activations left out but for the last two columns\n%-6s %-7s %-15s %8s %10s %10s %14s %6s %8s | %8s %10s | %5s %8s %8s" %
          ("model", "ranks", "arm", "weights", "gradients", "optimizer", "communication", "norm", "sum", "formula", "transient", "batch", "planned", "taken"))
    for r in rows:
        per = r["bytes_per_parameter"]
        get = lambda group: per.get(group, 0.0)
        most = largest_taken(r["measured"]) or {}
        print("%-6s %-7s %-15s %8.3f %10.3f %10.3f %14.3f %6.3f %8.3f | %8.3f %10.3f | %5s %8s %8s" %
              (r["model"], "%dx%d" % (r["nodes"], r["per_node"]), TITLES[r["arm"]], get("weights"), get("gradients"), get("optimizer state"), get("communication"),
               get("norm and verdict"), r["sum"], r["release_always"], r["release_transient"], cell(most.get("micro_batch"), "d"), cell(most.get("planned_per_parameter"), ".3f"),
               cell(most.get("taken_per_parameter"), ".3f")))
    print("formula: 2 (bf16 weights) + 4 (fp32 gradients) + 12 / ranks (master, moments) + %.3f with 4-bit weights (receive buffer), as in the official release; transient: "
          "its buffers of an exchange of the whole shard, 2 x bytes per value of the first hop + those of the second / ranks per node. Ours hold the largest bucket's" % INT4_WEIGHT)
    if any(r["measured"] for r in rows):
        before = [m["before_bytes"] for r in rows for m in r["measured"]]
        print("planned, taken: of training with this micro-batch: sum and activations; what the device had lost after the first interval, with its context, libraries, NCCL and "
              "activations. Arms follow each other in one process: before their plans %.0f to %.0f MiB were taken, what earlier arms had loaded or left included" %
              (min(before) / 2**20, max(before) / 2**20))


# --- synchronisation alone ----------------------------------------------------------------------------------------------------------------------


def sync_rows(logs):
    rows = []
    for model in folders(os.path.join(logs, "sync")):
        for network in sorted((name[:-len(".jsonl")] for name in folders(os.path.join(logs, "sync", model))), key=network_order):
            arms = read_sync(logs, model, network)
            for arm in sorted((a for a in arms if "gradients_ms" in arms[a]), key=ARMS.index):
                plain = arms[arm]["plain"]
                r = {k: v for k, v in arms[arm].items() if k not in ("kind", "buckets", "memory", "plain")}
                sent = {hop: sum(b[hop] for b in arms[arm]["buckets"]) for hop in HOPS}
                floor = {hop: sent[hop] / (1e6 * plain[PLAIN[hop]]) if sent[hop] else 0.0 for hop in HOPS}
                rows.append({"model": model, "network": network, **r, "sent": sent, "gradients_floor_ms": max(floor["grad_node"], floor["grad_rail"]),
                             "weights_floor_ms": max(floor["weight_node"], floor["weight_rail"]), "plain": {name: plain[name] for name in PLAIN.values()}, "device": plain["device"], "commit": plain["commit"]})
    return rows


def print_sync(rows):
    print("%-6s %-18s %-7s %-15s %10s %8s %9s %8s %7s %7s" % ("model", "network", "ranks", "arm", "gradients", "floor", "weights", "floor", "AdamW", "apply"))
    for r in rows:
        print("%-6s %-18s %-7s %-15s %10.2f %8.2f %9.2f %8.2f %7.2f %7.2f" % (r["model"], network_title(r["network"]), "%dx%d" % (r["nodes"], r["per_node"]), TITLES[r["arm"]],
              r["gradients_ms"], r["gradients_floor_ms"], r["weights_ms"], r["weights_floor_ms"], r["adamw_ms"], r["apply_ms"]))
    print("ms. gradients: first bucket ready until the verdict; weights: verdict until all are applied, less AdamW's kernels alone; floor: bytes of the busier hop at the plain "
          "collective's rate")
    for network in sorted({r["network"] for r in rows}, key=network_order):
        plain = next(r["plain"] for r in rows if r["network"] == network)
        rate = lambda name: cell(plain[name] or None, ".2f")
        print("%s, GB/s sent by each rank: all-to-all inside %s, between nodes %s; all-gather inside %s, between nodes %s" %
              (network_title(network), rate("all_to_all_node"), rate("all_to_all_rail"), rate("all_gather_node"), rate("all_gather_rail")))


# --- the plot -----------------------------------------------------------------------------------------------------------------------------------


def node_gbit(row):
    """Gb/s that a plain all-to-all sends out of each node."""
    return 8 * row["plain"]["all_to_all_rail"] * row["ranks"] / row["nodes"]


def plot(rows, path):
    """Speedup of each arm over both baselines against the bandwidth between nodes; False when there is nothing to draw."""
    points = [r for r in rows if r["nodes"] > 1 and r["plain"] and r["arm"] not in ("fp32", "bf16") and not r["arm"].endswith(SUMS)]
    models = list(dict.fromkeys((r["model"], r["micro_batch"]) for r in points))
    arms = [arm for arm in ARMS if any(r["arm"] == arm for r in points)]
    dashes = {arm: dash for arm, dash in zip(["sdp4bit"] + [a for a in arms if a != "sdp4bit"], ["", "7 4", "2 3", "9 3 2 3", "1 6", "12 6"])}
    panels, top = [], TOP
    for baseline in ("fp32", "bf16"):
        drawn = [r for r in points if "over_" + baseline in r]
        if not drawn:
            continue
        x, y = [node_gbit(r) for r in drawn], [r["over_" + baseline] for r in drawn]
        panel = Panel(top, 260, (0, 1.05 * max(x)), (min(1.0, min(y)), max(y)))
        strokes = []
        for k, which in enumerate(models):
            for arm in arms:
                line = sorted((node_gbit(r), r["over_" + baseline]) for r in drawn if (r["model"], r["micro_batch"]) == which and r["arm"] == arm)
                if line:
                    strokes += panel.line(line, COLOURS[k % len(COLOURS)], "soft", dashes.get(arm, ""))
                    strokes += [f'<circle cx="{panel.x(a):.1f}" cy="{panel.y(b):.1f}" r="3" fill="{COLOURS[k % len(COLOURS)]}"/>' for a, b in line]
        label = "Gb/s that a plain all-to-all sends out of each node"
        panels.append((panel, strokes, panel.axes("speedup over " + TITLES[baseline], label if baseline == "bf16" else None)))
        top += 260 + BETWEEN
    if not panels:
        return False
    entries = [(f"{model}, micro-batch {batch}", COLOURS[k % len(COLOURS)], "") for k, (model, batch) in enumerate(models)]
    entries += [(TITLES[arm], "#444444", dashes.get(arm, "")) for arm in arms]
    subtitle = "%d ranks on %d nodes, %s" % (points[0]["ranks"], points[0]["nodes"], points[0]["device"])
    with open(path, "w") as file:
        file.write(page("A step's speedup by what travels", subtitle, panels, key(entries, TOP)))
    return True


# --- commands ---------------------------------------------------------------------------------------------------------------------------------


def write_json(path, what, content):
    """comm.sh hands over its command line. Whole or not at all: a call may be ended at any time."""
    command = os.environ.get("COMMAND_LINE", "dev/bench/comm.sh")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w") as file:
        json.dump({"what": what, "command": command, **content}, file, indent=1)
    os.replace(path + ".part", path)


def main():
    command = sys.argv[1] if len(sys.argv) > 3 else ""
    if command == "table":
        rows, memory = read_rows(sys.argv[2]), memory_rows(sys.argv[2])
        if not rows:
            sys.exit("error: no arm has run to its end; see above")
        print_rows(rows)
        print_few_steps(rows)
        print_sums(rows, lambda r: (r["ms"], (("out of a node", r["node_bytes"]), ("inside", r["inside_bytes"]))))
        print_memory(memory)
        write_json(sys.argv[3], "training steps by what travels, sequence and model of the cards, no dropout, made-up data", {"rows": rows, "memory": memory})
        if len(sys.argv) > 4 and plot(rows, sys.argv[4]):
            print("plot: " + sys.argv[4])
    elif command == "sync":
        rows = sync_rows(sys.argv[2])
        if not rows:
            sys.exit("error: nothing was measured; see above")
        print_sync(rows)
        print_sums(rows, lambda r: (r["gradients_ms"] + r["weights_ms"] + r["adamw_ms"], (("each rank", sum(r["sent"].values())),)))
        print_memory(memory_rows(sys.argv[2]))
        write_json(sys.argv[3], "synchronisation of a step alone", {"rows": rows, "memory": memory_rows(sys.argv[2])})
    elif command == "steps":
        logs, model, rows, network, left, start, most = sys.argv[2:9]
        chosen, seconds = plan_steps(logs, model, rows, network, float(left), float(start), int(most), sys.argv[9:])
        for arm, steps in chosen:
            print(arm, steps)
        print("seconds %.1f" % seconds)
    elif command == "unfinished":
        for arm in sys.argv[6:]:
            if not finished(*sys.argv[2:6], arm):
                print(arm)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
