#!/usr/bin/env bash
# Tests step_bound and its helpers (dev/bench/comm_bound.py) on cases with known results.
set -u
cd "$(dirname "$0")/../../.." || exit 1
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench python3 - <<'END'
from comm_bound import layer_times, step_bound, transfer_times

failures = 0


def same(name, got, wanted):
    global failures
    close = all(abs(g - w) < 1e-6 for g, w in zip(got, wanted)) and len(got) == len(wanted)
    print("ok " + name if close else f"not ok {name}: {got} instead of {wanted}")
    failures += not close


# Rates in GB/s. A megabyte takes 1 ms.
ONE = {"all_to_all_node": 1.0, "all_to_all_rail": 1.0, "all_gather_rail": 1.0, "all_gather_node": 1.0}


def bucket(first, end, elements=1, **megabytes):
    made = {"first": first, "end": end, "elements": elements}
    for hop in ("grad_node", "grad_rail", "weight_rail", "weight_node"):
        made[hop] = 1e6 * megabytes.get(hop, 0)
    for direction in ("forward", "backward"):
        if direction in megabytes:  # (between nodes, inside)
            made[direction + "_rail"], made[direction + "_node"] = (1e6 * m for m in megabytes[direction])
    made["reductions"] = megabytes.get("reductions", 1)
    return made


TIMES = {"forward": 1.0, "backward": 2.0, "head": 3.0, "tail": 0.5}
bound = lambda buckets, update=0: [step_bound(TIMES, update, 4, buckets, ONE)]
three = lambda **m: [bucket(0, 1, **m), bucket(1, 2, **m), bucket(2, 3, **m)]

times = transfer_times(bucket(0, 1, grad_node=3, weight_rail=5), {**ONE, "all_gather_rail": 2.0})
same("bytes over rates", [times[hop] for hop in ("grad_node", "grad_rail", "weight_rail")], [3, 0, 2.5])
none = transfer_times(bucket(0, 1), {k: 0.0 for k in ONE})
same("no rate is needed if nothing is sent", [none["grad_rail"]], [0])

# A second micro-batch adds 10 ms of forward with 4 layers and 6 ms with 2: 2 ms per layer and 2 ms
# for the rest. It adds 20 and 11 ms of backward: 4.5 ms per layer and 2 ms for the rest.
parts = layer_times({"one": (13, 25), "two": (23, 45)}, {"one": (8, 13), "two": (14, 24)}, 4, 2)
same("times of layers from runs of different depth",
     [parts[k] for k in ("forward", "head", "backward", "tail")], [2, 2, 4.5, 2])
# Other load made forward slower with one micro-batch than with two. Then the time with one
# micro-batch is used: 16 ms with 4 layers, 10 ms with 2.
parts = layer_times({"one": (16, 25), "two": (15, 45)}, {"one": (10, 13), "two": (12, 24)}, 4, 2)
same("times of layers on a loaded machine", [parts[k] for k in ("forward", "head")], [3, 4])

