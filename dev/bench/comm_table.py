#!/usr/bin/env python3
"""Generates the tables, JSON file and plot of dev/bench/comm.sh from the logs of its runs.

Also decides which presets fit into the remaining time.

    comm_table.py table LOGS OUT.json [OUT.svg]
        writes the table of training steps
    comm_table.py sync LOGS OUT.json
        writes the table of synchronization alone
    comm_table.py steps LOGS MODEL ROWS NETWORK LEFT START MOST PRESET...
        prints a line "PRESET STEPS" per preset, with 0 steps if it does not fit, then "seconds SUM"
    comm_table.py unfinished LOGS MODEL ROWS NETWORK PRESET...
        prints the presets without a complete run, one per line

LOGS/sync/MODEL/NETWORK.jsonl     output of one or more calls of sync_only
LOGS/one/MODEL/ROWS/RUN.jsonl     runs on one rank. RUN is full-1, full-2, half-1 or half-2: the layers
                                  (all or half of them) and the number of micro-batches per step
LOGS/train/MODEL/ROWS/NETWORK/    PRESET.jsonl (log of the trainer) and loopback (byte counts of
                                  train_presets)
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from comm_bound import HOPS, PLAIN, layer_times, step_bound
from plotting import BETWEEN, COLORS, TOP, Entry, Panel, legend, page
from tables import cell, json_lines, number_column as number, print_columns, write_records

# Suffixes for presets with additional flags.
VARIANTS = {"+sums": "checksums (--verify-wire)", "+grads": "sharded gradients (optim_grads)",
            "+params": "weights sharded within the node (optim_grads_params)",
            "+offload": "optimizer in host memory (--optimizer-cpu-offload)"}
TITLES = {"fp32": "fp32 gradients", "bf16": "bf16 gradients", "qwd": "qWD", "tlq-hs": "TLq-HS", "ulq": "ULq",
          "sdp4bit": "SDP4Bit", "qw": "qW", "tlq": "TLq", "eden": "EDEN", "eden3": "EDEN 3 bits",
          "eden2-ef": "EDEN 2 bits + EF", "lossless": "lossless", "eden-lossless": "EDEN, lossless",
          "local": "local steps"}
PRESETS = tuple(preset + more for preset in TITLES for more in ("", *VARIANTS))
TITLES.update({preset + more: title.replace(" gradients", "") + " + " + more[1:]
               for preset, title in TITLES.items() for more in VARIANTS})
INTERVALS = 2  # log intervals of a complete run: the first is the warm-up, the second is measured
# Bytes per value of a payload: codes and one fp32 scale per group of 128, or of 2048 for weights.
INT8, INT4, INT4_WEIGHT = 1 + 4 / 128, 0.5 + 4 / 128, 0.5 + 4 / 2048


def folders(path):
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def network_title(network):
    named = {"inside": "one node", "logical": "logical nodes", "sockets": "unlimited sockets"}
    return named.get(network, network + " Gb/s")


def network_order(network):
    names = ["inside", "logical", "sockets"]
    return (names.index(network), 0.0) if network in names else (3, -float(network))


def networks_synced(logs, model):
    files = folders(os.path.join(logs, "sync", model))
    return sorted((name[:-len(".jsonl")] for name in files), key=network_order)


def read_sync(logs, model, network):
    """Returns {preset: latest record}. record["plain"]: plain collectives of the same call.

    Several calls, possibly on different machines, append to the same file."""
    plain, found = None, {}
    for r in json_lines(os.path.join(logs, "sync", model, network + ".jsonl")):
        if r["kind"] == "plain":
            plain = r
        elif plain:
            found[r["arm"]] = {**r, "plain": plain}
    return found


def last_run(path):
    """Returns the records of the last run in a file that several runs have appended to."""
    found = json_lines(path)
    starts = [i for i, r in enumerate(found) if r["kind"] == "start"]
    return found[starts[-1]:] if starts else []


def timers_of(path):
    """Returns (layers, {timer: ms per step of the slowest rank}) for a run's last interval.

    Returns (0, {}) if the run ended in its first interval, the warm-up."""
    run = last_run(path)
    timers = [r["timing"] for r in run if r["kind"] == "timers"]
    if len(timers) < INTERVALS:
        return 0, {}
    return run[0]["arguments"]["num_layers"], {name: span[1] for name, span in timers[-1].items()}


def one_rank(logs, model, rows):
    """Returns (layers, times of the parts of a step, ms of AdamW) for one rank; None if a run is missing."""
    path = os.path.join(logs, "one", model, rows, "%s.jsonl")
    found = {name: timers_of(path % name) for name in ("full-1", "full-2", "half-1", "half-2")}
    if not all(timers for _, timers in found.values()):
        return None
    pair = lambda name: (found[name][1]["forward-compute"], found[name][1]["backward-compute"])
    full, half = ({"one": pair(depth + "-1"), "two": pair(depth + "-2")} for depth in ("full", "half"))
    layers, timers = found["full-1"]
    return layers, layer_times(full, half, layers, found["half-1"][0]), timers["optimizer-inner-step"]


def compute_ms(one):
    layers, times, update = one
    return layers * (times["forward"] + times["backward"]) + times["head"] + times["tail"]


# --- number of steps ------------------------------------------------------------------------------

# Minimum duration of an interval in seconds; short steps are repeated. The warm-up interval is
# equally long, so that the GPU is close to its sustained clock.
FULL = 1.0
FULL_STEPS = 30   # maximum number of steps in a repeated interval, unless --iters is larger
LONG = 3.0        # an interval that would take more seconds has fewer steps than --iters
# Minimum number of steps in an interval. The synchronization at its start does not wait for gathers
# in progress, so with a single step an unknown part of the weights is sent before the clock starts.
# Intervals of two steps give the same time per step as longer ones.
FEWEST = 2
# Number of steps between outer syncs of a bucket. A shorter interval would miss some buckets.
PERIOD = {"local": 30}


def fewest_steps(step, most, preset=""):
    """Returns the minimum number of steps of an interval. step: seconds per step."""
    period = PERIOD.get(preset.split("+")[0], 0)
    return max(FEWEST, min(most, max(period, round(LONG / step))))


def full_steps(step, most, preset=""):
    return max(fewest_steps(step, most, preset), min(FULL_STEPS, int(FULL / step)))


def step_seconds(plain, buckets, computing):
    """Returns an approximate upper limit of the seconds per step. computing: compute time in ms."""
    sent = sum(b[hop] / (1e6 * plain[PLAIN[hop]]) for b in buckets for hop in HOPS if b[hop])
    return (computing + 1.2 * sent) / 1e3


def plan_steps(logs, model, rows, network, left, start, most, presets):
    """Returns ([(preset, steps per interval)], total seconds). Presets with 0 steps are skipped.

    First gives each preset the minimum number of steps, as long as there is time. Then uses the
    remaining time for longer intervals."""
    synced = read_sync(logs, model, network)
    one = one_rank(logs, model, rows)
    computing = compute_ms(one) if one else 1000.0
    chosen, seconds, spent = {}, {}, 0.0
    for preset in presets:
        chosen[preset] = 0
        if preset not in synced:
            continue
        seconds[preset] = step_seconds(synced[preset]["plain"], synced[preset]["buckets"], computing)
        steps = fewest_steps(seconds[preset], most, preset)
        if spent + start + 2 * steps * seconds[preset] <= left:
            chosen[preset] = steps
            spent += start + 2 * steps * seconds[preset]
    for preset in (a for a in presets if chosen[a]):
        more = 2 * (full_steps(seconds[preset], most, preset) - chosen[preset]) * seconds[preset]
        if spent + more <= left:
            chosen[preset] = full_steps(seconds[preset], most, preset)
            spent += more
    return [(preset, chosen[preset]) for preset in presets], spent


# --- the table of steps ---------------------------------------------------------------------------


def loopback_of(folder, preset):
    """Returns the kernel's byte count of the loopback during the preset's run; None if not recorded."""
    found = [r["loopback_bytes"] for r in json_lines(os.path.join(folder, "loopback")) if r["arm"] == preset]
    return found[-1] if found else None


def finished(logs, model, rows, network, preset):
    """Returns (start, intervals) of a preset's last run; None if it is incomplete."""
    run = last_run(os.path.join(logs, "train", model, rows, network, preset + ".jsonl"))
    intervals = [r for r in run if r["kind"] == "interval"]
    return (run[0], intervals) if len(intervals) >= INTERVALS else None


