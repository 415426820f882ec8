#!/usr/bin/env bash
# Trains the paper's 2.7B model: PRESET=sdp4bit DATA_PATH=... scripts/train_2.7b.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 2.7b "$@"
