#!/usr/bin/env bash
# Compares SDP4Bit with bf16 gradients on a fresh Debian or Ubuntu machine in a few minutes.
# Installs missing packages, builds (except in the tarball of `make dist`), and converts text that
# every such machine has (C headers and documentation under /usr) to Megatron shards. Then trains a
# small GPT on 4 ranks as 2 nodes x 2, once with bf16 gradients and once with SDP4Bit, with the same
# data and seed.
# Writes only to build/ and to the folder given by --out.
# Exit codes: 0 if all goals are met (losses within 1 %, at least 3.5x fewer bytes between nodes), 1
# if a goal is missed, 130 if interrupted, otherwise the exit code of the failed step.
# shellcheck source-path=SCRIPTDIR source=common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/quickstart.sh [--iters N] [--out FOLDER] [--no-install]

Installs missing packages, builds, trains a small GPT twice (bf16 gradients; SDP4Bit) on text found on
this machine, and compares the losses and the bytes sent.

  --iters N      training iterations per run [400]
  --out FOLDER   folder for shards, logs and the plot [runs/quickstart]
  --no-install   do not install packages; list the missing ones and exit
  --help         print this help
END
}

iterations=400 out=runs/quickstart no_install=0
while [ $# -gt 0 ]; do
    case $1 in
    --iters) iterations=${2-}; shift ;;
    --out) case ${2-} in '' | /*) out=${2-} ;; *) out=$caller/$2 ;; esac; shift ;;
    --no-install) no_install=1 ;;
    --help | -h) usage; exit 0 ;;
    *) die 2 "unknown argument $1; see scripts/quickstart.sh --help" ;;
    esac
    shift || die 2 "the last flag needs a value; see scripts/quickstart.sh --help"
done
[[ $iterations =~ ^[1-9][0-9]*$ ]] || die 2 "--iters must be a positive number, not '$iterations'"
[ -n "$out" ] || die 2 "--out needs a folder"

interrupted() { # SIGNAL CODE
    printf '\ninterrupted by %s; no comparison was made\n' "$1" >&2
    exit "$2"
}
trap 'interrupted SIGINT 130' INT
trap 'interrupted SIGTERM 143' TERM

clock_start=$SECONDS
step() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - clock_start)); }

# --- install, build ---------------------------------------------------------------------

# The tarball of `make dist` has programs and no Makefile.
needed=(run)
[ ! -e Makefile ] || needed+=(build)
install_missing $no_install "${needed[@]}"
clock_start=$SECONDS

# Builds, writes make's output to a log, and prints how many files have been compiled.
build() {
    local files
    files=$(make -n BUILD="$BUILD" 2>/dev/null | grep -c -- ' -c ' || true)
    make -j "$(core_count)" BUILD="$BUILD" 2>&1 | tee "$BUILD/quickstart-make.log" |
        awk -v files="$files" '/ -c / && ++n % int(files / 10 + 1) == 0 {
            printf "  compiled %d of %d files\n", n, files
            fflush()
        }'
}
make_folder "$BUILD"
make_folder "$out"
if [ ! -e Makefile ]; then
    step "use the programs in $BUILD"
elif step "build" && ! build; then
    tail -n 30 "$BUILD/quickstart-make.log" >&2
    die 3 "the build failed; see $BUILD/quickstart-make.log"
fi
program=$BUILD/train_gpt_cpu
# Use the CUDA program if it was built (make gpu) and there is a GPU for each of the 4 ranks.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ -x "$BUILD/train_gpt" ] && [ "$gpus" -ge 4 ]; then program=$BUILD/train_gpt; fi
"$program" --version

# --- text -------------------------------------------------------------------------------

# text_files BYTES: lists text files of installed packages, up to BYTES in total, in an order that
# depends only on their names. Container images may lack documentation, but always have licenses and
# copyright files.
text_files() {
    local of_some_size=(-type f -size -64k -size +1)
    {
        find -L /usr/include "${of_some_size[@]}" -name '*.h'
        find -L /usr/share/common-licenses "${of_some_size[@]}"
        find -L /usr/share/doc "${of_some_size[@]}" \( -name copyright -o -name '*.txt' -o -name 'README*' \)
        find /usr/lib/python3.[0-9]* "${of_some_size[@]}" -name '*.py'
        find /usr/share/perl "${of_some_size[@]}" -name '*.p[mo]*'
    } 2>/dev/null | LC_ALL=C grep -v '[^ -~]\|\.gz$' | LC_ALL=C sort -u |
        LC_ALL=C sort -R --random-source=LICENSE | xargs -d '\n' readlink -e -- | awk '!seen[$0]++' |
        xargs -d '\n' stat -c '%s %n' |
        awk -v most="$1" '{ bytes += $1; if (bytes <= most) { sub(/^[0-9]+ /, ""); print } }'
}

step "collect text on this machine"
text_files 3000000 >"$out/files.txt" || true
[ "$(wc -l <"$out/files.txt")" -ge 50 ] ||
    die 5 "found fewer than 50 text files under /usr; see $out/files.txt"
for folder in include share lib; do
    printf '%5d files under /usr/%s\n' "$(grep -c "^/usr/$folder/" "$out/files.txt" || true)" $folder
done
"$BUILD/preprocess_data" --text --input-list "$out/files.txt" --tokenizer-type Byte --append-eod \
    --output-prefix "$out/usr"

# --- two runs ---------------------------------------------------------------------------

# train NAME FLAGS...: trains one model, logs to $out/NAME.log and $out/NAME.jsonl, and prints
# losses during the run.
log_interval=$(((iterations + 9) / 10))
train() {
    local name=$1
    shift
    rm -f "$out/$name.log" "$out/$name.jsonl"
    launch 4 "$program" \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0 --bf16 --seed 1234 \
        --micro-batch-size 4 --global-batch-size 16 --train-iters "$iterations" \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.04 \
        --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --use-distributed-optimizer --gpus-per-node 2 \
        --data-path "$out/usr_text_document" --split 95,5,0 --tokenizer-type Byte \
        --make-vocab-size-divisible-by 128 --eval-interval 1000000 --eval-iters 40 \
        --log-interval "$log_interval" --log-jsonl "$out/$name.jsonl" "$@" |
        tee "$out/$name.log" |
        sed -un 's/^ iteration *\([0-9]*\).*lm loss: *\([^ ]*\).*/  iteration \1: loss \2/p' ||
        die "${PIPESTATUS[0]}" "training failed; the log is $out/$name.log"
}

