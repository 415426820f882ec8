#!/usr/bin/env bash
# Common behavior of scripts: --help and -h are handled before any work, paths are relative to the
# caller's folder, and errors print one clear line. Prints "ok NAME" and "not ok NAME: why" lines.
# shellcheck disable=SC2015,SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failures=0
check() {
    local name=$1
    shift
    why=
    if "$@"; then echo "ok $name"; else
        echo "not ok $name: ${why:-failed}; $(head -n 1 "$work/err")"
        failures=$((failures + 1))
    fi
}
# error_line CODE TEXT RC: checks that the exit code RC is CODE and that one error line contains
# TEXT.
error_line() {
    [ "$3" -eq "$1" ] || { why="exit code $3 instead of $1"; return 1; }
    [ "$(wc -l <"$work/err")" -eq 1 ] && grep -q '^error: ' "$work/err" && grep -qF -- "$2" "$work/err" ||
        { why="not one line of error with '$2'"; return 1; }
}

# Stubs of commands that would do work write to a file and fail. The simulated machine has no GPU.
mkdir "$work/bin" "$work/none"
for command in make mpirun nvcc tc curl apt-get; do
    printf '#!/bin/sh\ntouch "%s"\nexit 1\n' "$work/worked" >"$work/bin/$command"
    chmod +x "$work/bin/$command"
done
printf '#!/bin/sh\nexit 9\n' >"$work/bin/nvidia-smi" && chmod +x "$work/bin/nvidia-smi"

# --- help ------------------------------------------------------------------------------------
helps() { # SCRIPT FLAG: started from another folder than the repository
    rm -f "$work/worked"
    (cd "$work/none" && PATH=$work/bin:$PATH timeout 300 "$root/$1" "$2") >"$work/out" 2>"$work/err" \
        </dev/null || { why="exit code $?"; return 1; }
    grep -qF "${1##*/}" "$work/out" || { why="it does not print its usage"; return 1; }
    ! grep -qE '^#|shellcheck' "$work/out" || { why="comment characters in the output"; return 1; }
    [ ! -s "$work/err" ] && [ ! -e "$work/worked" ] && [ -z "$(ls "$work/none")" ] ||
        { why="it did other work"; return 1; }
}
for script in scripts/{doctor,emulate_network,quickstart,run_until_done,test}.sh \
    scripts/train_{125m,18b,llama_1.1b}.sh \
    dev/bench/{codec,comm,layouts,save,single_gpu,tokenizer}.sh \
    dev/data/{get_gpt2_vocab,linux_source,pile}.sh test/gpu.sh; do
    check "${script##*/} --help" helps "$script" --help
    check "${script##*/} -h" helps "$script" -h
done
unknown() { # an unknown argument must not count as --help
    dev/data/get_gpt2_vocab.sh --hepl >"$work/out" 2>"$work/err"
    error_line 2 "--help" $?
}
check "get_gpt2_vocab.sh refuses an unknown flag" unknown

