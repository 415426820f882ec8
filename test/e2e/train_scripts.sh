#!/usr/bin/env bash
# scripts/train_*.sh and scripts/slurm: their flags match the paper's model configs and presets.
# Real runs of a tiny model on CPU ranks are started by the scripts, by mpirun, and from the batch
# files with stubs for Slurm's commands. Also tests signals and invalid input.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 8
data=$work/text_text_document
export BUILD
unset PRESET SPEED DATA_PATH VOCAB_FILE MERGE_FILE CHECKPOINT_PATH LOG_DIR RANKS HOSTFILE MPIRUN_FLAGS \
    DEVICE \
    DRY_RUN CUDA_VISIBLE_DEVICES
root=$PWD

# ---- expanded commands ----------------------------------------------------------------------
# expands CONFIG "VARIABLES" "FLAG=VALUE ..." [FLAGS...]: checks the command printed by DRY_RUN,
# with argument files expanded. If a flag is repeated, the last value counts. "FLAG=on" is a flag
# without a value; "FLAG=" means that the flag is absent.
expands() {
    local config=$1 variables=$2 expected=$3
    shift 3
    # shellcheck disable=SC2086 # split on purpose
    env DRY_RUN=1 $variables "scripts/train_$config.sh" "$@" >"$work/out" 2>"$work/err" ||
        { say "exit code $?"; return 1; }
    python3 - "$work/out" "$expected" >"$work/diff" <<'END' || { why=$(cat "$work/diff"); return 1; }
import os, shlex, sys
def read_in(word, folder=""):
    if not word.startswith("@"):
        return [word]
    path = os.path.join(folder, word[1:])
    found = shlex.split(open(path).read(), comments=True)
    return [w for inner in found for w in read_in(inner, os.path.dirname(path))]
words, flags = [], {}
for word in shlex.split(open(sys.argv[1]).read()):
    words += read_in(word)
program = next(i for i, word in enumerate(words) if word.startswith("@") or "/train_gpt" in word)
flags["program"] = words[program].rpartition("/")[2]
flags["launcher"] = " ".join(w for w in words[:program] if w not in ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe")) or "none"
name = None
for word in words[program + 1:]:
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        flags[name] = value if equals else "on"
    else:
        flags[name] = word if flags[name] == "on" else flags[name] + "_" + word
wrong = []
for item in sys.argv[2].split():
    flag, _, value = item.partition("=")
    key = flag if flag in ("program", "launcher") else "--" + flag
    found = flags.get(key, "")
    if found.replace(" ", "_") != value:
        wrong.append(f"{flag} is '{found}', not '{value}'")
print("; ".join(wrong))
sys.exit(bool(wrong))
END
}
# The model configs of the paper and its scripts.
common="seq-length=2048 max-position-embeddings=2048 train-iters=80000 lr-decay-style=cosine
    lr-decay-iters=70000 lr-warmup-fraction=0.01 adam-beta1=0.9 adam-beta2=0.95
    adam-eps=1e-08 weight-decay=0.1 clip-grad=1.0 bf16=on use-distributed-optimizer=on log-interval=100
    eval-interval=100 eval-iters=10 log-throughput=on
    tensor-model-parallel-size=1 pipeline-model-parallel-size=1 mock-data= save= data-path=a_b
    program=train_gpt_cpu hidden-dropout= attention-dropout="
config() { # NAME LAYERS HIDDEN HEADS LR MIN-LR MICRO-BATCH GLOBAL-BATCH
    check "config $1" expands "$1" "DEVICE=cpu DATA_PATH=a_b" \
        "$common num-layers=$2 hidden-size=$3 num-attention-heads=$4 lr=$5 min-lr=$6 micro-batch-size=$7 global-batch-size=$8"
}
config 125m 12 768 12 6e-4 6e-5 8 256
config 350m 24 1024 16 3e-4 3e-5 8 256
config 1.3b 24 2048 16 2e-4 2e-5 4 256
config 2.7b 32 2560 32 1.6e-4 1.6e-5 1 ""
config 6.7b 32 4096 32 1.2e-4 1.2e-5 2 256
# Llama configs use GPT-2's vocabulary unless a tokenizer is given.
llama() { # NAME LAYERS HIDDEN HEADS MLP LR MICRO-BATCH GLOBAL-BATCH
    check "config of Llama $1" expands "llama_$1" "DEVICE=cpu DATA_PATH=a_b PRESET=qwd" \
        "num-layers=$2 hidden-size=$3 num-attention-heads=$4 ffn-hidden-size=$5 lr=$6 micro-batch-size=$7
        global-batch-size=$8 normalization=RMSNorm swiglu=on data-path=a_b quantized-weights=on
        log-jsonl=runs/llama_$1-qwd/log.jsonl"
}
llama 125m 12 768 12 2048 6e-4 8 256
llama 1.1b 22 2048 32 5632 4e-4 4 512
llama 3b 28 3072 24 8192 3e-4 1 512
llama 8b 32 4096 32 14336 3e-4 1 512
check "speed run of a Llama" expands llama_8b "DEVICE=cpu SPEED=1 RANKS=16 PRESET=sdp4bit" \
    "micro-batch-size=1 global-batch-size=16 mock-data=on exit-interval=200 gradient-alltoall-pipeline="

no_weights="quantized-weights= weight-quantization-method= wq-rounding="
no_gradients="quantized-gradients= hadamard-transform= gq-group-size-intra= gradient-quantization-bits-intra="
weights="quantized-weights=on weight-quantization-bits=4 wq-group-size=2048 wq-rounding=stochastic"
gradients="quantized-gradients=on gradient-quantization-bits-inter=4 gq-group-size-inter=128 gq-group-size-intra=128"
preset() { check "preset $1" expands 125m "DEVICE=cpu DATA_PATH=x PRESET=$1" \
    "$2 log-jsonl=runs/125m-$1/log.jsonl tensorboard-dir=runs/125m-$1/tensorboard"; }
preset baseline "$no_weights $no_gradients grad-reduce-in-bf16="
preset baseline-bf16 "$no_weights $no_gradients grad-reduce-in-bf16=on"
preset qw "$weights weight-quantization-method=direct $no_gradients"
preset qwd "$weights weight-quantization-method= $no_gradients"
preset ulq "$no_weights $gradients gradient-quantization-bits-intra=4 hadamard-transform="
preset tlq "$no_weights $gradients gradient-quantization-bits-intra=8 hadamard-transform="
preset tlq-hs "$no_weights $gradients gradient-quantization-bits-intra=8 hadamard-transform=on"
preset sdp4bit "$weights $gradients gradient-quantization-bits-intra=8 hadamard-transform=on gradient-alltoall-pipeline="
eden="quantized-gradients=on gradient-quantization-method=eden hadamard-transform= gradient-quantization-bits-intra=8"
lossless="quantized-weights=on weight-quantization-method=lossless use-distributed-optimizer=on"
preset eden "$weights $eden gradient-quantization-bits-inter=4 local-steps="
preset eden3 "$weights $eden gradient-quantization-bits-inter=3 error-feedback="
preset eden2-ef "$weights $eden gradient-quantization-bits-inter=2 error-feedback=on"
preset lossless "$lossless $no_gradients"
preset eden-lossless "$lossless $eden gradient-quantization-bits-inter=4"
preset local "$weights $eden gradient-quantization-bits-inter=4 local-steps=30"
preset muon "$no_weights $no_gradients optimizer=muon muon-extra-scale-factor=0.2 muon-nesterov=on use-distributed-optimizer=on"

printf 'node0%d slots=4\n' 1 2 3 4 >"$work/hosts-four"
speed="micro-batch-size=1 mock-data=on log-interval=1 exit-interval=200 save= load="
check "speed run: separate log directory" expands 125m "DEVICE=cpu SPEED=1 PRESET=qwd" \
    "log-jsonl=runs/125m-qwd-speed/log.jsonl tensorboard-dir=runs/125m-qwd-speed/tensorboard"
check "speed run: LOG_DIR replaces the separate log directory" expands 125m "DEVICE=cpu SPEED=1 LOG_DIR=l" "log-jsonl=l/log.jsonl"
check "speed run" expands 1.3b "DEVICE=cpu SPEED=1 RANKS=16 CHECKPOINT_PATH=c" \
    "$speed global-batch-size=16 gradient-alltoall-pipeline="
check "speed run, quantized gradients" expands 2.7b "DEVICE=cpu SPEED=1 RANKS=8 PRESET=sdp4bit" \
    "$speed global-batch-size=8 gradient-alltoall-pipeline=8"
check "speed run of 6.7B: tensor parallel size 4" expands 6.7b \
    "DEVICE=cpu SPEED=1 RANKS=16 PRESET=sdp4bit MPIRUN_FLAGS=-q" \
    "$speed global-batch-size=4 gradient-alltoall-pipeline=8 tensor-model-parallel-size=4
    pipeline-model-parallel-size=1" --gpus-per-node 8
# As in the paper, 13B and 18B do not use interleaved stages.
layout() { # CONFIG "VARIABLES" TENSOR PIPELINE BATCH [FLAGS...]
    expands "$1" "DEVICE=cpu SPEED=1 PRESET=sdp4bit $2" \
        "$speed global-batch-size=$5 tensor-model-parallel-size=$3 pipeline-model-parallel-size=$4
        gradient-alltoall-pipeline=" "${@:6}"
}
check "speed run of 13B: tensor parallel size 8" layout 13b RANKS=16 8 1 2
check "speed run of 18B: tensor parallel size 8" layout 18b RANKS=32 8 1 4 --gpus-per-node 8
check "nodes of four GPUs: tensor parallel size 4, two stages" layout 13b RANKS=16 4 2 2 --gpus-per-node 4
check "a host file with four slots per host: the same" layout 18b "HOSTFILE=$work/hosts-four" 4 2 2
check "a Slurm allocation of hosts with four GPUs: the same" layout 18b \
    "SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=8 SLURM_NTASKS_PER_NODE=4" 4 2 4
check "an mpirun rank on a host with four ranks: the same" layout 13b \
    "OMPI_COMM_WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_SIZE=4" 4 2 2
check "an srun rank on a host with four ranks: the same" layout 13b \
    "PMIX_RANK=0 SLURM_STEP_NUM_TASKS=16 SLURM_STEP_TASKS_PER_NODE=4(x4)" 4 2 2
check "a layout on the command line takes precedence" layout 13b RANKS=16 2 4 2 --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size=4
check "if only one parallel size is given, the other is 1" layout 13b RANKS=16 4 1 4 --tensor-model-parallel-size 4
check "a plan for more ranks" layout 13b RANKS=1 8 1 16 --plan --plan-world-size 128
check "13B accuracy run: the same layout" expands 13b "DEVICE=cpu DATA_PATH=d RANKS=16" \
    "tensor-model-parallel-size=8 pipeline-model-parallel-size=1 global-batch-size= mock-data="
check "speed run, weights only" expands 2.7b "DEVICE=cpu SPEED=1 RANKS=8 PRESET=qwd" \
    "$speed gradient-alltoall-pipeline="
check "speed run of a model without interleaving" expands 125m "DEVICE=cpu SPEED=1 RANKS=8 PRESET=tlq-hs" \
    "$speed gradient-alltoall-pipeline="
check "environment variables" expands 6.7b \
    "DEVICE=cpu DATA_PATH=d VOCAB_FILE=v MERGE_FILE=m CHECKPOINT_PATH=c LOG_DIR=" \
    "vocab-file=v merge-file=m save=c load=c save-interval=2502 log-jsonl= tensorboard-dir="
check "checkpoint and log directories" expands 350m "DEVICE=cpu DATA_PATH=d CHECKPOINT_PATH=c LOG_DIR=l" \
    "save-interval=5002 log-jsonl=l/log.jsonl"
check "command-line flags take precedence" expands 125m "DEVICE=cpu DATA_PATH=d PRESET=sdp4bit" \
    "lr=1 wq-group-size=128 seed=3" --lr 1 --wq-group-size 128 --seed=3
blend() {
    DRY_RUN=1 DEVICE=cpu DATA_PATH="0.7 a 0.3 b" scripts/train_125m.sh >"$work/out" &&
        grep -qF -- "--data-path 0.7 a 0.3 b --log" "$work/out" || say "no blend in $(cat "$work/out")"
}
check "a blend of shards" blend
blank() {
    mkdir -p "$work/my data" && : >"$work/my data/a b.idx"
    DRY_RUN=1 DEVICE=cpu DATA_PATH="$work/my data/a b" scripts/train_125m.sh >"$work/out" &&
        grep -qF -- "--data-path $work/my\\ data/a\\ b --log" "$work/out" ||
        say "the prefix was split: $(cat "$work/out")"
}
check "a path prefix with spaces" blank
# Nested argument files are expanded as in the trainer.
mkdir "$work/args"
printf '\357\273\277# --no such\n--data-path "a b" c\\ d # --plan\n--x=\047 y "\047\\\n--z @inner/more.args "" \\@w "@v" --not#this\r\n' >"$work/args/outer.args"
mkdir "$work/args/inner"
printf -- '--inside "\\"q\\\\" @../last.args' >"$work/args/inner/more.args"
printf -- '--last 1 @last.args "unclosed' >"$work/args/last.args"
argument_files() {
    local read
    read=$(bash -c 'cd / && . "$0" && cd "$1" && read_words first @outer.args "" @absent.args @outer.args=no && printf "[%s]" "${words[@]}"' "$root/scripts/common.sh" "$work/args")
    read=${read//"[--last][1]"/} # it includes itself until the depth limit is reached
    [ "$read" = "[first][--data-path][a b][c d][--x= y \"][--z][--inside][\"q\\][][@w][@v][--not#this][]" ] ||
        { why="read $read"; return 1; }
}
check "argument files expand as in the trainer" argument_files
printf -- '--data-path "x_document" --tensor-model-parallel-size 1\n' >"$work/args/data.args"
check "data from an argument file" expands 125m "DEVICE=cpu" "data-path=x_document" \
    "@$work/args/data.args"
check "a layout from an argument file" expands 13b "DEVICE=cpu" "tensor-model-parallel-size=1" \
    "@$work/args/data.args"

# ---- the ranks ------------------------------------------------------------------------------
mkdir "$work/bin"
printf '#!/bin/sh\nfor i in 0 1 2 3 4 5; do echo "GPU $i: a GPU"; done\n' >"$work/bin/nvidia-smi"
chmod +x "$work/bin/nvidia-smi"
with_gpus=$work/bin:$PATH
printf '# two machines\nnode01 slots=8\nnode02 slots=8\n\n' >"$work/hosts"
printf 'node01 slots=8\nnode02\n' >"$work/hosts-bad"
check "as many ranks as GPUs" expands 125m "PATH=$with_gpus DATA_PATH=d" \
    "program=train_gpt launcher=mpirun_-np_6"
check "the visible GPUs" expands 125m "PATH=$with_gpus DATA_PATH=d CUDA_VISIBLE_DEVICES=1,3" \
    "launcher=mpirun_-np_2"
check "RANKS wins" expands 125m "PATH=$with_gpus DATA_PATH=d RANKS=3" "launcher=mpirun_-np_3"
check "flags for mpirun" expands 125m "DEVICE=cpu DATA_PATH=d MPIRUN_FLAGS=--tag-output" \
    "launcher=mpirun_-np_4_--tag-output"
check "a host file" expands 125m "PATH=$with_gpus SPEED=1 HOSTFILE=$work/hosts NCCL_DEBUG=INFO" \
    "launcher=mpirun_-x_NCCL_DEBUG_-x_OPENBLAS_NUM_THREADS_-np_16_--hostfile_$work/hosts_--map-by_slot global-batch-size=16"
check "a Slurm allocation" expands 125m \
    "DATA_PATH=d SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS_PER_NODE=8" \
    "launcher=mpirun_-x_OPENBLAS_NUM_THREADS_-np_32_--map-by_ppr:8:node"
check "a Slurm allocation counted in GPUs" expands 125m \
    "DATA_PATH=d SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=2 SLURM_GPUS_ON_NODE=4" \
    "launcher=mpirun_-x_OPENBLAS_NUM_THREADS_-np_8_--map-by_ppr:4:node"
check "an mpirun rank" expands 125m "SPEED=1 OMPI_COMM_WORLD_SIZE=12" "launcher=none global-batch-size=12"
check "an srun rank" expands 125m "SPEED=1 PMIX_RANK=0 SLURM_STEP_NUM_TASKS=24" \
    "launcher=none global-batch-size=24"
check "an MPICH rank" expands 125m "SPEED=1 PMI_RANK=0 PMI_SIZE=6" "launcher=none global-batch-size=6"

# ---- refused input --------------------------------------------------------------------------
refuses() { # CODE TEXT "VARIABLES" CONFIG [FLAGS...]
    local code=$1 text=$2 variables=$3 config=$4 rc=0
    shift 4
    # shellcheck disable=SC2086 # split on purpose
    env $variables "scripts/train_$config.sh" "$@" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    error_names "$code" "$text" $rc
}
cpu="DEVICE=cpu DATA_PATH=d"
check "an unknown preset" refuses 2 "presets are baseline, baseline-bf16, qw, qwd, ulq, tlq, tlq-hs, sdp4bit, zeropp, eden, eden3" \
    "$cpu PRESET=SDP4Bit" 125m
check "an unknown device" refuses 2 "gpu or cpu" "$cpu DEVICE=tpu" 125m
check "an invalid SPEED" refuses 2 "SPEED=yes" "$cpu SPEED=yes" 125m
check "no data" refuses 2 "DATA_PATH is not set" "DEVICE=cpu" 125m
check "no ranks" refuses 2 "RANKS=none" "$cpu RANKS=none" 125m
check "zero ranks" refuses 2 "RANKS=0" "$cpu RANKS=0" 125m
check "a missing host file" refuses 2 "cannot be read" "$cpu HOSTFILE=$work/absent" 125m
check "a host file without slots" refuses 2 "slots=GPUS" "$cpu HOSTFILE=$work/hosts-bad" 125m
check "ranks that do not fit the nodes" refuses 2 "spread evenly" \
    "$cpu RANKS=6 SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=4" 125m
check "srun without PMIx" refuses 3 "srun --mpi=pmix" "$cpu SLURM_STEP_NUM_TASKS=8" 125m
others_are_silent() {
    # shellcheck disable=SC2086 # split on purpose
    env $cpu SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=3 scripts/train_125m.sh >"$work/out" 2>"$work/err" </dev/null
    [ $? = 3 ] && [ ! -s "$work/err" ] || say "task 3 printed a message or has a different exit code"
}
check "srun without PMIx: the other tasks are silent" others_are_silent
check "a program that is not built" refuses 3 "run make cpu" "$cpu BUILD=$work/nowhere" 125m
check "a flag that the trainer refuses" refuses 2 "needs --vocab-file" "$cpu RANKS=2" 125m --quantized-weights
check "ranks that 13B's layout does not divide" refuses 2 "start a multiple of 8 ranks" \
    "DEVICE=cpu SPEED=1 RANKS=12 LOG_DIR=" 13b
check "fewer ranks than 18B's layout needs" refuses 2 "start a multiple of 8 ranks" \
    "DEVICE=cpu SPEED=1 RANKS=4 LOG_DIR=" 18b
check "13B at size 1 if requested" expands 13b "$cpu" \
    "hidden-size=5120 micro-batch-size=1 tensor-model-parallel-size=1 pipeline-model-parallel-size=1" \
    --tensor-model-parallel-size 1
helps() { scripts/train_1.3b.sh --help >"$work/out" 2>"$work/err" &&
    grep -q "configs/gpt_1.3b.args" "$work/out" && [ ! -s "$work/err" ] || say "no help"; }
check "--help" helps

# LOG_DIR contains the log of another run. A stub for the trainer appends a line to the log it
# opens. If REFUSED is set, it rejects --plan and --inspect-data.
mkdir "$work/stand-in"
printf '#!/bin/sh\ncase "$*" in *--plan* | *--inspect-data*) exit ${REFUSED:-0} ;; esac\necho "{\"kind\":\"start\"}" >>"$LOG_DIR/log.jsonl"\n' >"$work/stand-in/train_gpt_cpu"
chmod +x "$work/stand-in/train_gpt_cpu"
# into_logs LOGS STARTS "VARIABLES" [FLAGS...]: runs with a log directory that contains a log with
# its TensorBoard events, and two that were moved aside earlier (one of them only events). $owner is
# the checkpoint directory to which the log belongs, or "nobody". Checks that there are LOGS logs
# after the run and that STARTS runs have written to the current one.
into_logs() {
    local logs=$1 starts=$2 variables=$3 found
    shift 3
    rm -rf "$work/logs"
    mkdir -p "$work/logs/tensorboard" "$work/logs/tensorboard.2"
    echo first >"$work/logs/log.1.jsonl"
    echo '{"kind":"start"}' >"$work/logs/log.jsonl"
    : >"$work/logs/tensorboard/events"
    [ "$owner" = nobody ] || echo "$owner" >"$work/logs/log.run"
    # shellcheck disable=SC2086 # split on purpose
    env BUILD="$work/stand-in" DEVICE=cpu RANKS=1 DATA_PATH=d LOG_DIR="$work/logs" $variables \
        scripts/train_125m.sh "$@" >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    found=$(find "$work/logs" -name 'log*.jsonl' | wc -l)
    [ "$found" = "$logs" ] || { why="$found logs, not $logs"; return 1; }
    [ "$(grep -c start "$work/logs/log.jsonl")" = "$starts" ] ||
        { why="$(grep -c start "$work/logs/log.jsonl") starts in log.jsonl, not $starts"; return 1; }
    [ "$(cat "$work/logs/log.1.jsonl")" = first ] || { why="an older log was overwritten"; return 1; }
    if [ "$logs" = 3 ]; then
        [ "$owner" = nobody ] || [ "$(cat "$work/logs/log.3.run")" = "$owner" ] ||
            { why="log.3.run does not name the owner of the log"; return 1; }
        [ -e "$work/logs/log.3.jsonl" ] && [ -e "$work/logs/tensorboard.3/events" ] &&
            [ ! -e "$work/logs/tensorboard" ] ||
            { why="not moved to log.3.jsonl and tensorboard.3"; return 1; }
        [ "$(grep -c "moved to log.3.jsonl" "$work/out")" = 1 ] ||
            { why="the move is not reported in one line"; return 1; }
    else
        [ -e "$work/logs/tensorboard/events" ] && ! grep -q moved "$work/out" ||
            { why="events were moved, or a move was reported"; return 1; }
    fi
}
mkdir "$work/saved" "$work/unsaved"
echo 5 >"$work/saved/latest_checkpointed_iteration.txt"
printf -- '--load "%s" # the same\n--save "%s" --save-interval 5\n' "$work/saved" "$work/saved" \
    >"$work/args/saved.args"
owner=nobody
check "a log of another run is moved aside" into_logs 3 1 ""
check "moves the log aside if the checkpoint directory is empty" into_logs 3 1 \
    "CHECKPOINT_PATH=$work/unsaved"
check "moves the log aside for a speed run, which does not resume" into_logs 3 1 "SPEED=1 CHECKPOINT_PATH=$work/saved"
check "rank 0 of a surrounding mpirun moves the log aside" into_logs 3 1 \
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0"
check "other ranks of a surrounding mpirun do not move the log" into_logs 2 2 "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1"
check "other tasks of srun do not move the log" into_logs 2 2 "PMIX_RANK=1 SLURM_STEP_NUM_TASKS=2"
check "a resumed run appends to its log" into_logs 2 2 "CHECKPOINT_PATH=$work/saved"
check "a run resumed by flags appends" into_logs 2 2 "CHECKPOINT_PATH=$work/unsaved" --load="$work/saved" \
    --save "$work/saved"
check "a run resumed by an argument file appends" into_logs 2 2 "" "@$work/args/saved.args"
check "moves the log aside for a run that only loads a checkpoint" into_logs 3 1 "" --load "$work/saved"
check "moves the log aside for a run that saves to another directory" into_logs 3 1 "CHECKPOINT_PATH=$work/unsaved" --load \
    "$work/saved"
check "moves the log aside for --finetune" into_logs 3 1 "CHECKPOINT_PATH=$work/saved" --finetune
check "another log path: the events of two runs are not mixed" into_logs 3 1 "" \
    --log-jsonl "$work/elsewhere.jsonl"
check "another events path: the logs of two runs are not mixed" into_logs 3 1 "" \
    --tensorboard-dir "$work/elsewhere"
check "other paths for log and events leave the log in place" into_logs 2 2 "" --log-jsonl "$work/elsewhere.jsonl" \
    --tensorboard-dir "$work/elsewhere"
check "a plan leaves the log in place" into_logs 2 1 "" --plan
check "a data inspection leaves the log in place" into_logs 2 1 "" --inspect-data 0
check "a dry run leaves the log in place" into_logs 2 1 "DRY_RUN=1"
check "refused flags leave the log in place, and a rank reports them" into_logs 2 2 \
    "REFUSED=2 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0"
check "a machine that cannot run the trainer as a single process prints no error" into_logs 3 1 "REFUSED=3"
owner=$work/saved
check "a log known to belong to the run is appended to" into_logs 2 2 "CHECKPOINT_PATH=$work/saved"
check "the same if another path names the checkpoint directory" into_logs 2 2 \
    "CHECKPOINT_PATH=$work/unsaved/../saved"
owner=$work/unsaved
check "the log of a run with other checkpoints is moved" into_logs 3 1 "CHECKPOINT_PATH=$work/saved"
owner=
check "the log of an inspection that saved nothing is moved" into_logs 3 1 "CHECKPOINT_PATH=$work/saved"
# The line about communication formats. On one machine, the inter-node format of a preset is unused.
formats() { # TEXT "VARIABLES" [FLAGS...]
    local text=$1 variables=$2
    shift 2
    # shellcheck disable=SC2086 # split on purpose
    env BUILD="$work/stand-in" DEVICE=cpu RANKS=4 DATA_PATH=d LOG_DIR="$work/logs" $variables \
        scripts/train_125m.sh "$@" >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    [ "$(grep -c '^communication: ' "$work/out")" = 1 ] && grep '^communication: ' "$work/out" |
        grep -qF -- "$text" || { why="said $(grep '^communication' "$work/out")"; return 1; }
}
check "one machine: no traffic between nodes" formats \
    "gradients int8, weights int4 differences, within one node of 4 ranks; none between nodes (--gpus-per-node N" PRESET=sdp4bit
check "one machine split into nodes" formats \
    "gradients int8 within nodes of 2 ranks, int4 between nodes; weights int4 differences" PRESET=sdp4bit \
    --gpus-per-node 2
check "nodes of one rank" formats "gradients int4, weights bf16, between 4 nodes of one rank" PRESET=tlq \
    --gpus-per-node=1
check "the baseline" formats "gradients fp32 within nodes of 2 ranks, fp32 between nodes; weights bf16" \
    PRESET=baseline --gpus-per-node 2
check "flags take precedence over the preset" formats "gradients bf16, weights int8, within one node" "PRESET=baseline-bf16" \
    --quantized-weights --weight-quantization-bits 8 --weight-quantization-method direct
check "EDEN" formats "gradients int8 within nodes of 2 ranks, eden3 between nodes; weights int4 differences" \
    PRESET=eden3 --gpus-per-node 2
check "lossless weights" formats "gradients fp32, weights lossless bf16, between 4 nodes" \
    PRESET=lossless \
    --gpus-per-node 1
check "local steps" formats "int8 within nodes of 2 ranks, eden4 every 30 steps between nodes" PRESET=local \
    --gpus-per-node 2
one_node() {
    local rc=0
    env BUILD="$work/stand-in" DEVICE=cpu RANKS=4 DATA_PATH=d LOG_DIR="$work/logs" PRESET=local \
        scripts/train_125m.sh "$@" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    [ $rc = 2 ] && grep -q "^error: --local-steps needs two or more nodes" "$work/err" &&
        ! grep -q '^communication' "$work/out" || { why="exit code $rc, $(cat "$work/err")"; return 1; }
}
check "local steps on one node are refused before mpirun starts" one_node
check "one node of all ranks" one_node --gpus-per-node 4
check "local steps: the trainer refuses stages on different nodes" formats \
    "within one node of 2 data-parallel ranks" PRESET=local --gpus-per-node 2 --pipeline-model-parallel-size 2
check "local steps: one node may evaluate" formats "within one node of 4 ranks" PRESET=local --skip-train
check "one rank" formats "none, there is one rank" "PRESET=sdp4bit RANKS=1"
laid_out() { # LAYOUT TEXT "VARIABLES" [FLAGS...]: like formats, and checks the layout line
    formats "${@:2}" || return 1
    grep -qF "layout: $1" "$work/out" || { why="no '$1' in $(cat "$work/out")"; return 1; }
}
check "nodes with one tensor-parallel group each" laid_out "tensor parallel 2, pipeline 1, data parallel 2" \
    "gradients int4, weights int4 differences, between 2 nodes of one data-parallel rank" PRESET=sdp4bit \
    --gpus-per-node 2 --tensor-model-parallel-size 2
check "nodes with two stages each" laid_out "tensor parallel 1, pipeline 2, data parallel 4" \
    "gradients int8 within nodes of 2 data-parallel ranks, int4 between nodes" "PRESET=tlq RANKS=8" \
    --gpus-per-node 2 --pipeline-model-parallel-size 2
check "one model over all ranks" laid_out "tensor parallel 2, pipeline 2, data parallel 1" \
    "none, there is one data-parallel rank" "" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
says_nothing() {
    env BUILD="$work/stand-in" DEVICE=cpu DATA_PATH=d LOG_DIR= OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 \
        scripts/train_125m.sh >"$work/out" 2>"$work/err" </dev/null
    ! grep -q 'communication:' "$work/out" "$work/err"
}
check "a rank of a surrounding mpirun prints nothing" says_nothing
# A start without CHECKPOINT_PATH between two parts of a run moves the run's log aside. The next
# part restores it.
parts() {
    local part
    rm -rf "$work/logs" "$work/unsaved"/*
    for part in CHECKPOINT_PATH="$work/unsaved" A=1 A=1 CHECKPOINT_PATH="$work/unsaved" \
        CHECKPOINT_PATH="$work/unsaved"; do
        env BUILD="$work/stand-in" DEVICE=cpu RANKS=1 DATA_PATH=d LOG_DIR="$work/logs" $part \
            scripts/train_125m.sh >>"$work/parts" 2>"$work/err" </dev/null ||
            { say "exit code $?"; return 1; }
        mkdir -p "$work/logs/tensorboard" && echo "$part" >>"$work/logs/tensorboard/events"
        echo 5 >"$work/unsaved/latest_checkpointed_iteration.txt"
    done
    [ "$(grep -c start "$work/logs/log.jsonl")" = 3 ] &&
        [ "$(grep -c CHECKPOINT "$work/logs/tensorboard/events")" = 3 ] ||
        { why="the run's log is incomplete"; return 1; }
    [ "$(find "$work/logs" -name '*.jsonl' | wc -l)" = 3 ] &&
        [ "$(cat "$work"/logs/log.[23].jsonl | wc -l)" = 2 ] &&
        [ "$(cat "$work"/logs/tensorboard.[23]/events)" = "$(printf 'A=1\nA=1')" ] ||
        { why="the inspections' logs: $(ls "$work/logs")"; return 1; }
    [ "$(grep -c '^restored ' "$work/parts")" = 1 ] && [ "$(grep -c moved "$work/parts")" = 3 ] ||
        { why="said $(cat "$work/parts")"; return 1; }
}
check "an inspection between two parts of a run gets its own log" parts

# ---- real runs ------------------------------------------------------------------------------
# The model and batch of lib.sh without --lr-warmup-iters, because the config sets
# --lr-warmup-fraction.
tiny=("${model[@]}")
for ((i = 0; i < ${#batch[@]}; i++)); do if [ "${batch[i]}" = --lr-warmup-iters ]; then i=$((i + 1)); else \
    tiny+=("${batch[i]}"); fi; done
tiny+=(--lr-decay-iters 12 --gpus-per-node 2)
self_started() {
    PRESET=sdp4bit DEVICE=cpu RANKS=4 DATA_PATH=$data LOG_DIR=$work/self scripts/train_125m.sh "${tiny[@]}" \
        >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
    grep -q "using 2 nodes x 2 data-parallel ranks" "$work/out" || { why="not 2 x 2"; return 1; }
    [ -s "$work/self/log.jsonl" ] && compgen -G "$work/self/tensorboard/events*" >/dev/null ||
        { why="no logs"; return 1; }
    cp "$work/self/log.jsonl" "$work/self.jsonl"
    grep -qE '"wq_rounding": ?"stochastic"' "$work/self.jsonl" ||
        { why="the preset did not reach the trainer"; return 1; }
}
check "ranks started by the script" self_started
under_mpirun() {
    PRESET=sdp4bit DEVICE=cpu DATA_PATH=$data LOG_DIR=$work/under "${launcher[@]}" -np 4 \
        scripts/train_125m.sh \
        "${tiny[@]}" >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    cp "$work/under/log.jsonl" "$work/under.jsonl"
    same_training self under
}
check "ranks started by mpirun compute the same" under_mpirun
second_run() { # baseline, started by mpirun, in the directory of the previous run
    DEVICE=cpu DATA_PATH=$data LOG_DIR=$work/under "${launcher[@]}" -np 4 scripts/train_125m.sh "${tiny[@]}" \
        --exit-interval 3 >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    cmp -s "$work/under/log.1.jsonl" "$work/under.jsonl" ||
        { why="the first log is not in log.1.jsonl"; return 1; }
    [ "$(grep -c '"kind":"start"' "$work/under/log.jsonl")" = 1 ] &&
        [ "$(grep -c '"kind":"train"' "$work/under/log.jsonl")" = 3 ] ||
        { why="the second log does not hold the second run"; return 1; }
    compgen -G "$work/under/tensorboard.1/events*" >/dev/null &&
        compgen -G "$work/under/tensorboard/events*" >/dev/null ||
        { why="events of both runs are in one folder"; return 1; }
    [ "$(grep -c 'moved to log.1.jsonl' "$work/out")" = 1 ] || why="not reported once"
    [ -z "$why" ]
}
check "a second run does not write into the first one's log" second_run
never_starts() { # CODE TEXT "VARIABLES" [FLAGS...]: the previous run keeps its log
    local code=$1 text=$2 variables=$3 rc=0
    shift 3
    # shellcheck disable=SC2086 # split on purpose
    env DEVICE=cpu RANKS=4 DATA_PATH="$data" LOG_DIR="$work/self" $variables scripts/train_125m.sh \
        "${tiny[@]}" "$@" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    error_names "$code" "$text" $rc && cmp -s "$work/self/log.jsonl" "$work/self.jsonl" &&
        [ ! -e "$work/self/tensorboard.1" ] || { why="${why:-the log was moved or written to}"; return 1; }
}
check "an unknown flag leaves the previous log in place" never_starts 2 "unknown flag --lerning-rate" "" \
    --lerning-rate 1
check "a batch size that the ranks do not divide" never_starts 2 "divisible" "" --global-batch-size 12
check "missing data" never_starts 5 "nowhere" "DATA_PATH=$work/nowhere"
check "a missing vocabulary" never_starts 2 "--vocab-file" "" --tokenizer-type GPT2BPETokenizer
never_starts_under_mpirun() {
    local rc=0
    DEVICE=cpu DATA_PATH=$data LOG_DIR=$work/self "${launcher[@]}" -np 4 scripts/train_125m.sh "${tiny[@]}" \
        --lerning-rate 1 >"$work/out" 2>"$work/err" </dev/null || rc=$?
    error_names 2 "unknown flag --lerning-rate" $rc && cmp -s "$work/self/log.jsonl" "$work/self.jsonl" ||
        { why="${why:-the log was moved or written to}"; return 1; }
}
check "an unknown flag under mpirun" never_starts_under_mpirun
elsewhere() { # relative paths refer to the caller's directory
    cp "$work/text_text_document".* "$work/bin/"
    (cd "$work/bin" && DEVICE=cpu RANKS=2 DATA_PATH=text_text_document "$root/scripts/train_125m.sh" \
        "${tiny[@]}") >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
    [ -s "$work/bin/runs/125m-baseline/log.jsonl" ] || { why="no log below the caller's folder"; return 1; }
}
check "started from another directory" elsewhere
blanks() {
    mkdir -p "$work/my shards"
    cp "$work"/text_text_document.* "$work/my shards/"
    DEVICE=cpu RANKS=2 DATA_PATH="$work/my shards/text_text_document" LOG_DIR='' scripts/train_125m.sh \
        "${tiny[@]}" --exit-interval 1 >"$work/out" 2>"$work/err" || say "exit code $?"
}
check "data in a directory with a space in its name" blanks
speed_run() {
    DEVICE=cpu SPEED=1 RANKS=2 LOG_DIR='' scripts/train_125m.sh "${tiny[@]}" --micro-batch-size 1 \
        --global-batch-size 2 --exit-interval 3 >"$work/out" 2>"$work/err" ||
        { say "exit code $?"; return 1; }
    [ "$(grep -c '^ iteration ' "$work/out")" = 3 ] || { why="not three iterations logged"; return 1; }
}
check "a speed run on mock data" speed_run
cut_speed_run() { # 13B's layout on nodes of four, on a tiny model
    PRESET=sdp4bit DEVICE=cpu SPEED=1 RANKS=8 LOG_DIR='' scripts/train_13b.sh "${tiny[@]}" \
        --micro-batch-size 1 \
        --global-batch-size 1 --gpus-per-node 4 --exit-interval 3 >"$work/out" 2>"$work/err" ||
        { say "exit code $?"; return 1; }
    grep -q '^layout: tensor parallel 4, pipeline 2, data parallel 1$' "$work/out" &&
        grep -q 'tensor-model-parallel size: 4, pipeline-model-parallel size: 2' "$work/out" &&
        [ "$(grep -c '^ iteration ' "$work/out")" = 3 ] || { why="no such run"; return 1; }
}
check "a speed run of 13B's layout" cut_speed_run

# Imitates two machines by two addresses of this one and a stub for ssh that runs its command under
# another host name. MPI starts daemons, places ranks and detects nodes as on two machines.
cat >"$work/bin/agent" <<'END'
#!/bin/bash
while [[ $1 = -* ]]; do shift; done
host=$1
shift
exec unshare --uts bash -c "hostname node-${host##*.}; $*"
END
chmod +x "$work/bin/agent"
printf '127.0.0.2 slots=2\n127.0.0.3 slots=2\n' >"$work/two"
on_two_machines() { # FLAGS...
    # Two machines communicate by TCP, which one_machine of scripts/common.sh turns off.
    local agent="--mca plm_rsh_agent $work/bin/agent --mca plm_rsh_no_tree_spawn 1"
    HOSTFILE=$work/two MPIRUN_FLAGS="$agent --mca btl ^openib,ofi" PRESET=sdp4bit DEVICE=cpu \
        DATA_PATH=$data CHECKPOINT_PATH=$work/two-save LOG_DIR=$work/two-log \
        timeout "$LIMIT" scripts/train_1.3b.sh "${tiny[@]}" --gpus-per-node 0 "$@" \
        >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
    grep -q '^using 2 nodes x 2 data-parallel ranks$' "$work/out" ||
        { why="not two real nodes of two: $(grep '^using 2' "$work/out")"; return 1; }
}
two_machines() {
    on_two_machines --exit-interval 6 && on_two_machines --exit-interval 12 &&
        grep -q 'successfully loaded checkpoint from .* at iteration *6' "$work/out" ||
        { why=${why:-not resumed}; return 1; }
    cp "$work/two-log/log.jsonl" "$work/two.jsonl"
    same_training self two
}
if unshare --uts true 2>/dev/null && mpirun --version 2>/dev/null | grep -q 'Open MPI) 4'; then
    check "a host file with two machines: matches 2 x 2 ranks on one, and resumes" two_machines
else
    skip "a host file with two machines" "needs permission to set a host name, and Open MPI 4"
fi

# A long run is interrupted. It must save, exit with 75 and resume from there.
interrupted() { # SIGNAL
    local rc=0
    rm -rf "$work/save" "$work/cut"
    DEVICE=cpu RANKS=2 DATA_PATH=$data LOG_DIR=$work/cut CHECKPOINT_PATH=$work/save env \
        -u OPENBLAS_NUM_THREADS --default-signal=INT scripts/train_125m.sh "${tiny[@]}" --train-iters 100000 \
        >"$work/out" 2>"$work/err" &
    job=$!
    wait_for_iteration cut/log 20
    kill "-$1" "$job"
    wait "$job" || rc=$?
    [ $rc = 75 ] || { say "exit code $rc instead of 75"; return 1; }
    grep -q 'successfully saved checkpoint' "$work/out" || { why="nothing was saved"; return 1; }
}
check "SIGTERM to the script saves" interrupted TERM
check "SIGUSR1 to the script saves" interrupted USR1
check "Ctrl-C saves" interrupted INT

# --- batch files, with stubs for Slurm -------------------------------------------------------
# shellcheck disable=SC2016 # expanded by the fake programs
{
    printf '#!/bin/bash\n[ "$1" = --mpi=pmix ] && [ "$SRUN_CPUS_PER_TASK" = 8 ] || exit 9\nwhile [[ $1 = -* ]]; do shift; done\nexec %s -np 2 "$@"\n' "${launcher[*]}" >"$work/bin/srun"
    printf '#!/bin/bash\necho "$@" >>"$REQUEUED"\n' >"$work/bin/scontrol"
}
chmod +x "$work/bin/srun" "$work/bin/scontrol"
# batch_job FILE CODE SIGNAL FLAGS...: runs the batch file like Slurm, sends SIGNAL at iteration 20
# unless it is "none", and checks the exit code.
batch_job() {
    local file=$1 code=$2 signal=$3 rc=0
    shift 3
    rm -rf "$work/slurm" "$work/save" "$work/requeued"
    : >"$work/requeued"
    PATH=$work/bin:$PATH REQUEUED=$work/requeued SLURM_JOB_ID=77 SLURM_JOB_NUM_NODES=1 SLURM_CPUS_PER_TASK=8 \
        SLURM_SUBMIT_DIR=$root MODEL=125m PRESET=tlq DEVICE=cpu RANKS=2 DATA_PATH=$data \
        LOG_DIR=$work/slurm CHECKPOINT_PATH=$work/save bash "scripts/slurm/$file" "${tiny[@]}" "$@" \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    if [ "$signal" != none ]; then
        wait_for_iteration slurm/log 20
        if [ "$file" = srun.sbatch ]; then kill "-$signal" "$(rank_pids 0 | head -n 1)"; else kill \
            "-$signal" "$job"; fi
    fi
    wait "$job" || rc=$?
    [ $rc = "$code" ] || { say "exit code $rc instead of $code"; return 1; }
    if [ "$code" = 75 ]; then
        grep -q '^requeue 77$' "$work/requeued" || { why="not requeued"; return 1; }
    else
        [ ! -s "$work/requeued" ] || { why="requeued needlessly"; return 1; }
    fi
}
for file in srun mpirun; do
    check "$file.sbatch" batch_job $file.sbatch 0 none
    check "$file.sbatch forwards the signal and requeues the job" batch_job $file.sbatch 75 USR1 \
        --train-iters 100000
    check "$file.sbatch returns the error code" batch_job $file.sbatch 2 none --num-layers 0
done
# shellcheck disable=SC2016 # expanded by the fake programs
printf '#!/bin/bash\necho "$@"\n' >"$work/bin/srun"
lost_rank() { # PRESET FLAG
    PATH=$work/bin:$PATH SLURM_SUBMIT_DIR=$root PRESET=$1 bash scripts/slurm/srun.sbatch \
        >"$work/out" 2>"$work/err"
    grep -q -- "^--mpi=pmix $2.* scripts/train_1.3b.sh$" "$work/out" || say "$1"
}
check "srun.sbatch ends all ranks if one is lost" lost_rank sdp4bit --kill-on-bad-exit=1
check "srun.sbatch lets the other nodes save with local steps" lost_rank local --kill-on-bad-exit=0
finish
