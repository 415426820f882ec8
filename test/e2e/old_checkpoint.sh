#!/usr/bin/env bash
# test/golden/checkpoint has the first format version; commit c9f8404 wrote it. The program loads it
# and saves it again with the same bytes in the shards. Runs resumed from either checkpoint are
# bitwise identical.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 60 6
golden=$PWD/test/golden/checkpoint info=$PWD/dev/checkpoint_info
data=text_text_document # a relative path, as in the manifest of the golden checkpoint
cd "$work" || exit 1
run=(2 --gpus-per-node 1 "${paper[@]}" --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length
    16 --max-position-embeddings 16
    --make-vocab-size-divisible-by 1 --wq-group-size 64 --gq-group-size-intra 64 --gq-group-size-inter 64 \
        --lr-decay-iters 6)
# Prints a shard without its header, because the header contains the program's commit.
data_of() { tail -c +$(($(od -An -tu8 -N8 "$1") + 9)) "$1"; }
saved_again() {
    local shard state='^"state": '
    trains "${run[@]}" --train-iters 4 --load "$golden" --save again --save-interval 4 || return 1
    for shard in iter_0000004/mp_rank_00/shard_0000{0,1}_of_00002.safetensors; do
        cmp -s <(data_of "$golden/$shard") <(data_of "again/$shard") || { why="$shard differs"; return 1; }
        [ "$(data_of "$golden/$shard" | wc -c)" -gt 20000 ] || { why="$shard is too small"; return 1; }
    done
    # Counters that the old format does not have are 0.
    [ "$(grep "$state" "$golden/iter_0000004/manifest.json")" = \
        "$(grep "$state" again/iter_0000004/manifest.json |
            sed -E 's/ *"(met_at|samples_(next|end|spare|dealt)|left)": *0,//g')" ] ||
        { why="the counters differ"; return 1; }
}
check "loaded and saved again: the same bytes" saved_again
# An independent reader checks that shard headers agree with the manifest, including tensors that
# are split by columns.
headers() {
    "$info" again --slices >out 2>err && grep -q 'exp_avg_sq' out || { why=$(cat err); return 1; }
    "$info" "$golden" >out 2>err || { why=$(cat err); return 1; }
}
check "shard headers agree with the manifests" headers
continues() { # NAME FOLDER
    logged "$1" "${run[@]}" --train-iters 6 --load "$2" --save "$1" --save-interval 6
}
from_either() {
    continues old "$golden" && continues new again && same_training old new && same_shards old new 6 2
}
check "runs resumed from the old and from the new checkpoint are bitwise identical" from_either
losses() { # measured with the old program; OpenBLAS may round differently on other CPUs
    local found
    found=$(awk 'NR == FNR { wanted[FNR] = $1; next }
        { d = $1 - wanted[FNR]; if (d < 0) d = -d; if (d < 2e-3) n++ } END { print n }' \
        <(printf '%s\n' 5.449302673339844 5.42122745513916) <(field old loss | cut -d ' ' -f 2))
    [ "$found" = 2 ] || { why="losses $(field old loss | tr '\n' ' ')"; return 1; }
}
check "losses match the old program's" losses
tampered() { # shows that the shard is read: one flipped bit in a moment is detected
    cp -r "$golden" changed &&
        printf '\377' | dd of=changed/iter_0000004/mp_rank_00/shard_00000_of_00002.safetensors bs=1 \
        seek=9000 conv=notrunc status=none
    refused 6 "shard_00000_of_00002.safetensors is damaged" "${run[@]}" --train-iters 4 --load changed
}
check "a flipped bit is detected" tampered
finish
