#!/usr/bin/env bash
# Measures the bandwidth of the fused kernels (quantize, sum and requantize, final sum, AdamW with
# difference, apply) relative to a device copy, for 8 MB to 2 GB of fp32 input. Prints a table and
# writes JSON. Builds dev/bench/codec.cu first. Needs a GPU and the requirements of `make gpu`.
#
#   dev/bench/codec.sh [--min-mb 8] [--max-mb 2048] [--runs 15] [--only TEXT] [--out FILE.json]
#
# BUILD names the folder of the program, ARCH the architecture to build for (default native).
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/codec.sh "$@"
set -euo pipefail
build=$BUILD out=()
nvidia-smi >/dev/null 2>&1 ||
    die 3 "no GPU found (nvidia-smi failed)"
case " $* " in *" --out "*) ;; *) out=(--out dev/bench/results/codec.json) ;; esac
# Uses the Makefile's rule for GPU test programs.
make -j "$(nproc)" BUILD="$build" ARCH="${ARCH:-native}" "$build/test/gpu/../../dev/bench/codec" >&2
mkdir -p dev/bench/results
COMMAND_LINE="dev/bench/codec.sh $*"
export COMMAND_LINE
"$build/dev/bench/codec" "$@" "${out[@]}"
