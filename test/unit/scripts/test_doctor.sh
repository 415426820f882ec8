#!/usr/bin/env bash
# scripts/doctor.sh on incomplete machines, which are imitated by a PATH without some commands, by
# stubs, and by a toolkit and libraries made of empty files.
set -u
cd "$(dirname "$0")/../../.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0

# Links all commands of this machine except NVIDIA's, and adds an mpirun that starts nothing.
mkdir "$work/bin" "$work/none"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    case $folder in */ccache) continue ;; esac # ccache does not work through links
    ln -s "$folder"/* "$work/bin/" 2>/dev/null
done
rm -f "$work/bin/"nvcc "$work/bin/"nvidia-smi "$work/bin/"mpirun
stub() { # FILE TEXT...: creates a command that prints the text
    rm -f "$1"
    { echo '#!/bin/sh'; echo "cat <<'END'"; printf '%s\n' "${@:2}"; echo END; } >"$1"
    chmod +x "$1"
}
stub "$work/bin/mpirun" "mpirun (Open MPI) 4.1.4"

toolkit=$work/cuda
mkdir -p "$toolkit/bin" "$toolkit/include" "$toolkit/lib64" "$work/frontend"
toolkit_is() { stub "$toolkit/bin/nvcc" "Cuda compilation tools, release $1, V$1.88"; }
toolkit_is 13.0
printf '#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n' >"$toolkit/include/nccl.h"
printf '#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 19\n' >"$toolkit/include/cudnn_version.h"
touch "$toolkit/include/cudnn.h" "$toolkit/lib64/libnccl.so.2" "$toolkit/lib64/libcudnn.so.9" \
    "$work/frontend/cudnn_frontend.h"
# driver VERSION CUDA NAME CAPABILITY: simulates a machine with two such GPUs.
driver() {
    {
        echo '#!/bin/sh'
        echo "case \$* in *query*) echo '$3, $1, 143771 MiB, $4'; echo '$3, $1, 143771 MiB, $4' ;; *) echo '| NVIDIA-SMI $1    Driver Version: $1    CUDA Version: $2 |' ;; esac"
    } >"$work/bin/nvidia-smi"
    chmod +x "$work/bin/nvidia-smi"
}

# doctor CODE [VARIABLE=VALUE...]: checks the exit code and writes the report to $work/out.
doctor() {
    local code=$1 rc=0
    shift
    env PATH="$work/bin" CUDA_HOME="$toolkit" CUDNN_FRONTEND="$work/frontend" NCCL_HOME= CUDNN_HOME= \
        BUILD="$work/none" "$@" bash scripts/doctor.sh >"$work/out" 2>"$work/err" || rc=$?
    if [ $rc != "$code" ] || [ -s "$work/err" ]; then
        echo "not ok doctor.sh $*: exit code $rc instead of $code; $(head -n 1 "$work/err")"
        failed=1
    fi
}
# says NAME PATTERN: checks that a line of the report matches.
says() {
    if grep -qE -- "$2" "$work/out"; then
        echo "ok reports $1"
    else
        echo "not ok reports $1: no line like '$2'"
        sed 's/^/#   /' "$work/out"
        failed=1
    fi
}

driver 580.65 13.0 "NVIDIA H200" 9.0
doctor 0
says "a complete machine" '^The GPU program can be built and run here\.$'
says "versions and paths of libraries" \
    "^NCCL +ok 2\.28 \($toolkit/include/nccl.h, $toolkit/lib64/libnccl.so.2\)"
says "cuDNN's version" '^cuDNN +ok 9\.19 '
says "the number and names of GPUs" '^GPU +ok 2 x NVIDIA H200, 143771 MiB, compute capability 9\.0$'
says "the commit, for a bug report" '^commit +[0-9a-f]{7}|^commit +unknown'

driver 550.54 12.4 "NVIDIA H200" 9.0
printf '#!/bin/sh\necho "	libcudnn.so.9 => not found"\n' >"$work/ldd"
rm -f "$work/bin/ldd"
chmod +x "$work/ldd" && mv "$work/ldd" "$work/bin/ldd"
printf '#!/bin/sh\n' >"$work/none/train_gpt" && chmod +x "$work/none/train_gpt"
doctor 0 NCCL_HOME=/nowhere CUDNN_HOME=/nowhere CUDNN_FRONTEND=/nowhere
says "an old driver" '^driver +too old: 550\.54 supports CUDA 12\.4, the toolkit is 13\.0;'
says "a program that no longer finds a library" '/train_gpt +does not find libcudnn\.so\.9;'
says "NCCL_HOME without NCCL" '^NCCL +wrong: NCCL_HOME=/nowhere has no include/nccl\.h'
says "CUDNN_HOME without cuDNN" '^cuDNN +wrong: CUDNN_HOME=/nowhere has no include/cudnn\.h'
says "CUDNN_FRONTEND without cudnn-frontend" '^cudnn-frontend +wrong: CUDNN_FRONTEND=/nowhere '
says "all missing components in one line" 'cannot be built here yet; missing: NCCL, cuDNN, cudnn-frontend\.$'

driver 535.1 12.2 "Tesla V100" 7.0
toolkit_is 11.8
doctor 0
says "an old toolkit" '^CUDA compiler +too old: 11\.8 '
says "an old GPU" '^GPU +too old: 2 x Tesla V100, compute capability 7\.0; '

printf '#!/bin/sh\necho "Failed to initialize NVML: Driver/library version mismatch"\nexit 18\n' \
    >"$work/bin/nvidia-smi"
rm "$work/bin/mpicc"
doctor 3 CUDA_HOME="$work/none"
says "a missing nvcc" '^CUDA compiler +missing: no nvcc in '
says "a missing mpicc" '^MPI compiler +missing \(libopenmpi-dev\)$'
says "a driver that does not answer" '^driver +does not answer: Failed to initialize NVML'
says "that the CPU program cannot be built" '^The CPU program cannot be built here yet'

for kernels in Prescott SkylakeX; do
    stub "$work/none/train_gpt_cpu" "sdp4bit.c 0.1.0 (cpu; OpenBLAS 0.3.21 DYNAMIC_ARCH, kernels $kernels; Open MPI)"
    doctor 3
    case $kernels in
    Prescott) says "slow kernels of OpenBLAS" '^OpenBLAS kernels +slow: Prescott.*OPENBLAS_CORETYPE=Haswell$' ;;
    *) says "kernels of OpenBLAS" '^OpenBLAS kernels +ok SkylakeX$' ;;
    esac
done

rm "$work/bin/nvidia-smi"
doctor 3
says "a missing driver" '^driver +missing'
exit $failed
