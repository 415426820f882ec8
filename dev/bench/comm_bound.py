"""The best that anyone could run: a step that waits for what the network demands and nothing else.

Every transfer starts when its gradients or its shard are ready. Every layer waits for its own
weights only. Gathers by passes and reductions do not slow each other. Kernels that quantise cost
nothing. Layers' times are those of one rank without
communication, bandwidths those of plain collectives. Pure functions, used by comm_table.py.

Times are ms, rates GB/s sent by each rank, bytes those that each rank sends.
"""

HOPS = ("grad_node", "grad_rail", "weight_rail", "weight_node")
PLAIN = {"grad_node": "all_to_all_node", "grad_rail": "all_to_all_rail",
         "weight_rail": "all_gather_rail", "weight_node": "all_gather_node"}


def layer_times(full, half, layers, half_layers):
    """Times of the parts of a step, from runs of one rank with all and with fewer layers.

    full, half: {"one": (forward, backward), "two": (forward, backward)} for one and for two
    micro-batches per step. The difference is a micro-batch beside which no optimiser and no norm
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


def through_pipeline(starts, first, second):
    """Jobs in this order through two resources, one after the other; each serves one job at a time.

    Returns when each job leaves the second."""
    first_free = second_free = float("-inf")
    ends = []
    for start, a, b in zip(starts, first, second):
        first_free = max(start, first_free) + a
        second_free = max(first_free, second_free) + b
        ends.append(second_free)
    return ends


def layers_of(bucket):
    """How many layers a bucket holds; unit 0 is the embedding."""
    return bucket["end"] - max(1, bucket["first"])


class Gathers:
    """Gathers by passes, where weights are shared out. One at a time, through both hops.

    Two slots hold whole buckets in turn. A gather may begin as soon as the passes are done with the
    slot's last bucket, and the bucket's new weights are there."""

    def __init__(self, plain):
        self.plain, self.held, self.free, self.link = plain, {}, [0.0, 0.0], float("-inf")

    def update(self):
        """The weights that the slots hold are old now."""
        self.held = {}

    def ready(self, b, bucket, direction, weights_ready):
        """When the pass of this direction has the bucket's weights."""
        if direction + "_node" not in bucket or self.held.get(b % 2) == b:
            return weights_ready
        rail = bucket[direction + "_rail"] / (1e6 * self.plain[PLAIN["weight_rail"]] or 1)
        node = bucket[direction + "_node"] / (1e6 * self.plain[PLAIN["weight_node"]] or 1)
        self.link = max(self.link, self.free[b % 2], weights_ready) + rail + node
        self.held[b % 2] = b
        return self.link

    def used(self, b, now):
        """A pass is done with the bucket."""
        self.free[b % 2] = now


def step_bound(layers, times, update, dp, buckets, plain, micro_batches=1):
    """ms of a step in the steady state.

    times: layer_times. update: ms of AdamW on all parameters on one rank. buckets: as sync_only
    writes them, in forward order, units 0 (embedding) to `layers`. A bucket with several
    "reductions" is reduced after every micro-batch, the others after the last. One with
    "forward_node" is gathered by passes."""
    transfers = [transfer_times(b, plain) for b in buckets]
    elements = sum(b["elements"] for b in buckets)
    weights_ready, now, period = [0.0] * len(buckets), 0.0, None
    gathers = Gathers(plain)
    for _ in range(100):
        start = now
        ready = []  # (time, bucket) of each reduction
        gathers.update()
        for k in range(micro_batches):
            for b, bucket in enumerate(buckets):
                now = max(now, gathers.ready(b, bucket, "forward", weights_ready[b]))
                now += times["forward"] * layers_of(bucket)
                gathers.used(b, now)
            now += times["head"]
            for b in reversed(range(len(buckets))):
                now = max(now, gathers.ready(b, buckets[b], "backward", weights_ready[b]))
                now += times["backward"] * layers_of(buckets[b])
                now += times["tail"] if buckets[b]["first"] == 0 else 0.0
                gathers.used(b, now)
                if k == micro_batches - 1 or buckets[b].get("reductions", 1) > 1:
                    ready.append((now, b))
        reduced = through_pipeline([at for at, _ in ready], [transfers[b]["grad_node"] for _, b in ready],
                                   [transfers[b]["grad_rail"] for _, b in ready])
        verdict = max([now] + reduced)
        updated, at = [], verdict
        for bucket in buckets:
            at += update / dp * bucket["elements"] / elements
            updated.append(at)
        weights_ready = through_pipeline(updated, [t["weight_rail"] for t in transfers],
                                         [t["weight_node"] for t in transfers])
        last, period = period, now - start
        if last is not None and abs(period - last) < 1e-9:
            break
    return period


# The first periods fill the link, where it is too slow. The last ones count.
FILLING, COUNTED = 8, 8


def local_bound(alone, buckets, plain, steps, delay):
    """ms of a step on average, where nodes meet every `steps` steps (--local-steps).

    alone: step_bound of what travels inside the nodes. A bucket's "exchange" is what a rank sends
    at the bucket's turn: half of it as an all-to-all between nodes, half as a gather. The turns are
    spread as llmc/state/zero_local.c spreads them. An exchange begins with the end of its step. The
    update `delay` + 1 steps later waits for it."""
    rates = [plain[PLAIN[hop]] for hop in ("grad_rail", "weight_rail")]
    elements, before, turns, times = sum(b["elements"] for b in buckets), 0, [], []
    for bucket in buckets:
        turns.append(steps * before // elements)
        before += bucket["elements"]
        sent = bucket.get("exchange", 0)
        times.append(sum(sent / 2 / (1e6 * rate) for rate in rates) if sent else 0.0)
    now, link, counted, answers = 0.0, 0.0, 0.0, [0.0] * len(buckets)
    for step in range((FILLING + COUNTED) * steps):
        if step == FILLING * steps:
            counted = now
        now += alone
        for b, turn in enumerate(turns):
            if (step - turn - delay - 1) % steps == 0:
                now = max(now, answers[b])
        for b, turn in enumerate(turns):
            if step % steps == turn:
                link = max(link, now) + times[b]
                answers[b] = link
    return (now - counted) / (COUNTED * steps)
