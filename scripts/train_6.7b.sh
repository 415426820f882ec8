#!/usr/bin/env bash
# Trains the paper's 6.7B model: PRESET=sdp4bit DATA_PATH=... scripts/train_6.7b.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 6.7b "$@"
