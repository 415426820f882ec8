# shellcheck shell=bash
# Lists the repository's files for tests that check their text. Sourced in the root directory.

# Lists tracked files and files that git would add. In a release archive without git history, lists
# all files outside build and output directories.
list_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard
    else
        find . -type f -not -path './.git/*' -not -path './build*' -not -path './runs/*' \
            -not -path './data/*' | sed 's,^\./,,'
    fi | while IFS= read -r path; do [ ! -f "$path" ] || echo "$path"; done
}

# begins_with REGEX FILES...: lists the files whose first line matches.
begins_with() {
    LC_ALL=C awk -v pattern="$1" 'FNR == 1 && $0 ~ pattern { print FILENAME } { nextfile }' "${@:2}"
}

# Lists the shell scripts among the files.
shell_scripts() { begins_with '^#!.*(bash|/sh)( |$)|^# shellcheck shell=' "$@"; }
