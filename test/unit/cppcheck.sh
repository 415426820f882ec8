#!/usr/bin/env bash
# Checks the C sources of the programs with cppcheck. Every warning is an error. False positives are
# suppressed in the source with a reason: "// cppcheck-suppress ID ; reason". Prints "ok NAME", "not
# ok NAME" or "skip NAME: reason".
set -u
cd "$(dirname "$0")/../.." || exit 1

version=$(cppcheck --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
if [ -z "$version" ]; then
    echo "skip cppcheck: not installed"
    exit 0
fi
if [ "$(printf '%s\n' 2.10 "$version" | sort -V | head -n 1)" != 2.10 ]; then
    echo "skip cppcheck: version $version is older than 2.10"
    exit 0
fi
mapfile -t sources < <(find llmc sdp4bit dev main.c train_gpt.c -name '*.c' | sort)
if found=$(cppcheck -q -j2 -I. --std=c11 --language=c --enable=warning,portability --inline-suppr \
    --template=gcc --error-exitcode=1 "${sources[@]}" 2>&1); then
    echo "ok cppcheck finds nothing"
else
    echo "not ok cppcheck finds nothing"
    while IFS= read -r line; do echo "#   $line"; done <<<"$found"
    exit 1
fi