def bound_of(one, start, synced):
    """Returns the ms of the best possible step. With --local-steps each node is a replica group."""
    flags, (_, times, update) = start["arguments"], one
    steps, delay = flags.get("local_steps", 1), flags.get("local_steps_delay", 0)
    replica_groups = start["nodes"] if steps > 1 else 1
    return step_bound(times, update, start["world_size"] // replica_groups, synced["buckets"],
                      synced["plain"], steps=steps, delay=delay)


def row_of(logs, model, rows, network, preset):
    run = finished(logs, model, rows, network, preset)
    if not run:
        return None
    start, intervals = run
    synced = read_sync(logs, model, network).get(preset)
    last = intervals[-1]
    timing = last["timing"]
    row = {
        "model": model, "micro_batch": int(rows), "network": network, "arm": preset,
        "ranks": start["world_size"], "nodes": start["nodes"], "commit": start["commit"],
        "device": start["device"], "parameters": start["parameters"], "steps_measured": last["iterations"],
        "ms": timing["elapsed_ms"], "tokens_per_second": timing["tokens_per_second"],
        "tflops_per_gpu": timing["tflops_per_gpu"],
        "node_bytes": last["inter_node_bytes"], "inside_bytes": last["intra_node_bytes"],
        "loss": last.get("loss"),
        "exposed_gradients_ms": timing["exposed_gradients_ms"],
        "exposed_weights_ms": timing["exposed_weights_ms"], "exposed_most_ms": timing.get("exposed_most_ms"),
        "plain": {name: synced["plain"][name] for name in PLAIN.values()} if synced else None,
    }
    passed = loopback_of(os.path.join(logs, "train", model, rows, network), preset)
    emulated = start["nodes"] > 1 and start["arguments"]["emulate_nodes"]
    if passed is not None and emulated and last["inter_node_bytes"]:
        # Bytes per step and node, including NCCL's initialization.
        row["loopback_bytes"] = passed / sum(r["iterations"] for r in intervals) / start["nodes"]
        row["loopback_ratio"] = row["loopback_bytes"] / last["inter_node_bytes"]
    one = one_rank(logs, model, rows)
    if one and synced:
        row["compute_ms"] = compute_ms(one)
        row["bound_ms"] = bound_of(one, start, synced)
        row["over_bound"] = row["ms"] / row["bound_ms"]
    return row