step "training with bf16 gradients: 4 ranks as 2 nodes x 2, $iterations iterations"
train baseline --grad-reduce-in-bf16
step "training with SDP4Bit: weights 4 bits, gradients 8 bits inside nodes and 4 between them"
train sdp4bit --quantized-weights --wq-rounding stochastic --quantized-gradients --gq-group-size-intra 128 \
    --hadamard-transform

# --- the comparison ---------------------------------------------------------------------

# Ranks share the CPU of one machine here, so their tokens per second say nothing about a network:
# show only losses.
step "comparison"
dev/compare_logs baseline="$out/baseline.jsonl" sdp4bit="$out/sdp4bit.jsonl" --curves 12 --x iteration \
    --svg "$out/losses.svg" --title "bf16 gradients and SDP4Bit" | sed -n '/^loss, mean of/,$p'

step "result"
status=0
python3 - "$out/baseline.jsonl" "$out/sdp4bit.jsonl" <<'END' || status=$?
import json, statistics, sys

def read(path):
    records = [json.loads(line) for line in open(path)]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    valid = [r["loss"] for r in records if r["kind"] == "valid"]
    last = [r for r in records if r["kind"] == "interval"][-1]
    return statistics.fmean(losses[-20:]), valid[-1], last["inter_node_bytes"], last["intra_node_bytes"]

met = []
def goal(text, reached):
    met.append(reached)
    return f"(goal: {text}) {'met' if reached else 'MISSED'}"

train, valid, between, inside = zip(read(sys.argv[1]), read(sys.argv[2]))
print("%-46s %10s %10s" % ("", "baseline", "SDP4Bit"))
for name, (a, b) in (("validation loss, same samples", valid),
                     ("training loss, mean of the last 20 iterations", train)):
    percent = 100 * (b - a) / a
    print("%-46s %10.4f %10.4f  %+.2f %%  %s" % (name, a, b, percent, goal("within 1 %", percent <= 1.0)))
for name, (a, b), least in (("bytes per step between nodes", between, 3.5),
                            ("bytes per step within nodes", inside, 0)):
    result = goal(f"{least}x", a / b >= least) if least else ""
    print("%-46s %10.0f %10.0f  %.2fx fewer  %s" % (name, a, b, a / b, result))
sys.exit(0 if all(met) else 1)
END
[ $status -le 1 ] || die $status "the comparison failed; see $out/baseline.jsonl and $out/sdp4bit.jsonl"
printf '\nplot: %s   logs: %s   %d s after installation\n' "$out/losses.svg" \
    "$out/baseline.log $out/sdp4bit.log" $((SECONDS - clock_start))
printf 'next: scripts/doctor.sh\n      (lists what this machine lacks; then README.md, "Train on your own text")\n'
exit $status
