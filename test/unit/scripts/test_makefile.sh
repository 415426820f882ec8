#!/usr/bin/env bash
# Options that the Makefile passes to compilers. Runs make -n with an nvcc stub that only prints its
# version. Prints "ok NAME" and "not ok NAME" lines.
set -u
cd "$(dirname "$0")/../../.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck source-path=SCRIPTDIR source=../../results.sh
. test/results.sh

# A stub of a CUDA toolkit. The headers of NCCL and cuDNN are where apt installs them.
mkdir -p "$work/cuda/bin" "$work/frontend"
printf '#!/bin/sh\necho "Cuda compilation tools, release 12.6, V12.6.1"\n' >"$work/cuda/bin/nvcc"
chmod +x "$work/cuda/bin/nvcc"
: >"$work/frontend/cudnn_frontend.h"
commands() { # variables...
    make -n gpu-check BUILD="$work/build" CUDA_HOME="$work/cuda" NVCC="$work/cuda/bin/nvcc" \
        CUDNN_FRONTEND="$work/frontend" NCCL_INCLUDE=/usr/include "$@" 2>&1
}

no_system_folders() {
    local text
    text=$(commands CUDNN_INCLUDE=/usr/include) || return 1
    text+=$(commands CUDNN_INCLUDE="/usr/include/$(mpicc -dumpmachine)") || return 1
    grep -q -- '-c llmc/cuda/device.cu' <<<"$text" &&
        ! grep -qE -- '-(isystem|I) ?/usr/(local/)?include( |$)' <<<"$text" &&
        ! grep -qE -- "-isystem /usr/include" <<<"$text"
}
named_folders_are_passed() {
    commands CUDNN_INCLUDE=/opt/cudnn/include | grep -q -- '-isystem /opt/cudnn/include'
}
portable_by_default() {
    local text
    text=$(make -n -B BUILD="$work/build" cpu 2>&1)
    grep -q -- '-c llmc/base/base.c' <<<"$text" && ! grep -q -- '-march=native' <<<"$text"
}
check "no system folder is passed with -isystem" no_system_folders
check "other folders are passed with -isystem" named_folders_are_passed
check "host code runs on any CPU by default" portable_by_default
finish