def read_rows(logs):
    rows = []
    for model in folders(os.path.join(logs, "train")):
        for batch in folders(os.path.join(logs, "train", model)):
            for network in folders(os.path.join(logs, "train", model, batch)):
                rows += [row_of(logs, model, batch, network, preset) for preset in PRESETS]
    rows = [r for r in rows if r]
    rows.sort(key=lambda r: (r["parameters"], r["model"], -r["micro_batch"], network_order(r["network"]),
                             PRESETS.index(r["arm"])))
    point = lambda r: (r["model"], r["micro_batch"], r["network"])
    for baseline in ("fp32", "bf16"):
        base = {point(r): r["ms"] for r in rows if r["arm"] == baseline}
        for r in rows:
            if point(r) in base:
                r["over_" + baseline] = base[point(r)] / r["ms"]
    return rows


FEW_STEPS = 3


def print_few_steps(rows):
    few = ["%s %d %s %s (%d)" % (r["model"], r["micro_batch"], network_title(r["network"]), TITLES[r["arm"]],
                                 r["steps_measured"]) for r in rows if r["steps_measured"] < FEW_STEPS]
    if few:
        print("measured with fewer than %d steps (number of steps): %s" % (FEW_STEPS, "; ".join(few)))


MODEL_COLUMN = ("model", -6, lambda r: r["model"])
RANKS_COLUMN = ("ranks", -7, lambda r: "%dx%d" % (r["nodes"], r["per_node"]))
NETWORK_COLUMN = ("network", -18, lambda r: network_title(r["network"]))
PRESET_COLUMN = ("preset", -17, lambda r: TITLES[r["arm"]])
BAR_COLUMN = ("|", 1, lambda r: "|")


