#!/usr/bin/env bash
# Trains a Llama of 1.1B: PRESET=sdp4bit DATA_PATH=... scripts/train_llama_1.1b.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" llama_1.1b "$@"
