#!/usr/bin/env bash
# Several runs or forks in one --save directory: --keep-last-checkpoints counts and deletes only the
# run's own checkpoints. If the newest checkpoint is damaged, a run falls back only to its own
# previous one. If the tracker is lost or damaged, the run resumes from its newest checkpoint and
# says so.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 6
data=$work/text_text_document
folder=$work/save
run=(2 --gpus-per-node 1 --num-layers 1 --train-iters 30 --lr-decay-iters 30 --log-interval 10
    --save-interval 10 --keep-last-checkpoints 2 --save "$folder")
there() { # ITERATIONS...: checks that exactly these checkpoints exist, whichever run wrote them
    local wanted
    wanted=$(printf 'iter_%07d\n' "$@")
    [ "$(find "$folder" -maxdepth 1 -name 'iter_*' -printf '%f\n' | sort)" = "$wanted" ] ||
        { why="there are $(find "$folder" -maxdepth 1 -name 'iter_*' -printf '%f ' | sort)"; return 1; }
}
listed() { # ITERATIONS...: checks that checkpoints_of_run.txt lists these
    [ "$(tr '\n' ' ' <"$folder/checkpoints_of_run.txt")" = "$* " ] ||
        { why="the list says $(tr '\n' ' ' <"$folder/checkpoints_of_run.txt")"; return 1; }
}
tracked() { [ "$(cat "$folder/latest_checkpointed_iteration.txt")" = "$1" ] ||
    { why="the tracker names $(cat "$folder/latest_checkpointed_iteration.txt")"; return 1; }; }
loaded() { grep -q "successfully loaded checkpoint from $folder at iteration $1\$" "$work/out" ||
    { why="not loaded at $1"; return 1; }; }
warned() { # TIMES TEXT: checks that TIMES warnings contain TEXT
    [ "$(grep '^WARNING: ' "$work/out" | grep -cF -- "$2")" -eq "$1" ] ||
        { why="'$2' does not appear in $1 warnings"; return 1; }
}
damage() { truncate -s 100 "$folder/$(printf 'iter_%07d' "$1")/mp_rank_00/shard_00001_of_00002.safetensors"; }
again() { # COMMAND...: creates a directory with two runs, then COMMAND damages it
    rm -rf "$folder"
    cp -r "$work/two" "$folder"
    "$@"
}
first_run() { rm -rf "$folder"; trains "${run[@]}" --save-interval 9 --exit-interval 23 && there 18 23 &&
    listed 9 18 23 && warned 0 "another run"; }
