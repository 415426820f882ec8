#!/usr/bin/env bash
# Compiles the GPU program and its tests, also on machines without a GPU: every CUDA source, and the
# C files of tests. Each file is one test. Called by scripts/test.sh.
#
#   test/gpu_compile.sh BUILD-FOLDER [OPTIMIZED]
#
# With OPTIMIZED it compiles for every architecture. Without it, it compiles for the oldest one and
# without optimization, which finds the same errors in a tenth of the time: no source depends on the
# architecture (unit/repository_rules.sh), and code for an older one compiles for newer ones. If a
# library is missing, skips with the Makefile's message: all files without NCCL or cuDNN, one file
# without cudnn-frontend.
# shellcheck source-path=SCRIPTDIR source=../scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
set -u
build=$1 cuda=$1/cuda fast=
if [ -z "${2:-}" ]; then cuda=$1/cuda-fast fast=1; fi
failures=0
not_ok() {
    say "not ok $1"
    failures=$((failures + 1))
}

if ! have_command nvcc && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    say "skip compile CUDA sources: no nvcc on this machine"
    exit $((failures > 0))
fi
output=$(make -k -j 1 gpu-check WERROR=1 BUILD="$build" FAST=$fast 2>&1)
say "$output"
if reason=$(grep -m 1 -oE '\*\*\* (CUDA|MPI|NCCL|cuDNN): .*' <<<"$output"); then
    say "skip compile CUDA sources: ${reason#\*\*\* }"
    exit $((failures > 0))
fi
for source in llmc/cuda/*.cu llmc/cuda/*.cpp sdp4bit/*.cu test/gpu/*.cu dev/bench/*.cu train_gpt.c \
    test/gpu/{ops_dump,ops_invariants,kernels_dump,layer_dump,fp8_dump}.c; do
    object=${source%.*}.o
    if [[ $source == *.c ]]; then objects=$build/obj; else objects=$cuda; fi
    if grep -qE "\*\*\* \[[^]]*/$object\]" <<<"$output"; then
        not_ok "compile $source"
    elif [ "${source%.cpp}" != "$source" ] &&
        reason=$(grep -m 1 '^cudnn-frontend could not be fetched' <<<"$output"); then
        say "skip compile $source: $reason"
    elif [ -e "$objects/$object" ]; then
        say "ok compile $source"
    else
        not_ok "compile $source: no object"
    fi
done
exit $((failures > 0))
