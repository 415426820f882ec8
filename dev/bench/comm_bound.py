"""The best that anyone could run: a step that waits for what the network demands and nothing else.

Layers' times are those of one rank without communication, bandwidths those of plain collectives.
Kernels that quantize cost nothing. The schedule is that of --plan: step_bound computes it
(llmc/plan/step_time.h). Used by comm_table.py.

Times are ms, rates GB/s sent by each rank, bytes those that each rank sends.
"""
import os
import subprocess

HOPS = ("grad_node", "grad_rail", "weight_rail", "weight_node")
PLAIN = {"grad_node": "all_to_all_node", "grad_rail": "all_to_all_rail",
         "weight_rail": "all_gather_rail", "weight_node": "all_gather_node"}


def layer_times(full, half, layers, half_layers):
    """Times of the parts of a step, from runs of one rank with all and with fewer layers.

    full, half: {"one": (forward, backward), "two": (forward, backward)} for one and for two
    micro-batches per step. The difference is a micro-batch beside which no optimizer and no norm
    runs. Where other work on the machine left no difference, the one micro-batch stands for it."""
    parts = []
    for k in range(2):
        whole, part = full["two"][k] - full["one"][k], half["two"][k] - half["one"][k]
        if whole <= 0:
            whole, part = full["one"][k], half["one"][k]
        layer = max(0.0, (whole - part) / (layers - half_layers))
        parts.append((layer, max(0.0, whole - layers * layer)))
    return {"forward": parts[0][0], "backward": parts[1][0], "head": parts[0][1], "tail": parts[1][1]}


def transfer_times(bucket, plain):
    """ms of each hop of a bucket."""
    times = {}
    for hop in HOPS:
        rate = plain[PLAIN[hop]]
        times[hop] = bucket[hop] / (1e6 * rate) if bucket[hop] else 0.0
    return times


def layers_of(bucket):
    """How many layers a bucket holds; unit 0 is the embedding."""
    return bucket["end"] - max(1, bucket["first"])


def gather_time(bucket, direction, plain):
    """ms of a gather by a pass of this direction, where weights are shared out; 0 where it makes none."""
    if direction + "_node" not in bucket:
        return 0.0
    hops = ("rail", "node")
    return sum(bucket[f"{direction}_{hop}"] / (1e6 * plain[PLAIN["weight_" + hop]] or 1) for hop in hops)


def exchange_time(bucket, plain):
    """ms of an exchange between nodes: half of it is an all-to-all, half a gather."""
    sent = bucket.get("exchange", 0)
    return sum(sent / 2 / (1e6 * plain[PLAIN[hop]]) for hop in ("grad_rail", "weight_rail")) if sent else 0.0


def step_bound(times, update, dp, buckets, plain, micro_batches=1, steps=1, delay=0):
    """ms of a step in the steady state.

    times: layer_times. update: ms of AdamW on all parameters on one rank. buckets: as sync_only
    writes them, in forward order, unit 0 being the embedding. steps, delay: of --local-steps."""
    elements = sum(b["elements"] for b in buckets)
    numbers = [len(buckets), micro_batches, times["forward"], times["backward"], times["head"], times["tail"],
               steps, delay]
    for b in buckets:
        hops = transfer_times(b, plain)
        numbers += [layers_of(b), b.get("reductions", 1), *(hops[hop] for hop in HOPS),
                    int("forward_node" in b or "backward_node" in b),
                    gather_time(b, "forward", plain), gather_time(b, "backward", plain),
                    update / dp * b["elements"] / elements, exchange_time(b, plain)]
    program = os.path.join(os.environ.get("BUILD", "build"), "dev", "bench", "step_bound")
    text = " ".join(map(repr, numbers))
    return float(subprocess.run([program], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout)
