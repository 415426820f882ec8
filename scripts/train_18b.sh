#!/usr/bin/env bash
# The paper's 18B model: says what it still needs, and trains it on GPUs that hold it whole when
# asked to (--tensor-model-parallel-size 1).
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" 18b "$@"
