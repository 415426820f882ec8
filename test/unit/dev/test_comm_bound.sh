#!/usr/bin/env bash
# The bound of a step (dev/bench/comm_bound.py) on cases of known answers.
set -u
cd "$(dirname "$0")/../../.." || exit 1
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench python3 - <<'END'
from comm_bound import layer_times, step_bound, through_pipeline, transfer_times

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
    return made


TIMES = {"forward": 1.0, "backward": 2.0, "head": 3.0, "tail": 0.5}
bound = lambda buckets, update=0: [step_bound(2, TIMES, update, 4, buckets, ONE)]
three = lambda **m: [bucket(0, 1, **m), bucket(1, 2, **m), bucket(2, 3, **m)]

# Two pipelined resources: jobs at 0, 1, 10 with 2 then 3.
same("a pipeline of two resources", through_pipeline([0, 1, 10], [2, 2, 2], [3, 3, 3]), [5, 8, 15])
times = transfer_times(bucket(0, 1, grad_node=3, weight_rail=5), {**ONE, "all_gather_rail": 2.0})
same("bytes over rates", [times[hop] for hop in ("grad_node", "grad_rail", "weight_rail")], [3, 0, 2.5])
none = transfer_times(bucket(0, 1), {k: 0.0 for k in ONE})
same("no rate is asked where nothing is sent", [none["grad_rail"]], [0])

# F(2) - F(1): 10 with 4 layers, 6 with 2: 2 a layer, 2 beside them; B: 20 and 11: 4.5 a layer, 2
# beside.
parts = layer_times({"one": (13, 25), "two": (23, 45)}, {"one": (8, 13), "two": (14, 24)}, 4, 2)
same("times of layers from runs of different depth",
     [parts[k] for k in ("forward", "head", "backward", "tail")], [2, 2, 4.5, 2])
# Other work made the runs of one micro-batch longer than those of two: F 16 with 4 layers, 10 with
# 2.
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
# Weights of 2 ms on the rail, then 1 ms inside: buckets ready at 3, 5, 7 after the verdict. Unit 0
# waits 3, layer 1 runs 5-6, layer 2 7-8, head to 11, backward 4.5: 15.5.
same("layers wait for their own weights", bound(three(weight_rail=2, weight_node=1)), [15.5])
# Layers that share a bucket wait for all of it, and their gradients go when the lowest is done.
same("layers that share a bucket", bound([bucket(0, 3, grad_rail=1, weight_rail=2)]), [12.5])
raise SystemExit(failures > 0)
END
