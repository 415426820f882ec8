#!/usr/bin/env bash
# Trains one model config. Called by scripts/train_125m.sh and the other train_*.sh with the name of
# the config. Translates PRESET and a few other variables into flags and starts the ranks. If mpirun
# or srun started this script, it runs as one of the ranks.
# shellcheck source-path=SCRIPTDIR source=common.sh source=ask_to_stop.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. scripts/ask_to_stop.sh
set -euo pipefail
root=$PWD
cd "$caller" # paths are relative to the caller's directory
case $BUILD in /*) ;; *) BUILD=$root/$BUILD ;; esac

# A model config is configs/gpt_NAME.args or configs/NAME.args.
config=${1:-} config_file=$root/configs/gpt_${1:-}.args
[ -f "$config_file" ] || config_file=$root/configs/$config.args
[ -n "$config" ] && [ -f "$config_file" ] ||
    die 2 "train.sh needs a model config; use scripts/train_125m.sh or another train_*.sh"
shift

save_interval=5002
[ "$config" != 6.7b ] || save_interval=2502

usage() {
    cat <<END
usage: [VARIABLE=...] scripts/train_$config.sh [flags of the trainer]
       mpirun -np RANKS scripts/train_$config.sh [flags], srun --mpi=pmix scripts/train_$config.sh [flags]

Trains configs/${config_file##*/}. Flags on the command line come last and override the model config and
the variables.

  PRESET           a preset of the paper: baseline (fp32 gradients), baseline-bf16, qw, qwd, ulq, tlq,
                   tlq-hs or sdp4bit; or zeropp, ZeRO++ with the gradients of ulq; or one of
                   configs/: eden, eden3, eden2-ef, lossless, eden-lossless, local, muon [baseline]
  DATA_PATH        prefix of the token shards, or a blend: "0.7 a_text_document 0.3 b_text_document"
  VOCAB_FILE, MERGE_FILE   GPT-2's vocabulary; not needed with mock data (SPEED=1)
  CHECKPOINT_PATH  folder of the checkpoints: saved every $save_interval iterations, and loaded if
                   one exists [none: nothing is saved]
  LOG_DIR          folder of log.jsonl and TensorBoard events; LOG_DIR= for none
                   [runs/$config-PRESET; SPEED=1: runs/$config-PRESET-speed]
                   Logs of another run there are moved to log.1.jsonl and tensorboard.1
  SPEED=1          the paper's speed runs: micro-batch 1, one per data-parallel rank and step, mock
                   data, 200 iterations, each one logged, nothing saved
  RANKS            number of ranks [GPUs of this machine, of the allocation or of HOSTFILE;
                   DEVICE=cpu: 4]
  HOSTFILE         file with a line "name slots=GPUS" per machine; ranks start on all of them
  MPIRUN_FLAGS     additional flags for mpirun
  DEVICE           gpu (build/train_gpt) or cpu (build/train_gpt_cpu) [gpu]
  DRY_RUN=1        print the command and exit

6.7b with SPEED=1 uses tensor parallel size 4. 13b and 18b use tensor parallel size 8, or on hosts with
four GPUs tensor parallel size 4 and pipeline parallel size 2. --tensor-model-parallel-size and
--pipeline-model-parallel-size override this.

Each host is a node. On one machine all ranks form one node, so there is no inter-node communication;
--gpus-per-node N divides the machine into nodes of N ranks.

More: scripts/README.md. Flags of the trainer: build/train_gpt_cpu --help.
END
}

# --- the flags --------------------------------------------------------------------------

weights=(--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --wq-rounding stochastic)
gradients=(--quantized-gradients --gradient-quantization-bits-inter 4 --gq-group-size-inter 128
    --gradient-quantization-bits-intra 8 --gq-group-size-intra 128)

# Lets the launcher wait two minutes instead of two seconds before it kills the other ranks after a
# failure, so that the surviving nodes of a --local-steps run can save (docs/checkpoints.md).
leave_time_to_save() {
    export OMPI_MCA_odls_base_sigkill_timeout="${OMPI_MCA_odls_base_sigkill_timeout-60}"
    export PRTE_MCA_odls_base_sigkill_timeout="${PRTE_MCA_odls_base_sigkill_timeout-60}"
}

