#!/usr/bin/env bash
# The bound of a step (dev/bench/comm_bound.py) on cases of known answers. step_bound is built.
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


# GB/s: a megabyte takes 1 ms.
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
same("no rate is asked where nothing is sent", [none["grad_rail"]], [0])

# F(2) - F(1): 10 with 4 layers, 6 with 2: 2 a layer, 2 beside them; B: 20 and 11: 4.5 a layer, 2
# beside.
parts = layer_times({"one": (13, 25), "two": (23, 45)}, {"one": (8, 13), "two": (14, 24)}, 4, 2)
same("times of layers from runs of different depth",
     [parts[k] for k in ("forward", "head", "backward", "tail")], [2, 2, 4.5, 2])
# Other load made runs of one micro-batch slower than runs of two: F 16 with 4 layers, 10 with 2.
parts = layer_times({"one": (16, 25), "two": (15, 45)}, {"one": (10, 13), "two": (12, 24)}, 4, 2)
same("times of layers on a loaded machine", [parts[k] for k in ("forward", "head")], [3, 4])

# Nothing is sent, AdamW is free: 2 layers of 1 + 2, head 3, tail 0.5.
same("compute alone", bound(three()), [9.5])
# AdamW of 12 ms over 4 ranks and 3 buckets: 1 ms each, in forward order after the backward's end.
# The embedding's bucket is ready at 1, layer 1's at 2, after which layer 1 runs until 3 and finds
# layer 2's, ready at 3: one wait of 2 ms in all.
same("AdamW in forward order", bound(three(), update=12), [11.5])
# Gradients of 1 ms on the rail: layer 2's are sent from 2 to 3 of the backward, layer 1's from 4 to
# 5, the embedding's, ready at 4.5, from 5 to 6.
same("the last bucket's gradients show", bound(three(grad_rail=1)), [11])
# 4 ms on each of two hops. Backward ends units at 2, 4 and 4.5 (from its start): node hops end at
# 6, 10, 14, rail hops at 10, 14, 18: 13.5 ms later than the backward's end.
same("two hops overlap between buckets", bound(three(grad_node=4, grad_rail=4)), [9.5 + 13.5])
# Weights of 2 ms on the rail, then 1 ms inside: buckets ready at 3, 5, 7 after the step status.
# Unit 0 waits 3, layer 1 runs 5-6, layer 2 7-8, head to 11, backward 4.5: 15.5.
same("layers wait for their own weights", bound(three(weight_rail=2, weight_node=1)), [15.5])
# Layers that share a bucket wait for all of it, and their gradients go when the lowest is done.
same("layers that share a bucket", bound([bucket(0, 3, grad_rail=1, weight_rail=2)]), [12.5])
# Two micro-batches: compute alone is 2 (F 2 + H 3 + B 4.5). With one reduction per step only the
# last backward's show, as above. With one per micro-batch the first ones end beside the second
# micro-batch's work.
steps = lambda count, buckets: [step_bound(TIMES, 0, 4, buckets, ONE, count)]
same("two micro-batches, one reduction", steps(2, three(grad_rail=1)), [20.5])
same("a reduction after each", steps(2, three(grad_rail=1, reductions=2)), [20.5])
# 8 ms each: six of them from 7 on take until 55, 36 later than the last backward's end at 19.
same("reductions after each show where they are long", steps(2, three(grad_rail=8, reductions=2)), [55])
# Layers are gathered in 1 ms inside the node, forward and backward; four layers, two slots. The
# first gather of the steady state begins with the last step's end: 1 ms of waiting. Layer 2's runs
# beside layer 1, layer 3's when layer 1 is done, and so on: none shows. Backward finds 4 and 3; 2
# is gathered beside 3's backward: none shows.
gathered = lambda **m: [bucket(0, 1)] + [bucket(k, k + 1, **m) for k in range(1, 5)]
node = {"forward": (0, 1), "backward": (0, 1)}
same("gathers hide behind layers", steps(1, gathered(**node)), [4 + 3 + 8 + 0.5 + 1])
# 3 ms each: layers 1 and 2 are there at 3 and 6. Layer 3's gather begins when layer 1 is done, but
# the link is free at 6: 9, and layer 4's 12. Forward ends at 13, the head at 16. Backward: 4 until
# 18, 3 until 20; 2 may be gathered from 18 to 21, runs until 23; 1 from 21 to 24, until 26; 26.5.
slow = {"forward": (0, 3), "backward": (0, 3)}
same("gathers that are slower than layers", steps(1, gathered(**slow)), [26.5])
# The same, half of the time on each hop.
both = {"forward": (1.5, 1.5), "backward": (1, 2)}
same("gathers over both hops", steps(1, gathered(**both)), [26.5])
# Two micro-batches: the second forward pass finds 1 and 2, at 26.5. It gathers 3 when 1 is done, at
# 27.5, until 30.5, and 4 until 33.5: forward until 34.5, head 37.5, backward 4 until 39.5, 3 until
# 41.5, 2 from 39.5 to 42.5 and until 44.5, 1 until 45.5, 47.5, 48.
same("a second micro-batch finds two layers", steps(2, gathered(**slow)), [48])
# Local steps of 10 ms, two to a period. An exchange of 8 ms hides behind the next step. One of 30
# ms holds that step's update up until 30 ms after it began; the step after it takes 10 more. A
# delay of a step gives it 20 ms: then it goes on all the time.
TEN = {"forward": 0.0, "backward": 0.0, "head": 10.0, "tail": 0.0}
local = lambda delay, *sent, rates=ONE: [step_bound(
    TEN, 0, 1, [bucket(k, k + 1) | {"exchange": 1e6 * m} for k, m in enumerate(sent)], rates, 1, 2, delay)]
same("an exchange hides behind a step", local(0, 8), [10])
same("one that does not", local(0, 30), [20])
same("a delay of a step", local(1, 30), [15])
same("nothing to exchange", local(0, 0), [10])
# Two buckets have their turns in successive steps: 15 ms each, one waits in every step.
same("turns of two buckets", local(0, 15, 15), [15])
same("at two speeds", local(0, 20, rates={**ONE, "all_gather_rail": 0.5}), [20])
raise SystemExit(failures > 0)
END
