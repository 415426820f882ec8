#!/usr/bin/env bash
# Trains the paper's 1.3B model: PRESET=sdp4bit DATA_PATH=... scripts/train_1.3b.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 1.3b "$@"