# Sets $preset_flags to the flags of the preset. $quantizes_gradients is used by speed runs.
choose_preset() {
    quantizes_gradients=0 preset_flags=()
    case $preset in
    baseline) ;;
    baseline-bf16) preset_flags=(--grad-reduce-in-bf16) ;;
    qw) preset_flags=("${weights[@]}" --weight-quantization-method direct) ;;
    qwd) preset_flags=("${weights[@]}") ;;
    ulq) preset_flags=("${gradients[@]}" --gradient-quantization-bits-intra 4) quantizes_gradients=1 ;;
    tlq) preset_flags=("${gradients[@]}") quantizes_gradients=1 ;;
    tlq-hs) preset_flags=("${gradients[@]}" --hadamard-transform) quantizes_gradients=1 ;;
    sdp4bit) preset_flags=("${weights[@]}" "${gradients[@]}" --hadamard-transform) quantizes_gradients=1 ;;
    zeropp)
        preset_flags=("${weights[@]}" --weight-quantization-method direct --weight-quantization-bits 8
            "${gradients[@]}" --gradient-quantization-bits-intra 4
            --data-parallel-sharding-strategy optim_grads_params --shard-params-over world
            --secondary-partition)
        quantizes_gradients=1
        ;;
    eden | eden3 | eden2-ef | eden-lossless | local)
        preset_flags=("@$root/configs/$preset.args") quantizes_gradients=1
        [ $preset != local ] || leave_time_to_save
        ;;
    lossless | muon) preset_flags=("@$root/configs/$preset.args") ;;
    *)
        die 2 "PRESET=$preset is unknown; presets are baseline, baseline-bf16, qw, qwd, ulq, tlq, tlq-hs, \
sdp4bit, zeropp, eden, eden3, eden2-ef, lossless, eden-lossless, local, muon"
        ;;
    esac
}

is_count() { [[ $1 =~ ^[1-9][0-9]{0,6}$ ]]; }

has_one_of() {
    local flag
    for flag; do if has_flag "$flag"; then return 0; fi; done
    return 1
}

# Sets $tensor and $pipeline, the tensor and pipeline parallel sizes, and $layout, their flags.
# Flags of the user take precedence. The defaults are the paper's, for hosts with eight or four
# GPUs.
choose_layout() {
    local value
    tensor=1 pipeline=1 layout=()
    last_value --gpus-per-node
    if is_count "$value"; then node_ranks=$value; fi
    if ! has_one_of --tensor-model-parallel-size --pipeline-model-parallel-size; then
        case $speed-$config in
        1-6.7b) tensor=4 ;;
        *-13b | *-18b)
            tensor=8
            if [ $((node_ranks % 8)) = 4 ]; then tensor=4 pipeline=2; fi
            ;;
        esac
        if [ $tensor != 1 ]; then
            layout=(--tensor-model-parallel-size "$tensor" --pipeline-model-parallel-size "$pipeline")
        fi
    fi
    # The trainer rejects values that are not numbers.
    last_value --tensor-model-parallel-size
    if is_count "$value"; then tensor=$value; fi
    last_value --pipeline-model-parallel-size
    if is_count "$value"; then pipeline=$value; fi
}

# Sets $batch: one sequence per data-parallel rank. The trainer rejects rank counts that are not a
# multiple of tensor * pipeline.
choose_batch() {
    local value
    last_value --plan-world-size
    batch=$ranks
    if is_count "$value"; then batch=$value; fi
    batch=$((batch / (tensor * pipeline)))
    [ $batch != 0 ] || batch=1
}

