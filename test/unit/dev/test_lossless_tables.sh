#!/usr/bin/env bash
# sdp4bit/lossless_tables.h must equal the output of the script that generates it.
set -u
cd "$(dirname "$0")/../../.." || exit 1
if differs=$(diff <(python3 dev/ref/make_lossless_tables.py 2>&1) sdp4bit/lossless_tables.h); then
    echo "ok sdp4bit/lossless_tables.h is what dev/ref/make_lossless_tables.py writes"
else
    echo "not ok sdp4bit/lossless_tables.h is what dev/ref/make_lossless_tables.py writes"
    while IFS= read -r line; do echo "#   $line"; done <<<"$differs"
    exit 1
fi
