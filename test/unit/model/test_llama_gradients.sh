#!/usr/bin/env bash
# Losses and gradients of a small Llama against Hugging Face's LlamaForCausalLM, and with QK norms
# against Qwen3ForCausalLM. Skipped if $PYTHON (default python3) has no PyTorch or transformers.
# test/gpu.sh tests larger sizes.
set -u
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-python3} program=${BUILD:-build}/test/layer_dump
if ! "$python" -c 'import torch, numpy, transformers' 2>/dev/null; then
    echo "skip gradients of a Llama: no PyTorch or transformers for $python"
    exit 77
fi
[ -x "$program" ] || { echo "not ok $program is not built"; exit 1; }
for blocks in "" "--qk-layernorm --kv-channels 32" "--fp8-format hybrid" "--fp8-format e4m3"; do
    # shellcheck disable=SC2086 # may be empty
    "$python" dev/ref/llama_gradients.py "$program" --seq-length 96 --hidden-size 128 \
        --ffn-hidden-size 352 --vocab-size 512 $blocks || exit 1
done