# Sets $flags from the model config, the variables and the command line, and $words to the same
# flags with argument files expanded.
choose_flags() {
    local data=() tensor pipeline layout batch
    choose_layout
    flags=("@$config_file" ${layout[@]+"${layout[@]}"})
    if [ "$speed" = 1 ]; then
        choose_batch
        flags+=(--micro-batch-size 1 --global-batch-size "$batch" --mock-data --log-interval 1
            --exit-interval 200)
        # The paper's speed scripts split the gradients of a bucket into 8 chunks for these models.
        case $quantizes_gradients-$config in
        1-1.3b | 1-2.7b | 1-6.7b) preset_flags+=(--gradient-alltoall-pipeline 8) ;;
        esac
    elif [ -n "${DATA_PATH:-}" ]; then
        # A prefix may contain spaces.
        if [ -e "$DATA_PATH.idx" ]; then data=("$DATA_PATH"); else read -ra data <<<"$DATA_PATH"; fi
        flags+=(--data-path "${data[@]}")
    elif ! has_one_of --data-path --train-data-path --mock-data --plan --version; then
        die 2 "DATA_PATH is not set; set it to the prefix of the token shards (see dev/data/README.md), \
or use SPEED=1 for mock data"
    fi
    [ -z "${VOCAB_FILE:-}" ] || flags+=(--vocab-file "$VOCAB_FILE")
    [ -z "${MERGE_FILE:-}" ] || flags+=(--merge-file "$MERGE_FILE")
    if [ -n "${CHECKPOINT_PATH:-}" ] && [ "$speed" = 0 ]; then
        flags+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "$save_interval")
    fi
    if [ -n "$log_dir" ]; then
        flags+=(--log-jsonl "$log_dir/log.jsonl" --tensorboard-dir "$log_dir/tensorboard"
            --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard)
    fi
    flags+=(${preset_flags[@]+"${preset_flags[@]}"} "$@")
    read_words "${flags[@]}"
}

# Ends if one node would train with --local-steps. The trainer refuses this too, but mpirun would
# end only after the time of leave_time_to_save.
refuse_one_node() {
    local value
    last_value --local-steps
    if [ "${value:-1}" = 1 ] || [ "$node_ranks" != "$ranks" ]; then return 0; fi
    ! has_one_of --version --plan --replica-group --check-data --inspect-data --skip-train || return 0
    die 2 "--local-steps needs two or more nodes, or replica groups (--replica-group), but this run has one \
node; add nodes, set --gpus-per-node, or drop --local-steps (PRESET=eden)"
}

