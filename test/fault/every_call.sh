#!/usr/bin/env bash
# Makes one file operation of a save fail, or kills a rank there, in synchronous and asynchronous
# saves. By default tests a sample of the operations, with LONG=1 all of them. Expected:
# - The run ends with exit code 6 and one line, or continues if the operation was not essential.
# - The checkpoint in the tracker is complete and in the run's list. The previous one is deleted
#   only after a newer one is complete.
# - The same command then resumes and ends bitwise identical to an undisturbed run.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
shim=$BUILD/test/fault/shim.so
if [ ! -e "$shim" ]; then
    not_ok "$shim" "not built; run make BUILD=$BUILD test-programs"
    finish
fi
make_shard text 400 1
data=$work/text_text_document
folder=$work/save
# One layer. The save at iteration 4 deletes the checkpoint of iteration 2.
run=(--num-layers 1 --train-iters 4 --eval-iters 0 --log-interval 2 --save-interval 2
    --keep-last-checkpoints 1)

# spoil NP VARIABLE=VALUE... -- FLAGS...: runs with these variables of shim.c. A single rank runs
# without mpirun, whose start takes most of the time.
spoil() {
    local np=$1 variables=(LD_PRELOAD="$shim" SHIM_FOLDER="$folder" SHIM_MARK="$work/mark") exports=() v
    shift
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    rm -f "$work/mark"
    if [ "$np" = 1 ]; then
        {  # the group's redirection hides the shell's messages about killed processes
            timeout -k 5 "$LIMIT" env "${variables[@]}" "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" \
                --data-path "$data" "$@" >"$work/out" 2>"$work/err" </dev/null
        } 2>/dev/null
    else
        for v in "${variables[@]}"; do exports+=(-x "$v"); done
        timeout -k 5 "$LIMIT" "${launcher[@]}" "${exports[@]}" -np "$np" "$BUILD/train_gpt_cpu" \
            "${model[@]}" "${batch[@]}" --data-path "$data" "$@" \
            >"$work/out" 2>"$work/err" </dev/null
    fi
}
tracked() { cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null; }
# same_as_reference NP FOLDER ITERATION: checks that the checkpoint equals the undisturbed run's.
same_as_reference() {
    local name file found=0
    name=$(printf 'iter_%07d' "$3")
    for file in "$work/reference$1/$name"/mp_rank_00/*.safetensors; do
        cmp -s "$file" "$2/$name/mp_rank_00/${file##*/}" || return 1
        found=$((found + 1))
    done
    [ "$found" -eq "$1" ] && [ -s "$2/$name/manifest.json" ]
}
# spoiled_at NP MODE RANK N ERRNO: runs with a failure of operation N of RANK (ERRNO 0: the rank is
# killed) and checks the results as listed above. Sets $reached.
spoiled_at() {
    local np=$1 flag=$2 rank=$3 n=$4 number=$5 rc last list flags name
    flags=("${run[@]}" --save "$folder" --load "$folder")
    [ "$flag" = sync ] || flags+=(--async-save)
    rm -rf "$folder"
    cp -r "$work/at2.$np" "$folder"
    spoil "$np" SHIM_RANK="$rank" SHIM_AT="$n" SHIM_ERRNO="$number" -- "${flags[@]}"
    rc=$?
    reached=0
    [ ! -e "$work/mark" ] || reached=1
    local what
    what="operation $n, $(cat "$work/mark" 2>/dev/null)"
    if [ "$number" = 0 ] && [ $reached = 1 ]; then
        [ $rc -ne 0 ] && [ $rc -ne 124 ] || { why="$what: exit code $rc after kill -9"; return 1; }
    elif [ $rc -ne 0 ]; then
        [ $reached = 1 ] && error_names 6 "$folder" $rc || { why="$what: exit code $rc; $why"; return 1; }
    else # a run that continued must have saved everything
        [ "$(tracked "$folder")" = 4 ] &&
            grep -q "successfully loaded checkpoint from $folder at iteration 2" "$work/out" ||
            { why="$what: ended successfully with $(tracked "$folder")"; return 1; }
    fi
    last=$(tracked "$folder")
    case $last in 2 | 4) ;; *) why="$what: the tracker names '$last'"; return 1 ;; esac
    list=$(tr '\n' ' ' <"$folder/checkpoints_of_run.txt")
    case "$last: $list" in
        "2: 2 " | "4: 2 4 ") ;;
        "2: 2 4 ") [ "$number" = 0 ] || { why="$what: the list is ahead of the tracker"; return 1; } ;;
        *) why="$what: the tracker names $last, the list says $list"; return 1 ;;
    esac
    [ -e "$folder/$(printf 'iter_%07d' "$last")" ] ||
        { why="$what: the checkpoint of iteration $last is gone"; return 1; }
    for name in "$folder"/iter_*; do # every directory with a final name must be complete
        same_as_reference "$np" "$folder" "$((10#${name##*_}))" ||
            { why="$what: ${name##*/} is incomplete"; return 1; }
    done
    # If a run is killed after renaming the directory and before renaming the list, the checkpoint
    # is complete but not listed. The next run prints a warning before it overwrites the checkpoint.
    local unlisted=0
    [ "$last" = 4 ] || [ ! -e "$folder/iter_0000004" ] || grep -qx 4 "$folder/checkpoints_of_run.txt" ||
        unlisted=1
    spoil "$np" SHIM_AT=0 -- "${flags[@]}" || { say "$what: the next run ended with exit code $?"; return 1; }
    grep -q "successfully loaded checkpoint from $folder at iteration $last" "$work/out" ||
        { why="$what: the next run did not resume from $last"; return 1; }
    [ "$(grep -c WARNING "$work/out")" -eq $unlisted ] &&
        [ "$(grep -c "iteration 4 that its checkpoints_of_run.txt does not list" "$work/out")" -eq $unlisted ] ||
        { why="$what: $(grep -m 1 WARNING "$work/out" || echo "no warning of an unlisted one")"; return 1; }
    [ "$(tracked "$folder")" = 4 ] && same_as_reference "$np" "$folder" 4 ||
        { why="$what: the next run ended differently"; return 1; }
    [ "$last" = 4 ] || [ "$(ls -A "$folder" | tr '\n' ' ')" = \
        "checkpoints_of_run.txt iter_0000004 latest_checkpointed_iteration.txt " ] ||
        { why="$what: left $(ls -A "$folder" | tr '\n' ' ')"; return 1; }
}
# every NP MODE RANK ERRNO STRIDE OPERATIONS: tests operations 1, 1 + STRIDE, ... of a save and
# checks that the save has at least OPERATIONS operations.
every() {
    local n=1 count=0 stride=$5
    [ "${LONG:-0}" != 1 ] || stride=1
    for (( ; ; n += stride)); do
        spoiled_at "$1" "$2" "$3" "$n" "$4" || return 1
        [ $reached = 1 ] || break
        count=$((count + 1))
    done
    [ "$n" -ge "$6" ] || { why="only $n operations"; return 1; }
    echo "# $1 ranks, $2, rank $3, errno $4: $count of $n operations"
}

