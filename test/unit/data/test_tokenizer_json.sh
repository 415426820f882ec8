#!/usr/bin/env bash
# Compares preprocess_data with Hugging Face's `tokenizers` on random Unicode text. Skipped if
# PYTHON lacks the package. BUILD is the directory of the program.
set -u
cd "$(dirname "$0")/../../.." || exit 1
name="ids of tokenizers on random text"
if ! "${PYTHON:-python3}" -c 'import tokenizers' 2>/dev/null; then
    echo "skip $name: ${PYTHON:-python3} has no tokenizers package"
elif said=$(PYTHONDONTWRITEBYTECODE=1 "${PYTHON:-python3}" dev/ref/make_tokenizer_json_golden.py \
    --compare "${BUILD:-build}/preprocess_data" --megabytes 0.3 2>&1); then
    echo "ok $name: $said"
else
    echo "not ok $name"
    tail -n 5 <<<"$said" | sed 's/^/# /'
    exit 1
fi
