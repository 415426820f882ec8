#!/usr/bin/env bash
# Out of memory: makes the n-th allocation of the program fail (memory_shim.c), alone or with all
# later ones, for a sample of n; with LONG=1 for every n. The program must end with exit code 3 and
# one clear line, or work without the memory. It must not crash, hang or leave an incomplete file.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
shim=$BUILD/test/fault/memory_shim.so
if [ ! -e "$shim" ]; then
    not_ok "memory_shim.so" "not built; run make BUILD=$BUILD test-programs"
    finish
fi
if ldd "$BUILD/train_gpt_cpu" | grep -q libasan; then
    skip "out of memory" "sanitizers have their own allocator"
    finish
fi
export OMPI_MCA_plm=isolated  # one rank without mpirun needs no launch agent

# with_fault AT LAST PROGRAM ARGUMENTS...: runs the program. Allocation AT and the next LAST
# allocations fail.
with_fault() {
    local at=$1 last=$2 program=$3
    shift 3
    timeout -k 5 "$LIMIT" env LD_PRELOAD="$shim" MEMORY_FAULT_PROGRAM="$program" MEMORY_FAULT_AT="$at" \
        MEMORY_FAULT_LAST="$last" MEMORY_FAULT_COUNT="$work/count" \
        "$BUILD/$program" "$@" >"$work/out" 2>"$work/err" </dev/null
}
# ended_well RC SOUND: checks that the exit code is 3 with one line about memory, or 0. Then the
# command SOUND checks the output.
ended_well() {
    local rc=$1 lines
    lines=$(grep -ac '^error: ' "$work/err")
    if [ "$rc" -eq 3 ]; then
        [ "$lines" -eq 1 ] || { say "$lines error lines"; return 1; }
        grep -aqE '^error: .*(out of memory|no memory)' "$work/err" ||
            { say "the error is not about memory"; return 1; }
    elif [ "$rc" -ne 0 ]; then
        say "exit code $rc"
        return 1
    fi
    "$2" "$rc" || say "${why:-$2 failed}"
}
# every NAME MOST SOUND PREPARE PROGRAM ARGUMENTS...: tests at most MOST values of n (all with
# LONG=1). The n-th allocation fails alone, then with all later ones. PREPARE is called before each
# run, and SOUND after it with the exit code.
every() {
    local name=$1 most=$2 sound=$3 prepare=$4 total step at last refused=0 tried=0
    shift 4
    $prepare
    with_fault 0 0 "$@"
    local rc=$?
    [ $rc -eq 0 ] || { say "without a fault it ended with exit code $rc"; return 1; }
    total=$(cat "$work/count")
    [ "$total" -ge 10 ] || { why="only $total allocations were seen"; return 1; }
    step=1
    [ "${LONG:-0}" = 1 ] && most=$((20 * most))
    [ "$total" -le "$most" ] || step=$(((total + most - 1) / most))
    for ((at = 1; at <= total; at += step)); do
        for last in 0 1000000000; do
            $prepare
            with_fault "$at" "$last" "$@"
            rc=$?
            tried=$((tried + 1))
            [ $rc -ne 3 ] || refused=$((refused + 1))
            ended_well $rc "$sound" || { why="allocation $at of $total, and $last after it: $why"; return 1; }
        done
    done
    [ $((refused * 2)) -ge $tried ] || { why="of $tried faults only $refused had an effect"; return 1; }
    echo "# $name: $total allocations, $tried faults, $refused runs refused, the others succeeded"
}

# --- the tools: the output is the old shard or the complete new one ---
make_text "$work/text.jsonl" 40 3
vocabulary=(--vocab-file test/golden/tokenizer/vocab.json --merge-file test/golden/tokenizer/merges.txt)
preprocess=(preprocess_data --input "$work/text.jsonl" --append-eod --workers 2 --output-prefix "$work/made")
old_shard() {
    rm -f "$work"/made_text_document.*
    printf old >"$work/made_text_document.bin"
    printf old >"$work/made_text_document.idx"
}
same_shard() { cmp -s "$work/made_text_document.bin" "$work/$1.bin" &&
    cmp -s "$work/made_text_document.idx" "$work/$1.idx"; }
whole_shard() { # exit code
    if [ "$1" -eq 0 ]; then same_shard whole; else same_shard old || same_shard whole; fi ||
        why="the shard is incomplete"
    same_shard whole || same_shard old
}
old_shard
cp "$work/made_text_document.bin" "$work/old.bin"
cp "$work/made_text_document.idx" "$work/old.idx"
tool() { # NAME MOST ARGUMENTS...
    local name=$1 most=$2
    shift 2
    "$BUILD/$1" "${@:2}" >/dev/null 2>"$work/err" || { say "it fails without a fault"; return 1; }
    cp "$work/made_text_document.bin" "$work/whole.bin"
    cp "$work/made_text_document.idx" "$work/whole.idx"
    every "$name" "$most" whole_shard old_shard "$@"
}
check "preprocess_data, bytes" tool bytes 100 "${preprocess[@]}" --tokenizer-type Byte
check "preprocess_data, BPE" tool bpe 100 "${preprocess[@]}" "${vocabulary[@]}"
make_shard first 20 1
make_shard second 30 2
check "merge_datasets" tool merge 100 merge_datasets --input "$work/first_text_document" \
    "$work/second_text_document" --output-prefix "$work/made_text_document"