def print_rows(rows):
    print_columns((
        MODEL_COLUMN, number("batch", 5, "d", "micro_batch"), NETWORK_COLUMN, PRESET_COLUMN,
        number("ms/step", 9, ".2f", "ms"), number("bound", 9, ".2f", "bound_ms"),
        number("ratio", 6, ".3f", "over_bound"), number("tokens/s", 11, ".0f", "tokens_per_second"),
        number("TFLOP/s", 8, ".1f", "tflops_per_gpu"), number("x fp32", 7, ".2f", "over_fp32"),
        number("x bf16", 7, ".2f", "over_bf16"),
        number("MB / node", 10, ".2f", lambda r: r["node_bytes"] / 1e6),
        number("kernel", 7, ".3f", "loopback_ratio"), number("gradients", 10, ".2f", "exposed_gradients_ms"),
        number("weights", 10, ".2f", "exposed_weights_ms"), number("most", 7, ".2f", "exposed_most_ms"),
    ), rows)
    print("bound: step time of the best possible schedule (dev/bench/comm_bound.py); ratio: ms/step / bound\n"
          "TFLOP/s: per GPU, by Megatron-LM's formula\n"
          "MB / node: sent out of each node per step, counted by the program\n"
          "kernel: bytes on the loopback device counted by the Linux kernel, relative to MB / node\n"
          "gradients, weights: exposed communication in ms, on the rank that waited least\n"
          "most: exposed communication in ms on the rank that waited most (other GPUs were slower)")


def print_variants(rows, figures):
    """Prints a line for each preset that was measured with and without the flags of a variant.

    figures(row): returns the ms of a row, and the bytes sent by a rank or node as (name, bytes) pairs."""
    shape = ("model", "network", "nodes", "per_node", "micro_batch")
    same = lambda a, b: all(a[k] == b[k] for k in shape if k in a)
    for row in rows:
        preset, _, more = row["arm"].partition("+")
        plain = next((r for r in rows if r["arm"] == preset and same(r, row)), None)
        if not more or not plain:
            continue
        (ms, sent), (before, sent_before) = figures(row), figures(plain)
        traffic = "; ".join("%s %.3f MB and %d bytes" % (name, old / 1e6, new - old)
                            for (name, new), (_, old) in zip(sent, sent_before))
        print("%s, %s, %s, %s: %.2f -> %.2f ms (%+.2f %%); %s" %
              (VARIANTS["+" + more], row["model"], network_title(row["network"]), TITLES[plain["arm"]],
               before, ms, 100 * (ms / before - 1), traffic))


# --- memory ---------------------------------------------------------------------------------------


def formula(preset, nodes, per_node):
    """Returns the bytes per parameter that the official release needs: (permanent, transient buffers
    for gradients). It has one bucket and does not shard gradients or weights."""
    ranks = nodes * per_node
    preset = preset.split("+")[0]
    always = 2 + 4 + 12 / ranks  # bf16 weights, fp32 gradients, sharded master weights and two moments
    if preset in ("qwd", "sdp4bit", "qw", "eden", "eden3", "eden2-ef", "local"):
        always += INT4_WEIGHT  # receive buffer
    if preset in ("fp32", "bf16", "qwd", "qw", "lossless") or ranks == 1:
        return always, 0.0
    inner = INT4 if preset == "ulq" else INT8
    if nodes == 1:
        return always, 2 * inner
    return always, 2 * INT4 if per_node == 1 else 2 * inner + INT4 / per_node


