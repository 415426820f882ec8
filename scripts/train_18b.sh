#!/usr/bin/env bash
# Trains the paper's 18B model: PRESET=sdp4bit SPEED=1 scripts/train_18b.sh [flags]
# It runs at tensor parallel size 8, on hosts of four GPUs at 4 and in two stages. --help explains
# the variables.
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 18b "$@"
