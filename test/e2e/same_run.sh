#!/usr/bin/env bash
# Ranks of one job must have the same flags, build, data and directories. A mismatch (for example a
# machine with an outdated copy) ends the run before the first step with one line that names the
# rank. Here all ranks run on one machine; ranks 2 and 3 get different arguments.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 7
make_shard other 400 8
make_shard short 300 7
data=$work/text_text_document
common=("${model[@]}" "${batch[@]}" --gpus-per-node 2)
# Each rank selects its own command, because mpirun of Open MPI 5.0.7 crashes if given two programs.
cat >"$work/rank.sh" <<'END'
half=$1 first=$2 second=$3
shift 3
if [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" -lt "$half" ]; then exec $first "$@"; fi
exec $second "$@"
END
# of_two "COMMAND" "COMMAND" FLAGS...: ranks 0 and 1 run the first command, ranks 2 and 3 the
# second. Commands are split at spaces.
of_two() { timeout -k 5 "$LIMIT" "${launcher[@]}" -np 4 bash "$work/rank.sh" 2 "$@" >"$work/out" \
    2>"$work/err" </dev/null; }
# apart "FLAGS" "FLAGS": like of_two, with commands that run the trainer with common and these
# flags.
apart() { of_two "$trainer ${common[*]} $1" "$trainer ${common[*]} $2"; }
# differ CODE TEXT "FLAGS" "FLAGS": checks that rank 2 prints one error line before the first step.
differ() {
    local code=$1 text=$2 rc
    apart "$3" "$4"
    rc=$?
    [ $rc -eq "$code" ] || { say "exit code $rc instead of $code"; return 1; }
    [ "$(grep -c '^error: ' "$work/err")" -eq 1 ] && grep -q '^error: rank 2 ' "$work/err" &&
        grep -qF -- "$text" "$work/err" || { say "rank 2 did not print the expected line"; return 1; }
    ! grep -q '^ iteration' "$work/out" || { why="a step was taken"; return 1; }
}
same() { # "FLAGS" "FLAGS": trains successfully
    apart "$1" "$2"
    local rc=$?
    [ $rc -eq 0 ] && grep -q '^ iteration  *12/' "$work/out" || say "exit code $rc"
}
d="--data-path $data"
# Ranks 2 and 3 run a copy of the program with another commit hash. Only its first digit is changed,
# because the linker may share the end of the constant with a short one such as "4".
other_build() {
    local commit other
    commit=$("$trainer" --version | sed -n 's/.* commit \([0-9a-f]\{7,\}\).*/\1/p')
    case $commit in 0*) other=1${commit#?} ;; *) other=0${commit#?} ;; esac
    sed "s/$commit/$other/g" "$trainer" >"$work/old_build"
    chmod +x "$work/old_build"
    of_two "$trainer" "$work/old_build" "${common[@]}" --data-path "$data"
    local rc=$?
    [ $rc -eq 3 ] && [ "$(grep -c '^error: ' "$work/err")" -eq 1 ] &&
        grep -q "^error: rank 2 .*commit $other.*, but rank 0 runs .*$commit" "$work/err" ||
        say "exit code $rc"
}
if "$trainer" --version |
    grep -q ' commit [0-9a-f]\{7,\}'; then check "another build" other_build; else skip "another build" \
    "the program was built without a commit hash"; fi
check "equal flags" same "$d" "$d"
check "learning rate" differ 2 "--lr is 0.1 here and 0.003 on rank 0" "$d" "$d --lr 0.1"
check "a flag on some ranks only" differ 2 "--hadamard-transform is true here and false on rank 0" \
    "$d --quantized-gradients" "$d --quantized-gradients --hadamard-transform"
check "model shape" differ 2 "--hidden-size is 64 here and 32 on rank 0" "$d" "$d --hidden-size 64"
check "seeds" differ 2 "--seed is 99 here and 1234 on rank 0" "$d" "$d --seed 99"
ramps() {
    local common=("${model[@]}" --gpus-per-node 2 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 \
        --train-samples 200 --eval-iters 0 --split 90,5,5)
    differ 2 "--rampup-batch-size is " "$d --rampup-batch-size 4 4 16" "$d --rampup-batch-size 8 4 16"
}
check "batch size ramp-up" ramps
check "a --no- flag" differ 2 \
    "check_for_nan_in_loss_and_grad is false here and true on rank 0" "$d" \
    "$d --no-check-for-nan-in-loss-and-grad"
check "saving on some ranks only" differ 2 "--save is null here" "$d --save $work/save --save-interval 5" \
    "$d --save-interval 5"
check "the same number in another notation" same "$d --lr 3e-3" "$d --lr 0.003"
check "log flags on the first rank only" same \
    "$d --log-jsonl $work/log.jsonl --tensorboard-dir $work/events --log-timers-to-tensorboard" "$d"
cp "$work/text_text_document.bin" "$work/copy.bin"
cp "$work/text_text_document.idx" "$work/copy.idx"
check "the same data at another path" same "$d" "--data-path $work/copy"
check "other data" differ 5 "$work/other_text_document differs from rank 0's copy" "$d" \
    "--data-path $work/other_text_document"
check "data with a different size" differ 5 "$work/short_text_document differs from rank 0's copy" "$d" \
    "--data-path $work/short_text_document"
check "more shards" differ 2 "--data-path is" "$d" "--data-path 1 $data 1 $work/copy"
check "other weights" differ 5 "text_text_document differs from rank 0's copy" "--data-path 1 $data 1 $work/copy" \
    "--data-path 2 $data 1 $work/copy"
check "another save directory" differ 6 "$work/b is not the one that rank 0 sees" \
    "$d --save $work/a --save-interval 5" "$d --save $work/b --save-interval 5"
untouched() { local left; left=$(ls -A "$work/a"); [ -z "$left" ] || { why="found $left"; return 1; }; }
check "the other save directory stays empty" untouched
save="--save $work/a --save-interval 6"
check "a run to load from" same "$d $save" "$d $save"
mkdir -p "$work/empty"
check "a load directory without the checkpoint" differ 6 \
    "the checkpoint of iteration 12, which rank 0 loads, is not in $work/empty" \
    "$d --load $work/a --train-iters 14" "$d --load $work/empty --train-iters 14"
finish
