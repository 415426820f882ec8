#!/usr/bin/env bash
# Runs language.py, which checks the wording of code, comments, scripts, documents, file names and
# commit subjects. Prints "ok NAME" and "not ok NAME" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
failures=0

check() { # NAME MODE
    local found
    if found=$(test/unit/language.py "$2" 2>&1); then
        echo "ok $1"
    else
        echo "not ok $1"
        while IFS= read -r line; do echo "#   $line"; done <<<"$found"
        failures=$((failures + 1))
    fi
}
check "the rules find their words and nothing else" self-test
check "text uses American spelling and standard terms" text
check "file names use standard terms" names
check "commit subjects name the area and have at most 72 characters" commits
[ $failures = 0 ]