# Nothing is sent and AdamW takes no time. 2 layers take 1 + 2 each, the LM head 3, the rest of
# backward 0.5.
same("compute alone", bound(three()), [9.5])
# AdamW takes 12 ms over 4 ranks and 3 buckets: 1 ms each, in forward order after backward. The
# embedding is ready at 1 and layer 1 at 2. Layer 1 computes until 3, when layer 2 is ready. So 2 ms
# are exposed.
same("AdamW in forward order", bound(three(), update=12), [11.5])
# Gradients take 1 ms between nodes. Layer 2 is sent from 2 to 3 ms of backward, layer 1 from 4 to
# 5. The embedding is ready at 4.5 and sent from 5 to 6.
same("the last bucket's gradients are exposed", bound(three(grad_rail=1)), [11])
# Gradients take 4 ms on each of two hops. Backward completes units at 2, 4 and 4.5. Hops inside the
# node end at 6, 10 and 14, and hops between nodes at 10, 14 and 18, which is 13.5 ms after
# backward.
same("two hops overlap between buckets", bound(three(grad_node=4, grad_rail=4)), [9.5 + 13.5])
# Weights take 2 ms between nodes, then 1 ms inside, so buckets are ready 3, 5 and 7 ms after the
# step status. Layer 1 computes from 5 to 6, layer 2 from 7 to 8, the LM head until 11. With
# backward's 4.5 ms the step takes 15.5.
same("layers wait for their own weights", bound(three(weight_rail=2, weight_node=1)), [15.5])
# If layers share a bucket, forward waits for the whole bucket, and gradients are sent after
# backward of the lowest layer.
same("layers that share a bucket", bound([bucket(0, 3, grad_rail=1, weight_rail=2)]), [12.5])
# Two micro-batches compute for 2 x (2 + 3 + 4.5) ms. With one reduction per step, only gradients of
# the last backward are exposed, as above. With one reduction per micro-batch, the first ones
# overlap with the second micro-batch.
steps = lambda count, buckets: [step_bound(TIMES, 0, 4, buckets, ONE, count)]
same("two micro-batches, one reduction", steps(2, three(grad_rail=1)), [20.5])
same("a reduction after each micro-batch", steps(2, three(grad_rail=1, reductions=2)), [20.5])
# Six reductions of 8 ms start at 7 and end at 55, which is 36 ms after the last backward.
same("long reductions after each micro-batch are exposed", steps(2, three(grad_rail=8, reductions=2)), [55])
# Four layers are gathered into two slots, in forward and backward, for 1 ms each inside the node.
# The first gather starts when the previous step ends, so 1 ms is exposed. Each other layer is
# gathered while the layer before it computes. Backward finds layers 4 and 3 in the slots.
gathered = lambda **m: [bucket(0, 1)] + [bucket(k, k + 1, **m) for k in range(1, 5)]
node = {"forward": (0, 1), "backward": (0, 1)}
same("gathers overlap with layers", steps(1, gathered(**node)), [4 + 3 + 8 + 0.5 + 1])
# Gathers take 3 ms, so layers 1 to 4 arrive at 3, 6, 9 and 12. Forward ends at 13, the LM head at
# 16. Backward computes layer 4 until 18 and layer 3 until 20. Layer 2 is gathered from 18 to 21 and
# computes until 23; layer 1 is gathered from 21 to 24 and computes until 26. The rest ends at 26.5.
slow = {"forward": (0, 3), "backward": (0, 3)}
same("gathers that are slower than layers", steps(1, gathered(**slow)), [26.5])
# The gathers take the same time, split over both hops.
both = {"forward": (1.5, 1.5), "backward": (1, 2)}
same("gathers over both hops", steps(1, gathered(**both)), [26.5])
# With two micro-batches, the second forward starts at 26.5 and finds layers 1 and 2 in the slots.
# Layer 3 is gathered from 27.5 to 30.5, layer 4 until 33.5. Forward ends at 34.5, the LM head at
# 37.5. Backward computes layer 4 until 39.5 and layer 3 until 41.5. Layer 2 is gathered from 39.5
# to 42.5 and computes until 44.5, layer 1 until 47.5. The rest ends at 48.
same("a second micro-batch finds two layers", steps(2, gathered(**slow)), [48])
# Local steps take 10 ms, and every second one starts an outer sync. If the sync takes 8 ms, it
# overlaps with the next step. If it takes 30 ms, the next update waits for it, and the second step
# takes 10 more. With a delay of one step 20 ms of the sync overlap.
TEN = {"forward": 0.0, "backward": 0.0, "head": 10.0, "tail": 0.0}
local = lambda delay, *sent, rates=ONE: [step_bound(
    TEN, 0, 1, [bucket(k, k + 1) | {"exchange": 1e6 * m} for k, m in enumerate(sent)], rates, 1, 2, delay)]
same("an outer sync overlaps with a step", local(0, 8), [10])
same("a longer outer sync is exposed", local(0, 30), [20])
same("an outer sync with a delay of one step", local(1, 30), [15])
same("an outer sync that sends nothing", local(0, 0), [10])
# The sync slots of two buckets are in successive steps, so each step has a sync of 15 ms.
same("sync slots of two buckets", local(0, 15, 15), [15])
same("hops with different rates", local(0, 20, rates={**ONE, "all_gather_rail": 0.5}), [20])
raise SystemExit(failures > 0)
END
