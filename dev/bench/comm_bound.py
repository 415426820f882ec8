"""Computes a lower bound of the step time: the best possible schedule, without overhead.

Uses layer times of one rank without communication and the bandwidth of plain collectives, and assumes
that quantization takes no time. The program step_bound computes the schedule, with the same model as
--plan (llmc/plan/step_time.h). Used by comm_table.py.

Times are in ms. Bytes are those that each rank sends; rates are in GB/s.
"""
import os
import subprocess

HOPS = ("grad_node", "grad_rail", "weight_rail", "weight_node")
PLAIN = {"grad_node": "all_to_all_node", "grad_rail": "all_to_all_rail",
         "weight_rail": "all_gather_rail", "weight_node": "all_gather_node"}


def layer_times(full, half, layers, half_layers):
    """Returns the times of the parts of a step, from runs of one rank with all and with fewer layers.

    full, half: {"one": (forward, backward), "two": (forward, backward)} for one and two micro-batches
    per step. Their difference is the time of a micro-batch without a concurrent optimizer. If noise
    makes it negative, the time of the single micro-batch is used."""
    parts = []
    for k in range(2):
        whole, part = full["two"][k] - full["one"][k], half["two"][k] - half["one"][k]
        if whole <= 0:
            whole, part = full["one"][k], half["one"][k]
        layer = max(0.0, (whole - part) / (layers - half_layers))
        parts.append((layer, max(0.0, whole - layers * layer)))
    return {"forward": parts[0][0], "backward": parts[1][0], "head": parts[0][1], "tail": parts[1][1]}


def transfer_times(bucket, plain):
    """Returns the ms of each hop of a bucket's gradients and weights."""
    times = {}
    for hop in HOPS:
        rate = plain[PLAIN[hop]]
        times[hop] = bucket[hop] / (1e6 * rate) if bucket[hop] else 0.0
    return times


def layers_of(bucket):
    """Returns the number of layers in a bucket; unit 0 is the embedding."""
    return bucket["end"] - max(1, bucket["first"])


def gather_time(bucket, direction, plain):
    """Returns the ms of gathering sharded weights for "forward" or "backward"; 0 if there is no gather."""
    if direction + "_node" not in bucket:
        return 0.0
    hops = ("rail", "node")
    return sum(bucket[f"{direction}_{hop}"] / (1e6 * plain[PLAIN["weight_" + hop]] or 1) for hop in hops)


def exchange_time(bucket, plain):
    """Returns the ms of an outer sync. The all-to-all and the all-gather each send half of the bytes."""
    sent = bucket.get("exchange", 0)
    return sum(sent / 2 / (1e6 * plain[PLAIN[hop]]) for hop in ("grad_rail", "weight_rail")) if sent else 0.0


def step_bound(times, update, dp, buckets, plain, micro_batches=1, steps=1, delay=0):
    """Returns the ms of a step in the steady state.

    times: result of layer_times. update: ms of AdamW for all parameters on one rank. buckets: records
    of sync_only in forward order; unit 0 is the embedding. steps, delay: --local-steps and its delay."""
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