# Prints the communication formats, from $words and the placement of the ranks, and the model
# parallel layout if there is one. On one machine the inter-node format of a preset is unused, so
# the line suggests --gpus-per-node.
say_formats() {
    local value tensor pipeline layout data per_node hosts=0 inside=fp32 between=fp32 replicas=bf16 who=ranks
    if has_flag --grad-reduce-in-bf16; then inside=bf16 between=bf16; fi
    if has_flag --quantized-gradients; then
        last_value --gradient-quantization-bits-intra
        inside=int${value:-8}
        last_value --gradient-quantization-bits-inter
        between=int${value:-4}
        last_value --gradient-quantization-method
        [ "$value" != eden ] || between=${between/int/eden}
    fi
    if has_flag --quantized-weights; then
        last_value --weight-quantization-bits
        replicas=int${value:-4}
        last_value --weight-quantization-method
        [ "$value" = direct ] || replicas+=" differences"
        [ "$value" != lossless ] || replicas="lossless bf16"
    fi
    last_value --local-steps
    [ "${value:-1}" = 1 ] || between+=" every $value steps"
    choose_layout
    data=$((ranks / (tensor * pipeline)))
    if [ $((tensor * pipeline)) != 1 ]; then
        say "layout: tensor parallel $tensor, pipeline $pipeline, data parallel $data"
        who="data-parallel ranks"
    fi
    # Data-parallel ranks of a node, as llmc/ranks/mesh.c counts them.
    per_node=$((node_ranks / tensor))
    [ $per_node != 0 ] || per_node=1
    [ $per_node -le $data ] || per_node=$data
    last_value --gpus-per-node
    if [ "${value:-0}" = 0 ] && [ ${#placement[@]} -gt 0 ]; then hosts=1; fi
    if [ $data -le 1 ]; then
        say "communication: none, there is one ${who%s}"
    elif [ $hosts = 1 ] && [ $per_node != 1 ]; then
        say "communication: gradients $inside within a host, $between between hosts; weights $replicas"
    elif [ $hosts = 1 ]; then
        say "communication: gradients $between, weights $replicas, between hosts"
    elif [ $per_node = $data ]; then
        say "communication: gradients $inside, weights $replicas, within one node of $data $who; none \
between nodes (--gpus-per-node N splits this machine into several nodes)"
    elif [ $per_node = 1 ]; then
        say "communication: gradients $between, weights $replicas, between $data nodes of one ${who%s}"
    else
        say "communication: gradients $inside within nodes of $per_node $who, $between between nodes; \
weights $replicas"
    fi
}

# --- the log ----------------------------------------------------------------------------

# Returns false if mpirun or srun started this script as a rank other than 0.
is_first() { [ "${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-0}}}" = 0 ]; }

# A log must hold one run only. The folder of checkpoints identifies the run, and log.run next to
# the log names that folder; it is empty if the run saved none. A run that resumes from that folder
# appends to the log. Any other run gets a new log, for example one that tries other flags without
# saving.

# Sets $home to the folder that this run saves to ('' if none), and $resumes to 1 if the run resumes
# from a checkpoint in that folder.
find_home() {
    local value
    last_value --save
    home=$value resumes=0
    [ -n "$home" ] || return 0
    home=$(realpath -m -- "$home")
    last_value --load
    if [ -z "$value" ] || [ "$(realpath -m -- "$value")" != "$home" ]; then return 0; fi
    ! has_flag --finetune || return 0
    # Like the trainer, which finds checkpoints without the tracker file.
    if [ -e "$home/latest_checkpointed_iteration.txt" ] ||
        compgen -G "$home/iter_*/manifest.json" >/dev/null; then resumes=1; fi
}

# refuses FLAGS...: runs the trainer as a single process with the run's flags and FLAGS, and returns
# whether it rejects the flags or the data. Sets $code and $said. Other failures are ignored,
# because a machine may be unable to run a single process. The launcher's variables are removed,
# because they would make the process one of the ranks.
refuses() {
    local name alone=()
    for name in $(compgen -e | grep -E '^(OMPI|PMIX?|PRTE|SLURM)_' || true); do alone+=(-u "$name"); done
    code=0
    said=$(env ${alone[@]+"${alone[@]}"} timeout 300 "$program" "${flags[@]}" "$@" 2>&1 >/dev/null \
        </dev/null) || code=$?
    [ $code = 2 ] || [ $code = 5 ]
}

# Checks the run before its log replaces another one. --plan checks the flags for $ranks ranks, and
# --inspect-data checks the data on one rank. Exits with the trainer's message if it rejects them. A
# launched rank must not exit, because the others would wait for it: then this returns false, and
# the trainer fails with the same message before it opens a log.
can_start() {
    local code said
    if refuses --plan --plan-world-size "$ranks"; then
        [ "$launched" = 0 ] || return 1
    elif [ "$launched" != 0 ] || [ ${#placement[@]} -gt 0 ] || has_flag --skip-train; then
        return 0 # the data of other machines may not be accessible here
    elif ! refuses --gpus-per-node 1 --inspect-data 0; then
        return 0
    fi
    grep '^error: ' <<<"$said" >&2 || say "$said" >&2
    exit $code
}

# Logs and events of other runs were moved aside under numbered names. Sets $n to the highest
# number, and $own to the highest number that belongs to this run; 0 if there is none.
find_set_aside() {
    local path number
    n=0 own=0
    for path in "$log_dir"/log.*.jsonl "$log_dir"/tensorboard.*; do
        number=${path##*/}
        number=${number#*.}
        number=${number%.jsonl}
        [[ $number =~ ^[1-9][0-9]*$ ]] || continue
        [ "$number" -le "$n" ] || n=$number
        [ "$number" -gt "$own" ] || continue
        if [ "$(cat "$log_dir/log.$number.run" 2>/dev/null)" = "$home" ]; then own=$number; fi
    done
}

# move_log FROM TO: renames a log, its events and log.run. '' is the current log; .3 is the third
# log that was moved aside.
move_log() {
    local name from
    for name in log@.run log@.jsonl tensorboard@; do
        from=$log_dir/${name/@/$1}
        [ ! -e "$from" ] || mv "$from" "$log_dir/${name/@/$2}" ||
            die 3 "$from cannot be moved; choose another LOG_DIR"
    done
}

# Chooses between appending to the log and starting a new one. Only rank 0 writes the log, and it
# opens the files after this function has returned.
choose_log() {
    local value home resumes n own here=0
    if ! is_first || [ -z "$log_dir" ]; then return 0; fi
    ! has_one_of --plan --version --check-data --inspect-data || return 0
    last_value --log-jsonl
    [ "$value" != "$log_dir/log.jsonl" ] || here=1
    last_value --tensorboard-dir
    [ "$value" != "$log_dir/tensorboard" ] || here=1
    [ $here = 1 ] || return 0
    find_home
    # A log without log.run was started by hand. A resumed run appends to it.
    if [ $resumes = 0 ] || [ "$(cat "$log_dir/log.run" 2>/dev/null || say "$home")" != "$home" ]; then
        find_set_aside
        if [ -s "$log_dir/log.jsonl" ] || [ -n "$(ls -A "$log_dir/tensorboard" 2>/dev/null)" ]; then
            can_start || return 0
            move_log '' .$((n + 1))
            say "$log_dir contains the log of another run: moved to log.$((n + 1)).jsonl, its \
tensorboard to tensorboard.$((n + 1))"
        fi
        if [ $resumes = 1 ] && [ "$own" != 0 ]; then
            rm -f "$log_dir/log.jsonl" # it is empty
            rmdir "$log_dir/tensorboard" 2>/dev/null || true
            move_log ".$own" ''
            say "restored this run's log from log.$own.jsonl to $log_dir/log.jsonl"
        fi
    fi
    # If this fails, the trainer reports that the log cannot be written.
    { mkdir -p "$log_dir" && say "$home" >"$log_dir/log.run"; } 2>/dev/null || true
}

# --- the ranks --------------------------------------------------------------------------

gpu_count() {
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
    elif have_command nvidia-smi; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    else
        say 0
    fi
}

# Sets $ranks to the number of ranks of the launcher that started this process (0 if none), and
# $node_ranks to the number of ranks per host.
find_launcher() {
    node_ranks=
    if [ -n "${OMPI_COMM_WORLD_SIZE:-}" ]; then
        ranks=$OMPI_COMM_WORLD_SIZE node_ranks=${OMPI_COMM_WORLD_LOCAL_SIZE:-}
    elif [ -n "${PMI_SIZE:-}" ]; then
        ranks=$PMI_SIZE node_ranks=${MPI_LOCALNRANKS:-}
    elif [ -n "${PMIX_RANK:-}${PMI_RANK:-}" ]; then
        ranks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}}
        node_ranks=${SLURM_STEP_TASKS_PER_NODE:-} # "8(x4)"
        node_ranks=${node_ranks%%[!0-9]*}
    elif [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
        # Task 0 prints the error; the others wait for it.
        [ "${SLURM_PROCID:-0}" = 0 ] || { sleep 2; exit 3; }
        die 3 "srun started $SLURM_STEP_NUM_TASKS tasks that cannot communicate; use srun --mpi=pmix \
(srun --mpi=list lists the available types)"
    else
        ranks=0
    fi
    node_ranks=${node_ranks:-$ranks}
}

# Sets $ranks, $node_ranks, and $placement: mpirun's placement flags, empty on one machine.
choose_ranks() {
    local nodes=${SLURM_JOB_NUM_NODES:-1} per_node
    node_ranks=
    if [ -n "${HOSTFILE:-}" ]; then
        [ -r "$HOSTFILE" ] || die 2 "HOSTFILE=$HOSTFILE cannot be read"
        if grep -vE '^[[:space:]]*(#|$)' "$HOSTFILE" | grep -qvE 'slots=[1-9]'; then
            die 2 "HOSTFILE=$HOSTFILE: every line must have slots=GPUS"
        fi
        ranks=${RANKS:-$(sed -n 's/^[^#]*slots=\([0-9]*\).*/\1/p' "$HOSTFILE" |
            awk '{ n += $1 } END { print n + 0 }')}
        node_ranks=$(sed -n 's/^[^#]*slots=\([0-9]*\).*/\1/p;' "$HOSTFILE" | head -n 1)
        placement=(--hostfile "$HOSTFILE" --map-by slot)
    elif [ -n "${SLURM_JOB_ID:-}" ] && [ "$nodes" -gt 1 ]; then
        per_node=${SLURM_NTASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(gpu_count)}}
        if [ -n "${RANKS:-}" ]; then
            [ $((RANKS % nodes)) = 0 ] ||
                die 2 "RANKS=$RANKS cannot be spread evenly over the $nodes nodes of the allocation"
            per_node=$((RANKS / nodes))
        fi
        ranks=$((per_node * nodes)) node_ranks=$per_node
        placement=(--map-by "ppr:$per_node:node")
    elif [ "$device" = cpu ]; then
        ranks=${RANKS:-4}
    else
        ranks=${RANKS:-$(gpu_count)}
        [ "$ranks" != 0 ] || die 3 "no GPU was found; set RANKS, or DEVICE=cpu for CPU ranks"
    fi
    is_count "$ranks" || die 2 "RANKS=$ranks must be a positive number"
    if ! is_count "$node_ranks" || [ "$node_ranks" -gt "$ranks" ]; then node_ranks=$ranks; fi
}

# Sets $launcher, the command that starts the ranks.
choose_launcher() {
    local name words=() exported='^(NCCL_|(CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH|OPENBLAS_NUM_THREADS)$)'
    choose_ranks
    have_command mpirun ||
        die 3 "mpirun was not found; install openmpi-bin, or start the ranks with another launcher"
    launcher=(mpirun)
    if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
        launcher+=(--bind-to none)
        [ "$device" = gpu ] || launcher+=(--oversubscribe)
        [ "$(id -u)" != 0 ] || launcher+=(--allow-run-as-root)
        if [ ${#placement[@]} -gt 0 ]; then
            # Other machines do not inherit this environment.
            for name in $(compgen -e | grep -E "$exported" || true); do launcher+=(-x "$name"); done
        else
            one_machine
        fi
    fi
    read -ra words <<<"${MPIRUN_FLAGS:-}"
    launcher+=(-np "$ranks" ${placement[@]+"${placement[@]}"} ${words[@]+"${words[@]}"})
}

# Runs "$@" (mpirun ...) until it exits. On SIGUSR1, SIGHUP, SIGTERM or SIGINT (Ctrl-C), the ranks
# save and exit. A second SIGTERM or SIGINT kills the job immediately.
run_and_forward() {
    local job filter status name again=1 signals=0 oom_before
    oom_before=$(oom_kills "$@")
    exec 4> >(trap '' HUP USR1 TERM INT; without_banners "$@" >&2)
    filter=$!
    set -m # separate process group, so that Ctrl-C reaches only this script
    "$@" </dev/null 2>&4 4>&- &
    job=$!
    set +m
    exec 4>&-
    forward() {
        again=1 signals=$((signals + 1))
        stop_run "$1" "$signals" "$job"
    }
    for name in HUP INT TERM USR1; do
        # shellcheck disable=SC2064 # expand $name now
        trap "forward $name" $name
    done
    while [ $again = 1 ]; do
        again=0 status=0
        wait "$job" || status=$?
    done
    if wait "$filter" 2>/dev/null; then say_signal "$status" "$@"; fi
    exit "$status"
}

# --- main -------------------------------------------------------------------------------

read_words "$@"
if has_flag --help || has_flag -h; then
    usage
    exit 0
fi
[ -z "${ARM:-}" ] || say "ARM= is deprecated; use PRESET=$ARM" >&2
preset=${PRESET:-${ARM:-baseline}} speed=${SPEED:-0} device=${DEVICE:-gpu}
case $speed in 0 | 1) ;; *) die 2 "SPEED=$speed must be 0 or 1" ;; esac
case $device in
gpu) program=$BUILD/train_gpt target=gpu ;;
cpu) program=$BUILD/train_gpt_cpu target=cpu ;;
*) die 2 "DEVICE=$device must be gpu or cpu" ;;
esac
choose_preset
log_dir=runs/$config-$preset
# Speed runs never resume and must not move the log of an accuracy run.
[ "$speed" = 0 ] || log_dir+=-speed
log_dir=${LOG_DIR-$log_dir}
find_launcher
launched=$ranks launcher=() placement=()
[ "$launched" != 0 ] || choose_launcher
choose_flags "$@"
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' ${launcher[@]+"${launcher[@]}"} "$program" "${flags[@]}" | sed 's/ $/\n/'
    exit 0
fi
[ -x "$program" ] || die 3 "$program is not built; run make $target"
[ "$launched" != 0 ] || refuse_one_node
[ "$launched" != 0 ] || has_flag --version || has_flag --plan || say_formats
choose_log
[ "$launched" = 0 ] || exec "$program" "${flags[@]}"
run_and_forward "${launcher[@]}" "$program" "${flags[@]}"