check "the first run keeps its last two" first_run
second_run() {
    trains "${run[@]}" --seed 7 || return 1
    there 18 20 23 30 && listed 10 20 30 && tracked 30 &&
        warned 1 "of another run or branch (iterations 18 and 23), which are neither counted nor removed"
}
check "a second run from scratch counts its own checkpoints and keeps the first run's" second_run
cp -r "$folder" "$work/two"
falls_back() {
    again damage 30
    trains "${run[@]}" --seed 7 --load "$folder" && loaded 20 &&
        warned 1 "the checkpoint of iteration 30 cannot be used" && warned 1 "another run" || return 1
    same_shards "$folder" "$work/two" 30 2 && listed 20 30 && there 18 20 23 30
}
check "newest checkpoint damaged: resumes bit-exactly from the previous one of the same run" falls_back
none_of_the_run() {
    again damage 30
    damage 20
    refused 6 "iter_0000030" "${run[@]}" --seed 7 --load "$folder" && there 18 20 23 30
}
check "no valid checkpoint of the same run: refused, the other run's is not used" none_of_the_run
garbage_list() {
    again damage 30
    echo "x" >"$folder/checkpoints_of_run.txt"
    trains "${run[@]}" --seed 7 --load "$folder" && loaded 23 &&
        warned 1 "checkpoints_of_run.txt is damaged" && warned 1 "checkpoints_of_run.txt was damaged" &&
        listed 18 20 23 30
}
check "damaged list of checkpoints: uses directory names, and two lines say so" garbage_list
older_folder() { # as saved by program versions without lists
    again rm "$folder/checkpoints_of_run.txt"
    trains "${run[@]}" --seed 7 --load "$folder" --train-iters 40 && loaded 30 && warned 0 "" &&
        listed 18 20 23 30 40 && there 30 40
}
check "no list of checkpoints: uses directory names" older_folder
branch() { # tracker|flag: how iteration 20 is chosen
    local step=()
    rm -rf "$folder"
    trains "${run[@]}" --train-iters 40 --keep-last-checkpoints 3 --exit-interval 37 && there 20 30 37 ||
        return 1
    if [ "$1" = tracker ]; then echo 20 >"$folder/latest_checkpointed_iteration.txt"; else step=(--ckpt-step 20); fi
    trains "${run[@]}" --train-iters 40 --load "$folder" --lr 1e-3 --override-opt_param-scheduler \
        --exit-interval 24 "${step[@]}" && loaded 20 || return 1
    there 20 24 30 37 && listed 20 24 && warned 1 "(iterations 30 and 37)" && tracked 24 || return 1
    trains "${run[@]}" --train-iters 40 --load "$folder" --lr 1e-3 --override-opt_param-scheduler \
        --exit-interval 32 && loaded 24 && listed 24 30 32 && there 30 32 37 || return 1
    damage 32
    trains "${run[@]}" --train-iters 32 --load "$folder" --lr 1e-3 --override-opt_param-scheduler &&
        loaded 30 && there 30 32 37 && tracked 32
}
check "after the tracker was set back, later checkpoints are kept and do not count" branch tracker
check "--ckpt-step: the same" branch flag
chosen() { # --ckpt-step neither needs nor believes the tracker, and does not fall back
    again rm "$folder/latest_checkpointed_iteration.txt"
    refused 6 "$folder has no checkpoint of iteration 19 (existing iterations: 18, 20, 23 and 30)" "${run[@]}" \
        --seed 7 --load "$folder" --ckpt-step 19 || return 1
    trains "${run[@]}" --seed 7 --load "$folder" --ckpt-step 20 && loaded 20 && warned 0 latest_ &&
        tracked 30 && same_shards "$folder" "$work/two" 30 2 || return 1
    damage 30
    refused 6 "pass --ckpt-step 20 to load the previous checkpoint" "${run[@]}" --seed 7 --load "$folder" \
        --ckpt-step 30 && ! grep -q '^ iteration ' "$work/out" || return 1
    echo 30 >"$folder/latest_checkpointed_iteration.txt"
    trains "${run[@]}" --seed 7 --load "$folder" --ckpt-step 20 --train-iters 20 && tracked 20
}
check "--ckpt-step loads that checkpoint or none" chosen
named() { # another run's checkpoint is at an iteration at which this run will save
    first_run && trains "${run[@]}" --seed 7 --exit-interval 20 && listed 10 20 || return 1
    trains "${run[@]}" --seed 7 --load "$folder" --exit-interval 23 && loaded 20 &&
        warned 1 "iteration 23 that its checkpoints_of_run.txt does not list; this run will replace it" &&
        listed 10 20 23
}
check "reports before training that another run's checkpoint will be replaced" named
finetunes() { # a separate lineage, even in the same directory
    again true
    trains "${run[@]}" --load "$folder" --finetune --train-iters 8 --lr-decay-iters 8 && listed 8 &&
        there 8 18 20 23 30 && warned 1 "(iterations 18, 20, 23 and 30)"
}
check "--finetune starts a separate lineage" finetunes

# --- a run that does not resume must not overwrite the checkpoints in its directory ---
untouched() { # TEXT FLAGS...: refused before training, and the directory is unchanged
    again true
    refused 6 "$1" "${run[@]}" "${@:2}" && ! grep -q '^ iteration ' "$work/out" || return 1
    diff -r "$folder" "$work/two" >/dev/null || { why="the folder has changed"; return 1; }
}
check "a forgotten --load: refused" untouched "a checkpoint of iteration 20, which this run would overwrite" \
    --seed 7
