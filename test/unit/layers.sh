#!/usr/bin/env bash
# The directories of llmc/ and sdp4bit/ are layers. A file includes headers and calls functions only
# of its own layer and of lower ones. layers.py has the order. Prints "ok NAME" and "not ok NAME"
# lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
failures=0

check() { # NAME ARGUMENTS of layers.py
    local found
    if found=$(test/unit/layers.py "${@:2}" 2>&1); then
        echo "ok $1"
    else
        echo "not ok $1"
        while IFS= read -r line; do echo "#   $line"; done <<<"$found"
        failures=$((failures + 1))
    fi
}
check "files include their own and lower layers only" includes
check "no file includes itself through others" cycles
check "files call their own and lower layers only" calls "${BUILD:-build}"

stray=$(find llmc -maxdepth 1 -type f | grep -vE '^llmc/(device|ops|ops_fp8|comm)\.h$')
if [ -z "$stray" ]; then echo "ok llmc/ itself holds only the hardware headers"; else
    echo "not ok llmc/ itself holds only the hardware headers: $stray"
    failures=$((failures + 1))
fi
[ $failures = 0 ]