references() { # NP
    trains "$1" "${run[@]}" --keep-last-checkpoints 0 --save "$work/reference$1" || return 1
    mkdir "$work/at2.$1" && cp -r "$work/reference$1/iter_0000002" "$work/at2.$1/" &&
        echo 2 >"$work/at2.$1/latest_checkpointed_iteration.txt" &&
        echo 2 >"$work/at2.$1/checkpoints_of_run.txt"
}
check "reference of one rank" references 1
check "reference of two ranks" references 2
full=28 broken=5 killed=0  # ENOSPC, EIO, kill -9
check "an operation fails, disk full" every 1 sync 0 $full 23 80
check "killed at an operation" every 1 sync 0 $killed 21 80
check "async save: an operation fails, disk full" every 1 async 0 $full 6 35
check "async save: killed at an operation" every 1 async 0 $killed 5 35
# Rank 1 writes only its shard; rank 0 writes everything else too.
check "two ranks, async save: an operation of rank 0 fails" every 2 async 0 $broken 13 35
check "two ranks, async save: rank 0 killed" every 2 async 0 $killed 12 35
check "two ranks: an operation of rank 1 fails" every 2 sync 1 $broken 40 40
check "two ranks, async save: an operation of rank 1 fails" every 2 async 1 $broken 4 6
check "two ranks, async save: rank 1 killed" every 2 async 1 $killed 4 6
finish
