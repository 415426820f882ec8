#!/usr/bin/env bash
# Trains the paper's 125M model: PRESET=sdp4bit DATA_PATH=... scripts/train_125m.sh [flags]
# --help explains the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 125m "$@"
