# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154,SC2015 # test/lib.sh is sourced first
# Shared by the scripts in test/e2e that run build/convert_checkpoint.

# convert FLAGS...: runs the converter and returns its exit code. Messages go to $work/err.
convert() { timeout -k 5 "$LIMIT" "$BUILD/convert_checkpoint" "$@" >"$work/out" 2>"$work/err" </dev/null; }
converts() { convert "$@" || say "convert_checkpoint $* ended with exit code $?"; }
same_folders() { diff -r "$1" "$2" >"$work/diff" || { why=$(head -n 1 "$work/diff"); return 1; }; }

# round_trip NAME DTYPE FLAGS...: exports the run's checkpoint, imports it and exports it again.
round_trip() {
    local folder=$work/$1.$2 run=$work/$1 dtype=$2
    shift 2
    converts --load "$run" --to-hf "$folder" --dtype "$dtype" &&
        converts --from-hf "$folder" --save "$folder.back" --make-vocab-size-divisible-by 8 "$@" &&
        converts --load "$folder.back" --to-hf "$folder.again" --dtype "$dtype" &&
        same_folders "$folder" "$folder.again"
}

# no_convert CODE TEXT FLAGS...: expects one error line and no output in the folder "none".
no_convert() {
    local code=$1 text=$2
    shift 2
    convert "$@"
    error_names "$code" "$text" $? && { [ ! -e "$work/none" ] && [ ! -e "$work/.none.tmp" ] ||
        { why="the output was not removed"; return 1; }; }
}
evaluated() { # NAME FOLDER FLAGS...: writes the validation loss of the checkpoint to $work/NAME.loss
    local name=$1 folder=$2
    shift 2
    logged "$name" 1 --load "$folder" --skip-train --eval-iters 4 \
        --override-opt_param-scheduler "$@" &&
        field "$name" loss valid | cut -d ' ' -f 2 >"$work/$name.loss" && [ -s "$work/$name.loss" ]
}
# PYTHON selects an interpreter with torch and transformers.
PYTHON=${PYTHON:-python3}
has_transformers() { "$PYTHON" -c 'import torch, transformers' 2>/dev/null; }
# opened FOLDER FLAGS...: checks that transformers loads the folder.
opened() { "$PYTHON" dev/ref/check_hf_folder.py "$@" >"$work/out" 2>&1; }
# reproduces_golden_logits GOLDEN: imports and exports a golden model and checks that transformers
# computes its golden logits from the result.
reproduces_golden_logits() {
    local name=${1##*/}
    converts --from-hf "$1" --save "$work/$name" --make-vocab-size-divisible-by 8 &&
        converts --load "$work/$name" --to-hf "$work/$name.hf" --dtype fp32 &&
        opened "$work/$name.hf" --logits "$1/logits.golden" ||
        { why=${why:-$(tail -n 1 "$work/out")}; return 1; }
}