def taken_by(path):
    """Returns (nodes, ranks per node, bytes) from the "memory" record of rank 0; None without a record.

    planned: the memory plan, including activations. taken: device memory in use after the first
    interval. before: device memory in use before the memory plan was allocated, by the context and by
    earlier runs in this process. On CPU ranks, only the first run of a process is meaningful, because
    the process does not return freed memory."""
    run = last_run(path)
    found = next((r for r in run if r["kind"] == "memory"), None)
    if not found:
        return None
    start, timing = run[0], found["timing"]
    return start["nodes"], start["world_size"] // start["nodes"], {
        "planned_bytes": found["planned_bytes"], "allocated_bytes": found["allocated_bytes"],
        "before_bytes": timing["taken_before_bytes"], "taken_bytes": timing["taken_bytes"],
        "beside_plan_bytes": timing["beside_plan_bytes"],
        "planned_per_parameter": found["planned_bytes"] / start["parameters"],
        "taken_per_parameter": timing["taken_bytes"] / start["parameters"]}


def measured_memory(logs, model, preset, nodes, per_node):
    """Returns the memory of this preset's runs with this number of nodes and ranks, sorted by micro-batch."""
    made, train = [], os.path.join(logs, "train", model)
    for batch in folders(train):
        for network in sorted(folders(os.path.join(train, batch)), key=network_order):
            found = taken_by(os.path.join(train, batch, network, preset + ".jsonl"))
            if found and found[:2] == (nodes, per_node):
                made.append({"micro_batch": int(batch), "network": network, **found[2]})
    return sorted(made, key=lambda m: m["micro_batch"])


def largest_taken(measured):
    """Returns the run with the smallest micro-batch that takes the most memory; None without runs."""
    smallest = [m for m in measured if m["micro_batch"] == measured[0]["micro_batch"]]
    return max(smallest, key=lambda m: m["taken_bytes"], default=None)


# Old names of memory plan groups, which older logs contain.
RENAMED_GROUPS = {"norm and verdict": "norm and step status"}


def memory_rows(logs):
    rows = {}
    for model in folders(os.path.join(logs, "sync")):
        for network in networks_synced(logs, model):
            for preset, r in read_sync(logs, model, network).items():
                shape = (preset, r["nodes"], r["per_node"])
                if (model, shape) in rows:
                    continue
                always, transient = formula(*shape)
                per = {RENAMED_GROUPS.get(group, group): size / r["parameters"]
                       for group, size in r["memory"].items()}
                rows[model, shape] = {
                    "model": model, "arm": preset, "nodes": r["nodes"], "per_node": r["per_node"],
                    "bytes_per_parameter": per, "sum": sum(per.values()),
                    "release_always": always, "release_transient": transient,
                    "measured": measured_memory(logs, model, *shape)}
    order = lambda r: (r["model"], r["nodes"], r["per_node"], PRESETS.index(r["arm"]))
    return sorted(rows.values(), key=order)


def print_memory(rows):
    if not rows:
        return
    print("\nmemory per GPU, bytes per parameter; only the last two columns include activations")
    group = lambda name, width, key: number(
        name, width, ".3f", lambda r: r["bytes_per_parameter"].get(key, 0.0))
    most = lambda name, width, form, key: number(
        name, width, form, lambda r: (largest_taken(r["measured"]) or {}).get(key))
    print_columns((
        MODEL_COLUMN, RANKS_COLUMN, PRESET_COLUMN,
        group("weights", 8, "weights"), group("gradients", 10, "gradients"),
        group("optimizer", 10, "optimizer state"), group("communication", 14, "communication"),
        group("norm", 6, "norm and step status"), number("sum", 8, ".3f", "sum"), BAR_COLUMN,
        number("formula", 8, ".3f", "release_always"), number("transient", 10, ".3f", "release_transient"),
        BAR_COLUMN, most("batch", 5, "d", "micro_batch"), most("planned", 8, ".3f", "planned_per_parameter"),
        most("taken", 8, ".3f", "taken_per_parameter")), rows)
    print("formula: memory of the official release: 2 (bf16 weights) + 4 (fp32 gradients)\n"
          "         + 12 / ranks (master weights, moments) + %.3f with 4-bit weights (receive buffer)\n"
          "transient: communication buffers of the official release: 2 x bytes per value of the first hop\n"
          "           + bytes per value of the second hop / ranks per node. They hold the whole shard;\n"
          "           the buffers of this program hold only the largest bucket" % INT4_WEIGHT)
    before = [m["before_bytes"] for r in rows for m in r["measured"]]
    if before:
        print("planned: sum, plus activations with this micro-batch\n"
              "taken: device memory in use after the first interval, including context, libraries and NCCL.\n"
              "       Presets share a process: %.0f to %.0f MiB were in use before their allocations" %
              (min(before) / 2**20, max(before) / 2**20))


