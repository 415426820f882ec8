#!/usr/bin/env bash
# Trains the paper's 18B model: PRESET=sdp4bit SPEED=1 scripts/train_18b.sh [flags]
# Uses tensor parallel size 8, or 4 and two pipeline stages on hosts with four GPUs. --help explains
# the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 18b "$@"
