#!/usr/bin/env bash
# Compiles what the GPU program and its tests consist of, without a GPU: train_gpt.cu as C++, with
# nvcc every CUDA source for every architecture, and the C files of tests. Each counts. Called by
# scripts/test.sh.
#
#   test/gpu_compile.sh BUILD-FOLDER [OPTIMIZED]
#
# Without a second word nothing is optimized, which finds the same errors in a third of the time.
# What cannot be compiled for want of a library is skipped with the Makefile's words: all of it when
# NCCL or cuDNN is missing, one file without cudnn-frontend.
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

read -ra mpi_flags < <(mpicc --showme:compile 2>/dev/null ||
    mpicc -show 2>/dev/null | grep -oE -- '-I[^ ]+' | paste -s -d ' ')
if g++ -std=c++17 -D_GNU_SOURCE -DOMPI_SKIP_MPICXX ${mpi_flags[@]+"${mpi_flags[@]}"} -I. -Wall -Wextra \
    -Wno-unused-parameter -Wno-missing-field-initializers -Werror -fsyntax-only -x c++ train_gpt.cu; then
    say "ok the trainer is C++ too"
else
    not_ok "the trainer is C++ too"
fi

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
for source in llmc/cuda/*.cu llmc/cuda/*.cpp sdp4bit/*.cu test/gpu/*.cu dev/bench/*.cu train_gpt.cu \
    test/gpu/{ops_dump,ops_invariants,kernels_dump,layer_dump}.c; do
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
