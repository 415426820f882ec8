#!/usr/bin/env bash
# Trains the paper's 13B model: PRESET=sdp4bit SPEED=1 scripts/train_13b.sh [flags]
# Uses tensor parallel size 8, or 4 and two pipeline stages on hosts with four GPUs. --help explains
# the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 13b "$@"