# --- synchronization alone ------------------------------------------------------------------------


def sync_rows(logs):
    rows = []
    for model in folders(os.path.join(logs, "sync")):
        for network in networks_synced(logs, model):
            presets = read_sync(logs, model, network)
            for preset in sorted((a for a in presets if "gradients_ms" in presets[a]), key=PRESETS.index):
                plain = presets[preset]["plain"]
                sent = {hop: sum(b[hop] for b in presets[preset]["buckets"]) for hop in HOPS}
                floor = {hop: sent[hop] / (1e6 * plain[PLAIN[hop]]) if sent[hop] else 0.0 for hop in HOPS}
                kept = {k: v for k, v in presets[preset].items()
                        if k not in ("kind", "buckets", "memory", "plain")}
                rows.append({"model": model, "network": network, **kept, "sent": sent,
                             "gradients_floor_ms": max(floor["grad_node"], floor["grad_rail"]),
                             "weights_floor_ms": max(floor["weight_node"], floor["weight_rail"]),
                             "plain": {name: plain[name] for name in PLAIN.values()},
                             "device": plain["device"], "commit": plain["commit"]})
    return rows


def print_sync(rows):
    print_columns((
        MODEL_COLUMN, NETWORK_COLUMN, RANKS_COLUMN, PRESET_COLUMN,
        number("gradients", 10, ".2f", "gradients_ms"), number("floor", 8, ".2f", "gradients_floor_ms"),
        number("weights", 9, ".2f", "weights_ms"), number("floor", 8, ".2f", "weights_floor_ms"),
        number("AdamW", 7, ".2f", "adamw_ms"), number("apply", 7, ".2f", "apply_ms")), rows)
    print("All times are in ms. gradients: from the first complete bucket to the step status\n"
          "weights: from the step status until all weights are applied, minus AdamW\n"
          "floor: time of a plain collective with the bytes of the busier hop")
    for network in sorted({r["network"] for r in rows}, key=network_order):
        plain = next(r["plain"] for r in rows if r["network"] == network)
        names = ("all_to_all_node", "all_to_all_rail", "all_gather_node", "all_gather_rail")
        rates = [cell(plain[name] or None, ".2f") for name in names]
        print("%s, GB/s sent by each rank: all-to-all within a node %s, between nodes %s; "
              "all-gather within a node %s, between nodes %s" % (network_title(network), *rates))


# --- the plot -------------------------------------------------------------------------------------


def node_gbit(row):
    """Returns the Gb/s that a plain all-to-all sends out of each node."""
    return 8 * row["plain"]["all_to_all_rail"] * row["ranks"] / row["nodes"]


def network_subtitle(points):
    """Describes the hardware and network of the points."""
    ranks, nodes, device = points[0]["ranks"], points[0]["nodes"], points[0]["device"]
    networks = sorted({r["network"] for r in points}, key=network_order)
    if networks == ["logical"]:
        return f"{ranks} ranks as {nodes} nodes without an emulated network, {device}"
    speeds = ["unlimited" if n == "sockets" else network_title(n) for n in networks if n != "logical"]
    gpus = "1 GPU" if ranks == nodes else f"{ranks // nodes} GPUs"
    return (f"{nodes} emulated nodes of {gpus} on one machine ({device}); "
            f"network: TCP over its loopback, {', '.join(speeds)} per node")


def speedup_panel(points, baseline, series, top):
    """series: (points of a line, color, dash)."""
    x, y = [node_gbit(r) for r in points], [r["over_" + baseline] for r in points]
    panel = Panel(top, 260, (min(x), max(x)), (min(1.0, *y), max(y)), log_x=True, pad_x=0.02)
    strokes = []
    for chosen, color, dash in series:
        line = sorted((node_gbit(r), r["over_" + baseline]) for r in chosen if "over_" + baseline in r)
        strokes += panel.line(line, color, "soft", dash)
        strokes += [panel.dot(a, b, color) for a, b in line]
    return panel, strokes