# --- paths -----------------------------------------------------------------------------------
quickstart_in() { # runs up to the build, which fails here
    (cd "$work" && BUILD=$work/build PATH=$work/bin:$PATH "$root/scripts/quickstart.sh" --no-install \
        --out "$1") >"$work/out" 2>"$work/err" </dev/null
}
callers_folder() {
    quickstart_in scripts_test_out
    local rc=$?
    [ -d "$work/scripts_test_out" ] && [ ! -e scripts_test_out ] ||
        { why="exit code $rc, not in the caller's folder"; rmdir scripts_test_out 2>/dev/null; return 1; }
}
check "quickstart.sh --out is relative to the caller's folder" callers_folder
not_made() {
    quickstart_in /proc/nowhere
    error_line 3 "/proc/nowhere" $?
}
check "quickstart.sh reports an --out that cannot be created" not_made
progress() { # of the installation and of the build
    mkdir "$work/apt"
    cat >"$work/apt/apt-get" <<END
#!/bin/sh
case "\$*" in *update) exit ;; esac
echo '0 upgraded, 10 newly installed, 0 to remove and 3 not upgraded.'
echo 'Need to get 12.3 MB of archives.'
for i in 1 2 3 4 5 6 7 8 9 10; do echo 'Unpacking a (1) ...'; done
for i in 1 2 3 4 5 6 7 8 9 10; do echo 'Setting up a (1) ...'; done
touch "$work/installed"
END
    chmod +x "$work/apt/apt-get"
    # shellcheck disable=SC2016 # expanded by the inner shell
    PATH=$work/apt:$PATH WORK=$work bash -c '. scripts/common.sh; BUILD=$WORK/build
        sudo() { "$@"; }
        missing() { [ -e "$WORK/installed" ] || echo "a|a"; }
        install_missing 0 run' >"$work/out" 2>"$work/err" || { why=$(cat "$work/err"); return 1; }
    [ "$(grep -cxE '  (downloading 12.3 MB|installed (15|45|90) %)' "$work/out")" = 4 ] ||
        { why="$(cat "$work/out")"; return 1; }
    cp "$work/bin/make" "$work/make"
    # shellcheck disable=SC2016 # expanded by the stub
    printf '#!/bin/sh\nfor i in 1 2 3 4 5 6; do echo "cc -c $i.c"; done\n[ "$1" = -n ]\n' >"$work/bin/make"
    quickstart_in scripts_test_out
    grep -q '^error: the build failed' "$work/err" && grep -qx '  compiled 6 of 6 files' "$work/out" ||
        why="no progress: $(cat "$work/out" "$work/err")"
    mv "$work/make" "$work/bin/make"
    [ -z "$why" ]
}
check "the installation and the build show progress" progress
# interrupted NAME CODE: sends the signal to all processes of the script during the build, like a
# terminal.
interrupted() {
    local rc
    printf '#!/bin/sh\nkill -s %s 0\nsleep 1\n' "$1" >"$work/bin/make"
    (cd "$work" && BUILD=$work/build PATH=$work/bin:$PATH setsid --wait env --default-signal="$1" \
        "$root/scripts/quickstart.sh" --no-install --out scripts_test_out) >"$work/out" 2>"$work/err" \
        </dev/null
    rc=$?
    [ $rc = "$2" ] || { why="exit code $rc"; return 1; }
    grep -qx "interrupted by SIG$1; no comparison was made" "$work/err" && ! grep -q '^error' "$work/err" ||
        { why="not one line that reports it"; return 1; }
    ! grep -q 'MISSED' "$work/out" || { why="a goal is reported as missed"; return 1; }
}
check "quickstart.sh ends on Ctrl-C" interrupted INT 130
check "quickstart.sh ends on SIGTERM" interrupted TERM 143
printf '#!/bin/sh\ntouch "%s"\nexit 1\n' "$work/worked" >"$work/bin/make"

output_not_made() { # SCRIPT: reports the error before anything runs
    rm -f "$work/worked"
    PATH=$work/bin:$PATH "$1" --out /proc/nowhere/made.json >"$work/out" 2>"$work/err" </dev/null
    error_line 3 "/proc/nowhere" $? && [ ! -e "$work/worked" ] || { why=${why:-it worked first}; return 1; }
}
bench_folder() { # the programs are missing, but the folder for results is created
    (cd "$work" && BUILD=$work/build "$root/dev/bench/single_gpu.sh" --out scripts_test_bench/made.json) \
        >"$work/out" 2>"$work/err" </dev/null
    local rc=$?
    error_line 3 "is missing" $rc && [ -d "$work/scripts_test_bench" ] && [ ! -e scripts_test_bench ] ||
        { why="${why:-not in the folder of the caller}"; rmdir scripts_test_bench 2>/dev/null; return 1; }
}
check "single_gpu.sh --out is relative to the caller's folder" bench_folder
for script in dev/bench/{comm,save,single_gpu}.sh; do check "${script##*/} reports an --out that cannot be created" \
    output_not_made "$script"; done
