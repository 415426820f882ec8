#!/usr/bin/env bash
# Trains a Llama of 3B: PRESET=sdp4bit DATA_PATH=... scripts/train_llama_3b.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama_3b "$@"
