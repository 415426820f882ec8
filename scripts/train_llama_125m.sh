#!/usr/bin/env bash
# Trains a Llama of 125M: PRESET=sdp4bit DATA_PATH=... scripts/train_llama_125m.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama_125m "$@"