peer_of_one_gpu() { # the peer runs as precisely as this program, and in its fastest configuration
    mkdir -p "$work/peer"
    printf '#!/bin/sh\n' >"$work/peer/train_gpt"
    printf '#!/bin/sh\necho "$*" >>"%s"\n' "$work/peer/calls" >"$work/peer/python3"
    chmod +x "$work/peer/"*
    PATH=$work/peer:$PATH BUILD=$work/peer dev/bench/single_gpu.sh --models 125m:2 --modes default \
        --out "$work/peer/out.json" >"$work/out" 2>"$work/err" || { why="exit code $?"; return 1; }
    [ "$(grep -o 'pytorch_gpt.py.*' "$work/peer/calls" | tr '\n' ,)" = \
        "pytorch_gpt.py 125m:2 --weights fp32,pytorch_gpt.py 125m:2 --weights bf16," ] ||
        { why="other runs of PyTorch"; return 1; }
}
check "single_gpu.sh runs PyTorch with fp32 and with bf16 weights" peer_of_one_gpu
fp8_of_one_gpu() { # modes and peers in FP8, and the first layers of a large model
    mkdir -p "$work/peer"
    rm -f "$work/peer/"*calls
    printf '#!/bin/sh\necho "$*" >>"%s"\n' "$work/peer/train_calls" >"$work/peer/train_gpt"
    printf '#!/bin/sh\necho "$*" >>"%s"\n' "$work/peer/calls" >"$work/peer/python3"
    chmod +x "$work/peer/"*
    PATH=$work/peer:$PATH BUILD=$work/peer dev/bench/single_gpu.sh --models 6.7b-8:4 \
        --modes "default fp8-blockwise" --pytorch "fp32 fp32+fp8" \
        --out "$work/peer/out.json" >"$work/out" 2>"$work/err" || { why="exit code $?"; return 1; }
    [ "$(grep -o 'pytorch_gpt.py.*' "$work/peer/calls" | tr '\n' ,)" = \
        "pytorch_gpt.py 6.7b-8:4 --weights fp32,pytorch_gpt.py 6.7b-8:4 --weights fp32 --float8 tensorwise," ] ||
        { why="other runs of PyTorch"; return 1; }
    [ "$(grep -c 'gpt_6.7b.args --num-layers 8 ' "$work/peer/train_calls")" = 2 ] &&
        [ "$(grep -c -e '--fp8-format hybrid --fp8-recipe blockwise' "$work/peer/train_calls")" = 1 ] ||
        { why="other runs of the trainer"; return 1; }
}
check "single_gpu.sh runs FP8 and a few layers if asked" fp8_of_one_gpu
vocabulary_not_made() {
    PATH=$work/bin:$PATH dev/data/get_gpt2_vocab.sh /proc/nowhere >"$work/out" 2>"$work/err"
    error_line 3 "/proc/nowhere" $?
}
check "get_gpt2_vocab.sh reports a folder that cannot be created" vocabulary_not_made

# --- no GPU ----------------------------------------------------------------------------------
no_gpu() {
    rm -f "$work/worked"
    PATH=$work/bin:$PATH dev/bench/codec.sh >"$work/out" 2>"$work/err" </dev/null
    error_line 3 "no GPU" $? && [ ! -e "$work/worked" ] || { why=${why:-it built}; return 1; }
}
check "codec.sh without a GPU builds nothing" no_gpu

# --- test/gpu.sh with programs that only print results -----------------------------------------
mkdir -p "$work/gpu" "$work/gpu_build/test/gpu"
printf '#!/bin/sh\necho GPU 0\n' >"$work/gpu/nvidia-smi"
# Starts one process, the program, without the flags of mpirun.
cat >"$work/gpu/mpirun" <<'END'
#!/bin/bash
while [ "$1" != -np ]; do [ "$1" != --version ] || exit 0; shift; done
exec "${@:3}"
END
# grep buffers its output like a C program whose standard output is a pipe.
printf '#!/bin/bash\n{ echo "ok first"; echo "ok second"; sleep 60; } | grep .\n' \
    >"$work/gpu_build/test/gpu/test_sdp4bit_mpi"
