#!/usr/bin/env bash
# Spikes of loss and gradient norm are reported or skipped consistently on all ranks, and
# checkpoints contain the running means. A run that skips every step ends.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 7
data=$work/text_text_document
# With these small factors, ordinary noise counts as a spike every few steps once the running means
# have settled.
tight=(4 --gpus-per-node 2 --train-iters 64 --lr-decay-iters 64 --eval-iters 0 --loss-spike-factor 0.2 \
    --norm-spike-factor 0.2 --max-skipped-in-a-row 0)
spike_lines() { grep '^{"kind":"spike"' "$work/$1.jsonl"; }

# continues NAME FLAGS...: skipping depends on the running means, so a resumed run matches the full
# run only if they were saved.
continues() {
    local name=$1
    shift
    logged "$name" "${tight[@]}" --on-spike skip "$@" &&
        logged "$name.1" "${tight[@]}" --on-spike skip --save "$work/$name" --save-interval 1000 \
        --exit-interval 47 "$@" &&
        logged "$name.2" "${tight[@]}" --on-spike skip --load "$work/$name" "$@" || return 1
    [ "$(spike_lines "$name" | grep -c '"skipped":true')" -ge 3 ] &&
        [ "$(spike_lines "$name.2" | wc -l)" -ge 1 ] ||
        { why="only $(spike_lines "$name" | wc -l) spikes"; return 1; }
    [ "$(grep -c '"skipped":true' <(train_lines "$name"))" \
        -eq "$(spike_lines "$name" | sed 's/.*"iteration":\([0-9]*\),.*/\1/' | sort -u | wc -l)" ] ||
        { why="skipped steps and spikes differ"; return 1; }
    same_training "$name" "$name.2" 47
}
check "--on-spike skip, baseline: resumed bit-exactly" continues baseline
check "--on-spike skip, SDP4Bit: resumed bit-exactly" continues sdp4bit "${paper[@]}" \
    --verify-replicas-interval 1
reported() {
    logged report "${tight[@]}" && logged off "${tight[@]}" --loss-spike-factor 0 --norm-spike-factor 0 ||
        return 1
    grep -q 'WARNING: iteration .* spike: .* the step was applied' "$work/out" &&
        { why="spikes are reported with factors 0"; return 1; }
    [ "$(spike_lines report | grep -c '"skipped":false')" -ge 3 ] && [ -z "$(spike_lines off)" ] ||
        { why="$(spike_lines report | wc -l) spikes, with factors 0 $(spike_lines off | wc -l)"; return 1; }
    same_training report off
}
check "--on-spike report does not change training" reported
# A log line shows the mean loss of applied steps. If all its steps were skipped, it has no loss,
# not the loss of the spike.
no_mean() {
    local skipped applied
    logged none "${tight[@]}" --on-spike skip --log-interval 1 || return 1
    skipped=$(grep -c 'number of skipped iterations:   1 |' "$work/out") \
        applied=$(grep -c 'lm loss: .* number of skipped iterations:   0 |' "$work/out")
    [ "$skipped" -ge 3 ] && [ "$applied" -eq $((64 - skipped)) ] ||
        { why="$skipped steps skipped, $applied applied, of 64"; return 1; }
    ! grep -q 'lm loss: .* number of skipped iterations:   1 |' "$work/out" ||
        { why="the line of a skipped spike names its loss"; return 1; }
    [ "$(field none loss interval | wc -l)" -eq "$applied" ] ||
        { why="the JSON line of a skipped spike names its loss"; return 1; }
}
check "a log line with only skipped steps has no loss" no_mean
jumps() { # NAME FLAGS...: resumes a healthy run with an absurd learning rate
    local name=$1
    shift
    [ -d "$work/good" ] || logged good 4 --gpus-per-node 2 --train-iters 40 --eval-iters 0 \
        --save "$work/good" --save-interval 1000 || return 1
    rm -f "$work/$name.jsonl"
    train 4 --gpus-per-node 2 --eval-iters 0 --load "$work/good" --override-opt_param-scheduler --lr 3 \
        --min-lr 3 --lr-warmup-iters 0 --train-iters 90 --log-jsonl "$work/$name.jsonl" "$@"
}
jump() {
    jumps jump --exit-interval 50 || { say "exit code $?"; return 1; }
    [ -z "$(spike_lines good)" ] ||
        { why="the good run has spikes: $(spike_lines good | head -n 1)"; return 1; }
    grep -q 'WARNING: iteration      *42: spike: loss\|WARNING: iteration 4[1-4]: spike: loss' "$work/out" ||
        { why="no spike is reported"; return 1; }
}
check "the default factors detect a diverging run and no spikes in a healthy run" jump
only_skips() {
    jumps skip --on-spike skip --max-skipped-in-a-row 3
    error_names 4 "3 steps in a row were skipped" $?
}
check "--max-skipped-in-a-row ends a run with only spikes" only_skips
only_nan() {
    train 4 --gpus-per-node 2 --lr 1e37 --min-lr 0 --lr-warmup-iters 0 --on-nan skip --max-skipped-in-a-row 4
    error_names 4 "iteration 5 update: 4 steps in a row were skipped" $?
}
check "--max-skipped-in-a-row ends a run with only NaN" only_nan
finish