# --- the trainer on one rank: startup, training, a checkpoint; the --save directory is valid ---
make_shard data 200 5
data=$work/data_text_document
start=(train_gpt_cpu "${model[@]}" "${batch[@]}" --data-path "$data" --train-iters 2 --lr-warmup-iters 0 \
    --split 100,0,0 --eval-iters 0)
nothing() { :; }
fine() { :; }
every_file() { start+=(--save "$work/saved" --save-interval 1 --log-jsonl "$work/log.jsonl" \
    --tensorboard-dir "$work/tensorboard" --log-progress --load "$work/saved"); }
empty_folders() { rm -rf "$work/saved" "$work/log.jsonl" "$work/tensorboard"; }
saved_is_whole() { # exit code
    [ "$1" -ne 0 ] || [ -e "$work/saved/latest_checkpointed_iteration.txt" ] ||
        { why="nothing was saved"; return 1; }
    [ ! -e "$work/saved/latest_checkpointed_iteration.txt" ] ||
        dev/checkpoint_info "$work/saved" >/dev/null 2>&1 || { why="the checkpoint is incomplete"; return 1; }
}
check "the trainer: startup and steps" every start 10 fine nothing "${start[@]}"
every_file
check "the trainer: checkpoints and logs" every all 7 saved_is_whole empty_folders "${start[@]}"
"$BUILD/train_gpt_cpu" "${start[@]:1}" >/dev/null 2>&1
mv "$work/saved" "$work/kept"
start_again() {
    empty_folders
    cp -r "$work/kept" "$work/saved"
}
check "the trainer: loading a checkpoint" every load 4 saved_is_whole start_again "${start[@]}" \
    --train-iters 3 --override-opt_param-scheduler

# --- one of two ranks is out of memory: the job ends with one line ---
unset OMPI_MCA_plm
alone() { # AT: index of rank 1's allocation that fails
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 env LD_PRELOAD="$shim" MEMORY_FAULT_PROGRAM=train_gpt_cpu \
        MEMORY_FAULT_RANK=1 MEMORY_FAULT_AT="$1" \
        "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" --train-iters 2 \
        --lr-warmup-iters 0 --split 100,0,0 --eval-iters 0 >"$work/out" 2>"$work/err" </dev/null
    local rc=$?
    [ $rc -eq 3 ] || { say "allocation $1 of rank 1: exit code $rc"; return 1; }
    ended_well $rc fine
}
for at in 20 90 160; do check "one of two ranks, allocation $at" alone $at; done

# --- the thread of an asynchronous save is out of memory: the thread must not call MPI, and the job
# ends with one line that names the rank ---
async_save() { # RANK AT: index of the failing allocation in the rank's other threads
    rm -rf "$work/async"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 env LD_PRELOAD="$shim" MEMORY_FAULT_PROGRAM=train_gpt_cpu \
        MEMORY_FAULT_RANK="$1" MEMORY_FAULT_THREAD=1 MEMORY_FAULT_AT="$2" \
        MEMORY_FAULT_COUNT="$work/count" "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" \
        --data-path "$data" --train-iters 2 --lr-warmup-iters 0 --split 100,0,0 --eval-iters 0 \
        --save "$work/async" --save-interval 1 --async-save >"$work/out" 2>"$work/err" </dev/null
}
in_a_thread() { # RANK
    async_save "$1" 0 || { say "without a fault it ended with exit code $?"; return 1; }
    local total at rc
    total=$(cat "$work/count")
    [ "$total" -ge 4 ] || { why="only $total allocations of threads were seen"; return 1; }
    for at in 1 $((total / 3 + 1)) $((2 * total / 3 + 1)) "$total"; do
        async_save "$1" "$at"
        rc=$?
        [ $rc -eq 3 ] || { say "allocation $at of $total: exit code $rc"; return 1; }
        ended_well $rc fine || { why="allocation $at of $total: $why"; return 1; }
        grep -q "^error: rank $1 .*save checkpoint: .*memory" "$work/err" ||
            { say "allocation $at of $total: the error line does not name rank $1"; return 1; }
        ! grep -q 'MPI_Abort' "$work/err" ||
            { why="allocation $at of $total: a thread calls MPI_Abort"; return 1; }
    done
}
for rank in 0 1; do check "the saving thread of rank $rank" in_a_thread $rank; done
finish