check "the same if only the last save would overwrite a checkpoint" untouched \
    "a checkpoint of iteration 23, which" \
    --save-interval 100 --train-iters 23
check "the same if --exit-interval ends the run there" untouched "a checkpoint of iteration 18, which" \
    --save-interval 100 --exit-interval 18
check "--finetune into the directory it loads from: refused" untouched "without --finetune" --load "$folder" \
    --finetune
from_elsewhere() { # loads iteration 20 of another directory
    cp -r "$work/two" "$work/elsewhere"
    echo 20 >"$work/elsewhere/latest_checkpointed_iteration.txt"
    untouched "a checkpoint of iteration 30, which" --load "$work/elsewhere" --seed 7
}
check "--load of another directory: refused" from_elsewhere
check "--load of a single checkpoint suggests its parent directory" untouched "use its parent folder" \
    --load \
    "$folder/iter_0000030"
free_iterations() { # saves only at iterations that have no checkpoint yet
    again true
    trains "${run[@]}" --save-interval 7 --train-iters 24 --lr-decay-iters 24 && there 18 20 21 23 24 30 &&
        listed 14 21 24
}
check "iterations without existing checkpoints: accepted" free_iterations

# --- the tracker ---
put() { printf "$1" >"$folder/latest_checkpointed_iteration.txt"; }
lost() { # TEXT ITERATION COMMAND...: resumes there with a line that contains TEXT; the result is unchanged
    again "${@:3}"
    trains "${run[@]}" --seed 7 --load "$folder" && loaded "$2" && warned 1 "$1" &&
        warned 1 "; resuming from the newest sound checkpoint in the folder" && tracked 30 &&
        same_shards "$folder" "$work/two" 30 2
}
check "no tracker: resumes from the run's newest checkpoint" lost \
    "latest_checkpointed_iteration.txt is missing although there are checkpoints" \
    30 rm "$folder/latest_checkpointed_iteration.txt"
check "an empty tracker: the same" lost "which is not an iteration" 30 put ""
check "a garbage tracker" lost "holds 'twelve', which is not an iteration" 30 put twelve
check "a tracker with a NUL byte" lost "which is not an iteration" 30 put '2\0'
no_tracker_and_damaged() { damage 30; rm "$folder/latest_checkpointed_iteration.txt"; }
check "no tracker and the newest checkpoint damaged: resumes from the run's previous one" lost \
    "the checkpoint of iteration 30 cannot be used" 20 no_tracker_and_damaged
piped() { rm "$folder/$1" && mkfifo "$folder/$1"; }
check "a FIFO as the tracker" lost "is not a plain file" 30 piped latest_checkpointed_iteration.txt
all_damaged() { # must not start from scratch and overwrite recoverable data
    again damage 30
    damage 20
    damage 23
    damage 18
    rm "$folder/latest_checkpointed_iteration.txt"
    refused 6 "iter_0000030" "${run[@]}" --seed 7 --load "$folder" && there 18 20 23 30
}
check "no tracker and no valid checkpoint: refused" all_damaged
only_others() {
    again rm -r "$folder/iter_0000030" "$folder/iter_0000020" "$folder/latest_checkpointed_iteration.txt"
    refused 6 "write the iteration to resume from" "${run[@]}" --seed 7 --load "$folder" && there 18 23
}
check "no tracker and only another run's checkpoints: refused" only_others
piped_manifest() {
    again piped iter_0000030/manifest.json
    trains "${run[@]}" --seed 7 --load "$folder" && loaded 20 &&
        warned 1 "iter_0000030/manifest.json is not a plain file" && same_shards "$folder" "$work/two" 30 2
}
check "a FIFO as manifest.json counts as damaged" piped_manifest
finish
