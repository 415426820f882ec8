#!/usr/bin/env bash
# FP8 codes and products of CPU ranks against PyTorch. Skipped if $PYTHON (default python3) has no
# PyTorch. test/gpu.sh tests larger products.
set -u
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-python3} program=${BUILD:-build}/test/fp8_dump
if ! "$python" -c 'import torch, numpy' 2>/dev/null; then
    echo "skip FP8 products: no PyTorch for $python"
    exit 77
fi
[ -x "$program" ] || { echo "not ok $program is not built"; exit 1; }
CUDA_VISIBLE_DEVICES='' exec "$python" dev/ref/fp8_products.py "$program"
