#!/usr/bin/env bash
# Checks all scripts with shellcheck. Prints "ok NAME", "not ok NAME" or "skip NAME: reason".
set -u
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source-path=SCRIPTDIR source=../file_list.sh
. test/file_list.sh

if ! command -v shellcheck >/dev/null; then
    echo "skip shellcheck: not installed"
    exit 0
fi
mapfile -t files < <(list_files)
mapfile -t scripts < <(shell_scripts "${files[@]}")
# Excluded: warnings about variables and arguments of sourced files, and about commas in the value
# of a flag.
if [ ${#scripts[@]} -gt 20 ] && found=$(shellcheck --exclude=SC2034,SC2054,SC2120,SC2154 --external-sources \
    --severity=warning --source-path=SCRIPTDIR --format=gcc "${scripts[@]}" 2>&1); then
    echo "ok shellcheck finds nothing"
else
    echo "not ok shellcheck finds nothing"
    while IFS= read -r line; do echo "#   $line"; done <<<"${found-only ${#scripts[@]} scripts}"
    exit 1
fi
