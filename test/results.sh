# shellcheck shell=bash
# Prints the result lines that scripts/test.sh counts: "ok NAME", "not ok NAME: why" and "skip NAME:
# reason". A script ends with `finish`, whose status is 1 if anything failed.
failed=0
why=
ok() { echo "ok $1"; }
not_ok() {
    echo "not ok $1: ${2:-failed}"
    failed=$((failed + 1))
}
skip() { echo "skip $1: $2"; }
# check NAME COMMAND...: prints one result line; a command that fails sets $why.
check() {
    local name=$1
    shift
    why=
    if "$@"; then ok "$name"; else not_ok "$name" "${why:-$* failed}"; fi
}
finish() { exit $((failed > 0)); }
