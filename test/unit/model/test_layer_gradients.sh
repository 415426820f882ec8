#!/usr/bin/env bash
# Gradients of one layer of the 125M model against PyTorch, in bf16 and in FP8. Skipped if $PYTHON
# (default python3) has no PyTorch. The short sequence and small vocabulary are fast on CPUs;
# test/gpu.sh tests the full sizes.
set -u
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-python3} program=${BUILD:-build}/test/layer_dump
if ! "$python" -c 'import torch, numpy' 2>/dev/null; then
    echo "skip gradients of a real layer: no PyTorch for $python"
    exit 77
fi
[ -x "$program" ] || { echo "not ok $program is not built"; exit 1; }
for format in "" "--fp8-format hybrid" "--fp8-format e4m3"; do
    # shellcheck disable=SC2086 # may be empty
    "$python" dev/ref/layer_gradients.py "$program" --seq-length 256 --rows 1 --vocab-size 4096 \
        $format || exit 1
done