def plot(rows, path):
    """Plots the speedup of each preset over both baselines against the inter-node bandwidth.

    Returns false if there is nothing to draw."""
    points = [r for r in rows if r["nodes"] > 1 and r["plain"] and r["arm"] not in ("fp32", "bf16")
              and "+" not in r["arm"]]
    models = list(dict.fromkeys((r["model"], r["micro_batch"]) for r in points))
    order = lambda preset: (preset != "sdp4bit", PRESETS.index(preset))
    presets = sorted({r["arm"] for r in points}, key=order)
    dashes = dict(zip(presets, ["", "7 4", "2 3", "9 3 2 3", "1 6", "12 6"]))
    series = [([r for r in points if (r["model"], r["micro_batch"], r["arm"]) == (*which, preset)],
               COLORS[k % len(COLORS)], dashes[preset])
              for k, which in enumerate(models) for preset in presets]
    panels, top = [], TOP
    for baseline in ("fp32", "bf16"):
        drawn = [r for r in points if "over_" + baseline in r]
        if drawn:
            panels.append((baseline, *speedup_panel(drawn, baseline, series, top)))
            top += 260 + BETWEEN
    if not panels:
        return False
    label = "Gb/s that a plain all-to-all sends out of each node"
    framed = [(panel, strokes, panel.axes("speedup over " + TITLES[baseline], label if last else None))
              for last, (baseline, panel, strokes) in zip([False] * (len(panels) - 1) + [True], panels)]
    entries = [Entry(f"{model}, micro-batch {batch}", COLORS[k % len(COLORS)])
               for k, (model, batch) in enumerate(models)]
    entries += [Entry(TITLES[preset], "#444444", dashes[preset]) for preset in presets]
    subtitle = network_subtitle(points)
    with open(path, "w") as file:
        file.write(page("Speedup of a training step by preset", subtitle, framed, [legend(entries, TOP)]))
    return True


# --- commands -------------------------------------------------------------------------------------


def write_json(path, what, rows, memory):
    """Writes the JSON file. comm.sh passes its command line in COMMAND_LINE."""
    command = os.environ.get("COMMAND_LINE", "dev/bench/comm.sh")
    write_records(path, {"what": what, "command": command, "rows": rows, "memory": memory})


def make_table(logs, out, picture=None):
    rows, memory = read_rows(logs), memory_rows(logs)
    if not rows:
        sys.exit("error: no preset finished; see above")
    print_rows(rows)
    print_few_steps(rows)
    print_variants(rows, lambda r: (r["ms"], (("between nodes", r["node_bytes"]),
                                              ("within a node", r["inside_bytes"]))))
    print_memory(memory)
    what = "training steps by preset; model configs, no dropout, synthetic data"
    write_json(out, what, rows, memory)
    if picture and plot(rows, picture):
        print("plot: " + picture)


def make_sync_table(logs, out):
    rows, memory = sync_rows(logs), memory_rows(logs)
    if not rows:
        sys.exit("error: no measurements; see above")
    print_sync(rows)
    print_variants(rows, lambda r: (r["gradients_ms"] + r["weights_ms"] + r["adamw_ms"],
                                (("each rank", sum(r["sent"].values())),)))
    print_memory(memory)
    write_json(out, "synchronization of a step alone", rows, memory)


def print_steps(logs, model, rows, network, left, start, most, *presets):
    chosen, seconds = plan_steps(logs, model, rows, network, float(left), float(start), int(most), presets)
    for preset, steps in chosen:
        print(preset, steps)
    print("seconds %.1f" % seconds)


def print_unfinished(logs, model, rows, network, *presets):
    for preset in presets:
        if not finished(logs, model, rows, network, preset):
            print(preset)


def main():
    commands = {"table": make_table, "sync": make_sync_table, "steps": print_steps,
                "unfinished": print_unfinished}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
