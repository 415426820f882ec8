#!/usr/bin/env bash
# --weights outer and mean: export and text from a checkpoint between two outer steps of
# --local-steps. Compares the exported weights with means that Python computes from the shards.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 400 11
data=$work/text_text_document
run=(--train-iters 16 --lr 1e-2 --micro-batch-size 1 --save-interval 8)
three=(3 --gpus-per-node 1 "${run[@]}" --global-batch-size 12 --local-steps 8)
trains "${three[@]}" --exit-interval 7 --save "$work/early" || not_ok "a run of three nodes" "$why"
said() { # FILE TEXT: exactly one line of the file has the text
    [ "$(grep -cF -- "$2" "$work/$1")" = 1 ] || { why="no '$2' in $1: $(head -n 1 "$work/$1")"; return 1; }
}
outer="outer weights, each synchronized in one of iterations 0 to 7 (--local-steps 8)"
mean="mean of the 3 nodes at iteration 7"
check "the trainer's log says which iterations the outer weights are from" said out \
    "outer weights, synchronized in iterations 0 to 7"

cat >"$work/exported.py" <<'END'
import glob, json, struct, sys
def read(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            lo, hi = entry["data_offsets"]
            yield name, data[8 + size + lo:8 + size + hi]
def floats(data): return struct.unpack(f"<{len(data) // 4}f", data)
def to_bf16(value):  # round to nearest even
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16
run, export, which, dtype = sys.argv[1:]
parts = {}  # name -> node -> [(first element, values)]
for path in glob.glob(f"{run}/iter_0000007/mp_rank_00/*.safetensors"):
    for name, data in read(path):
        tensor, kind, at, *node = name.split("|")
        if kind == ("local_master" if which == "mean" else "master"):
            parts.setdefault(tensor, {}).setdefault("".join(node), []).append((int(at), floats(data)))
wanted = {}
for tensor, nodes in parts.items():
    assert len(nodes) == (3 if which == "mean" else 1), nodes.keys()
    whole = [[x for _, values in sorted(ranges) for x in values] for ranges in nodes.values()]
    # Python computes in double; packing rounds the mean to fp32.
    values = floats(b"".join(struct.pack("<f", sum(column) / len(column)) for column in zip(*whole)))
    wanted[tensor] = list(values if dtype == "fp32" else map(to_bf16, values))
words = "embedding.word_embeddings.weight"
wanted[words] = wanted[words][:257 * 32]  # without padding
exported = {name: floats(data) if dtype == "fp32" else struct.unpack(f"<{len(data) // 2}H", data)
            for name, data in read(f"{export}/model.safetensors")}
# Tensors with the same layout in both, then the values of all tensors in any order.
for ours, theirs in ((words, "transformer.wte.weight"),
                     ("embedding.position_embeddings.weight", "transformer.wpe.weight"),
                     ("encoder.layers.1.self_attention.dense.bias", "transformer.h.1.attn.c_proj.bias")):
    assert list(exported[theirs]) == wanted[ours], ours
flat = [sorted(x for values in tensors.values() for x in values) for tensors in (wanted, exported)]
assert flat[0] == flat[1], "other values"
END
exports() { # WEIGHTS DTYPE NOTE
    local folder=$work/$1.$2
    converts --load "$work/early" --to-hf "$folder" --weights "$1" --dtype "$2" && said err "$3" || return 1
    python3 "$work/exported.py" "$work/early" "$folder" "$1" "$2" 2>"$work/err" || say "other values"
}
check "outer weights, fp32" exports outer fp32 "$outer; --weights mean takes the mean of the 3 nodes at iteration 7"
check "outer weights, bf16" exports outer bf16 "$outer"
check "mean of the nodes, fp32" exports mean fp32 "$mean"
check "mean of the nodes, bf16" exports mean bf16 "$mean"

# The bf16 export is imported again, so that it gives the text and the loss of the mean.
same_text() {
    local flags=(--prompt "the quick" --num-tokens 24 --seed 5) generate=$BUILD/generate_cpu
    converts --from-hf "$work/mean.bf16" --save "$work/mean" --make-vocab-size-divisible-by 8 &&
        "$generate" --load "$work/mean" "${flags[@]}" >"$work/imported" 2>"$work/err" &&
        "$generate" --load "$work/early" "${flags[@]}" >"$work/outer" 2>"$work/err" && said err "$outer" &&
        "$generate" --load "$work/early" "${flags[@]}" --weights mean >"$work/text" 2>"$work/err" &&
        said err "$mean" || return 1
    cmp -s "$work/text" "$work/imported" && ! cmp -s "$work/text" "$work/outer" ||
        { why="mean: $(head -n 1 "$work/text"), imported: $(head -n 1 "$work/imported")"; return 1; }
}
check "generate writes the mean's text" same_text
better() {
    evaluated outer "$work/early" && evaluated mean "$work/mean" --finetune &&
        awk -v outer="$(cat "$work/outer.loss")" -v mean="$(cat "$work/mean.loss")" \
            'BEGIN { exit !(mean + 0.1 < outer) }' || { why="losses $(cat "$work"/*.loss | tr '\n' ' ')"; return 1; }
}
check "the mean has learned more than older outer weights" better

# The last iteration synchronizes everything: nothing to choose and nothing to say.
ends() {
    trains "${three[@]}" --save "$work/early" --load "$work/early" || return 1
    for weights in outer mean; do
        converts --load "$work/early" --to-hf "$work/end.$weights" --weights $weights &&
            ! grep "The weights are" "$work/err" >"$work/lines" || { why="$(cat "$work/lines")"; return 1; }
    done
    same_folders "$work/end.outer" "$work/end.mean"
}
check "after the last iteration both are the same" ends
# A run whose length was cut to the iteration that it loads saves without an outer sync.
cut() {
    cp -r "$work/early" "$work/cut" && rm -rf "$work"/cut/iter_0000016 &&
        echo 7 >"$work/cut/latest_checkpointed_iteration.txt" &&
        trains "${three[@]}" --train-iters 7 --override-opt_param-scheduler --load "$work/cut" \
            --save "$work/short" && said out "outer weights, synchronized in iterations 0 to 7" &&
        converts --load "$work/short" --to-hf "$work/short.mean" --weights mean && said err "$mean" &&
        same_folders "$work/short.mean" "$work/mean.bf16"
}
check "a save without an outer sync keeps the weights of the nodes" cut
light() {
    trains "${three[@]}" --exit-interval 7 --save "$work/light" --no-save-optim &&
        no_convert 6 "use --weights outer" --load "$work/light" --to-hf "$work/none" --weights mean &&
        converts --load "$work/light" --to-hf "$work/light.hf" && said err "$outer" &&
        same_folders "$work/light.hf" "$work/outer.bf16"
}
check "without the optimizer there are only outer weights" light
ordinary() {
    trains 1 "${run[@]}" --exit-interval 7 --save "$work/ordinary" || return 1
    for weights in outer mean; do
        converts --load "$work/ordinary" --to-hf "$work/ordinary.$weights" --weights $weights || return 1
    done
    same_folders "$work/ordinary.outer" "$work/ordinary.mean"
}
check "an ordinary run has one set of weights" ordinary
finish
