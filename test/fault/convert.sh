#!/usr/bin/env bash
# convert_checkpoint runs out of disk space or is killed at any file operation: the output directory
# is complete or absent, and the next attempt succeeds.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
shim=$BUILD/test/fault/shim.so
[ -e "$shim" ] || { not_ok "$shim" "not built; run make BUILD=$BUILD test-programs"; finish; }
# The outer redirection hides the shell's messages about killed processes.
convert() {
    { timeout -k 5 "$LIMIT" "$BUILD/convert_checkpoint" "$@" >"$work/out" 2>"$work/err" </dev/null; } \
        2>/dev/null
}
wrong() { why=$1; }

# at_calls STEP ERRNO GOOD FLAGS...: runs the converter repeatedly; in each run another operation in
# $work/to fails (every STEP-th one). GOOD checks the output; its argument is 1 if the run failed.
at_calls() {
    local step=$1 errno=$2 good=$3 at rc
    shift 3
    for ((at = 1; at < 1000; at += step)); do
        rm -f "$work/mark"
        LD_PRELOAD=$shim SHIM_FOLDER=$work/to SHIM_MARK=$work/mark SHIM_AT=$at SHIM_ERRNO=$errno convert "$@"
        rc=$?
        [ -e "$work/mark" ] || break
        case $rc in
        0) ;; # the operation was not essential
        6) [ "$errno" -ne 0 ] && error_names 6 "" 6 ;;
        137) [ "$errno" -eq 0 ] ;;
        *) false ;;
        esac || { wrong "call $at ($(cat "$work/mark")): exit code $rc; $(head -n 1 "$work/err")"; return 1; }
        "$good" $((rc != 0)) || { why="call $at ($(cat "$work/mark")): $why"; return 1; }
        rm -rf "$work/to/hf" "$work/to/run"
    done
    [ "$rc" -eq 0 ] && [ "$at" -gt 10 ] || { wrong "after $((at - 1)) calls: exit code $rc"; return 1; }
    "$good" 0 && rm -rf "$work/to"
}
exported() { # FAILED
    if [ ! -e "$work/to/hf" ]; then [ "$1" -eq 1 ] || wrong "no output directory"; return; fi
    diff -r "$work/hf" "$work/to/hf" >"$work/diff" || wrong "incomplete output directory: $(head -n 1 "$work/diff")"
    [ -z "$why" ]
}
imported() { # FAILED
    if [ ! -e "$work/to/run/iter_0000000" ]; then [ "$1" -eq 1 ] || wrong "no checkpoint"; return; fi
    rm -rf "$work/look"
    convert --load "$work/to/run" --to-hf "$work/look" --dtype fp32 && cmp "$work/look/model.safetensors" \
        "$work/fp32/model.safetensors" >"$work/diff" || wrong "incomplete checkpoint"
    [ -z "$why" ]
}

convert --from-hf test/golden/hf --save "$work/run" --make-vocab-size-divisible-by 8 &&
    convert --load "$work/run" --to-hf "$work/hf" --max-shard-size 1 &&
    convert --load "$work/run" --to-hf "$work/fp32" --dtype fp32 ||
    not_ok "the golden directory" "$(cat "$work/err")"
out=(--load "$work/run" --to-hf "$work/to/hf" --max-shard-size 1)
in=(--from-hf "$work/fp32" --save "$work/to/run" --make-vocab-size-divisible-by 8)
check "export, disk full at every operation" at_calls 1 28 exported "${out[@]}"
check "export, killed at every operation" at_calls 1 0 exported "${out[@]}"
# every_call.sh covers every operation of a save.
check "import, disk full at every fifth operation" at_calls 5 28 imported "${in[@]}"
check "import, killed at every fifth operation" at_calls 5 0 imported "${in[@]}"
finish
