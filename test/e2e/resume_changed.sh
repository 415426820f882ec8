#!/usr/bin/env bash
# A run resumes with a different batch size, length or evaluation schedule. Tests the number of
# remaining samples, the check that there is enough data, and the notice that the order of the data
# changes.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
says() { grep -qF -- "$1" "$work/out" || { why="no line '$1'"; return 1; }; }
silent() { ! grep -qF -- "$1" "$work/out" || { why="'$1' was printed"; return 1; }; }
last_line() { [ "$(field "$1" consumed_samples | tail -n 1)" = "$2" ] ||
    { why="$1 ends at iteration and samples $(field "$1" consumed_samples | tail -n 1), not $2"; return 1; \
    }; }
from() { # DIR ITERATION NAME: copies a directory without the checkpoints after ITERATION
    rm -rf "${work:?}/$3"
    cp -r "$work/$1" "$work/$3" && echo "$2" >"$work/$3/latest_checkpointed_iteration.txt"
}

# --- --train-samples ---
in_samples=("${model[@]}" --train-samples 320 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --log-interval
    1 --eval-interval 4 --eval-iters 1 --split 80,15,5 --data-path "$data")
sampled() { # NAME NP FLAGS...
    local log=$work/$1.jsonl np=$2
    shift 2
    rm -f "$log"
    ranks "$np" "${in_samples[@]}" --log-jsonl "$log" "$@" ||
        { say "np $np $* ended with an error"; return 1; }
}
sampled half 2 --micro-batch-size 4 --global-batch-size 8 --save "$work/half" --save-interval 100 \
    --exit-interval 20 || not_ok "the first half of a run in samples" "$why"
larger() { # 20 iterations read 160 of 320 samples; 10 iterations of 16 read the rest
    sampled larger 4 --micro-batch-size 4 --load "$work/half" && says "training ends at iteration 30" &&
        last_line larger "30 320"
}
check "--train-samples: a larger batch uses the remaining samples" larger
smaller() { # 40 iterations of 4, with correspondingly more evaluations
    sampled smaller 1 --micro-batch-size 4 --load "$work/half" --save "$work/smaller" --save-interval 30 &&
        last_line smaller "60 320" &&
        from smaller 30 again && sampled again 1 --micro-batch-size 4 --load "$work/again" &&
            last_line again "60 320"
}
check "--train-samples: a smaller batch too, and resumed once more" smaller
without_ramp() { # saved during a ramp-up from 8 to 16 samples per batch
    sampled ramp 1 --micro-batch-size 4 --global-batch-size 16 --rampup-batch-size 8 8 80 --save \
        "$work/ramp" --save-interval 100 --exit-interval 5 &&
        sampled no_ramp 1 --micro-batch-size 4 --global-batch-size 16 --load "$work/ramp" &&
            last_line no_ramp "22 312"
}
check "--train-samples: ramp-up removed" without_ramp

# --- evaluations and data ---
often=(--train-iters 60 --global-batch-size 32 --eval-interval 1 --eval-iters 2 --lr-decay-style constant
    --lr-warmup-iters 0 --min-lr 0)
trains 2 "${often[@]}" --save "$work/often" --save-interval 20 || not_ok "a run with frequent evaluations" \
    "$why"
skip_train() { trains 2 "${often[@]}" --eval-interval 1000 --load "$work/often" --skip-train &&
    says "validation loss at iteration 60 on validation set"; }
check "--skip-train requires only the validation samples that it reads" skip_train
beyond() { trains 2 "${often[@]}" --train-iters 10 --load "$work/often" --override-opt_param-scheduler &&
    says "the checkpoint is at iteration 60 of 10, so nothing is left to train" && says "on validation set"; }
check "a checkpoint beyond --train-iters is evaluated" beyond
from often 20 small
fewer() { # 20 evaluations of 64 samples each, then 40 of 8
    trains 2 "${often[@]}" --global-batch-size 4 --load "$work/small" --override-opt_param-scheduler &&
        says "validation loss at iteration 60 on validation set"
}
check "a smaller batch after larger evaluations" fewer

# --- the order of the data ---
order="training continues with the data in a different order"
whole=(--train-iters 40 --global-batch-size 64 --lr-decay-style constant --lr-decay-iters 1000
    --lr-warmup-iters 0 --min-lr 0)
logged whole 2 "${whole[@]}" --save "$work/whole" --save-interval 20 ||
    not_ok "a run whose length grows" "$why"
from whole 20 as_it_was
as_it_was() { logged as_it_was 2 "${whole[@]}" --load "$work/as_it_was" && silent "$order" &&
    same_training whole as_it_was 20; }
check "an unchanged run prints no notice about the order of the data" as_it_was
longer() { logged longer 2 "${whole[@]}" --train-iters 80 --load "$work/as_it_was" && says "$order" &&
    ! same_training whole longer 20 && why=; }
check "a longer run reads the data in a different order, and says so" longer
more_evaluations() { # a different number of validation samples and therefore of epochs
    trains 2 "${whole[@]}" --load "$work/as_it_was" && silent "the validation split" || return 1
    trains 2 "${whole[@]}" --eval-interval 2 --eval-iters 20 --load "$work/as_it_was" &&
        says "the validation split has" && silent "the training split has"
}
check "more evaluations read the validation data in a different order, and say so" more_evaluations
lasts() { # 60 iterations of 64 samples, then 540 of 8
    trains 2 "${whole[@]}" --train-iters 60 --save "$work/lasts" --save-interval 60 --eval-iters 0 &&
        logged lasts 2 "${whole[@]}" --train-iters 600 --global-batch-size 8 --load "$work/lasts" \
            --eval-iters 0 --override-opt_param-scheduler && last_line lasts "600 8160"
}
check "there is enough data after larger batches" lasts
# --- flags in JSON ---
latin1() { # a directory name that is not UTF-8
    local folder=$work/caf$'\xe9'
    trains 2 --train-iters 4 --save "$folder" --save-interval 4 --log-jsonl "$work/latin1.jsonl" || return 1
    dev/checkpoint_info "$folder" >/dev/null 2>"$work/err" || { say "no valid manifest"; return 1; }
    python3 - "$work/latin1.jsonl" <<'END' || say "the log is not readable"
import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    json.loads(line)
END
}
check "log and manifest are readable if a directory name is not UTF-8" latin1
long_paths() {
    local deep=$work/shared_file_system_of_the_cluster/project_with_a_long_name_for_a_folder
    mkdir -p "$deep" && for n in a b; do for x in bin idx; do cp "$data.$x" "$deep/pile_$n.$x"; done; done
    trains 2 --data-path "$deep/pile_a" --save "$work/paths" --save-interval 6 --exit-interval 6 &&
        trains 2 --data-path "$deep/pile_b" --load "$work/paths" && says 'pile_a"]' && says 'pile_b"]'
}
check "the notice about changed data shows the part in which long paths differ" long_paths
finish