chmod +x "$work"/gpu/* "$work/gpu_build/test/gpu/test_sdp4bit_mpi"
gpu_rows() { # results appear with their seconds while the program that printed them still runs
    local pid i
    PATH=$work/gpu:$PATH CUDA_VISIBLE_DEVICES=0 BUILD=$work/gpu_build setsid test/gpu.sh --no-build \
        --part exact >"$work/out" 2>&1 </dev/null &
    pid=$!
    for ((i = 0; i < 300; i++)); do
        [ "$(grep -cE '^ok (first|second) \([0-9]+ s\)$' "$work/out")" -lt 2 ] || break
        sleep 0.1
    done
    kill -- -$pid
    wait $pid 2>/dev/null
    [ $i -lt 300 ] || { why="after 30 s: $(head -n 3 "$work/out")"; return 1; }
}
check "test/gpu.sh prints each result as soon as it exists" gpu_rows
gpu_parts() { # every part of --help is accepted, and nothing runs without a GPU
    local part parts
    printf '#!/bin/sh\nexit 1\n' >"$work/gpu/nvidia-smi"
    parts=$(test/gpu.sh --help | sed -nE 's/^ {9}([a-z]+[48]?)  .*/\1/p')
    [ "$(wc -w <<<"$parts")" -ge 21 ] || { why="--help lists $parts"; return 1; }
    for part in $parts; do
        PATH=$work/gpu:$PATH test/gpu.sh --part "$part" >"$work/out" 2>&1 &&
            grep -qx '0 passed, 0 failed, 1 skipped' "$work/out" ||
            { why="$part: $(tail -n 1 "$work/out")"; return 1; }
    done
}
check "test/gpu.sh accepts every part of its --help" gpu_parts

# --- dev/checkpoint_info without a checkpoint ------------------------------------------------
info() { # TEXT PATH
    dev/checkpoint_info "$2" >"$work/out" 2>"$work/err"
    error_line 6 "$1" $?
}
no_advice() { info "$@" && ! grep -qE 'Errno|restore' "$work/err" ||
    { why=${why:-Errno, or advice for a damaged checkpoint}; return 1; }; }
mkdir -p "$work/runs/other" "$work/gone/iter_0000004" "$work/damaged"
echo 12 >"$work/gone/latest_checkpointed_iteration.txt"
echo '{' >"$work/damaged/manifest.json"
check "checkpoint_info reports a missing path" no_advice "$work/nix: no such folder" "$work/nix"
check "checkpoint_info reports a file in place of a folder" no_advice "$work/damaged/manifest.json: not a folder" \
    "$work/damaged/manifest.json"
check "checkpoint_info reports a folder without checkpoints" no_advice \
    "$work/runs holds no checkpoint; pass a --save folder or an iter_ folder" "$work/runs"
check "checkpoint_info reports a tracker that names a missing checkpoint" no_advice \
    "names iteration 12, but there is no $work/gone/iter_0000012" "$work/gone"
check "checkpoint_info reports a truncated manifest" info "restore it from a copy" "$work/damaged"
unnamed() { # prints the newest checkpoint, from which the trainer would resume
    mkdir -p "$work/lost/iter_0000004" "$work/lost/iter_0000008" &&
        echo '{}' >"$work/lost/iter_0000004/manifest.json" &&
        cp "$work/lost/iter_0000004/manifest.json" "$work/lost/iter_0000008"
    no_advice "$work/lost has no latest_checkpointed_iteration.txt; pass one of its iter_ folders, such as the newest, iter_0000008" "$work/lost"
}
check "checkpoint_info finds the newest checkpoint without a tracker" unnamed
read_in_part() { # the output does not fit into a pipe
    mkdir -p "$work/long"
    python3 -c 'import json; print(json.dumps({"program": "p", "commit": "c", "libraries": "l",
        "world_size": 1, "kinds": [], "weight_dtype": "BF16", "state": {}, "tensors": [], "files": [],
        "arguments": {f"flag_{i}": i for i in range(20000)}}))' >"$work/long/manifest.json"
    dev/checkpoint_info "$work/long" --arguments >"$work/out" 2>"$work/err" &&
        [ "$(wc -l <"$work/out")" -gt 20000 ] || { why="it is not listed"; return 1; }
    dev/checkpoint_info "$work/long" --arguments 2>"$work/err" | head -n 1 >"$work/out"
    grep -q '0 parameters' "$work/out" && [ ! -s "$work/err" ]
}
check "checkpoint_info allows readers to close the pipe early" read_in_part

exit $((failures > 0))
