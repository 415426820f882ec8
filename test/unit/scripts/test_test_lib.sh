#!/usr/bin/env bash
# scripts/test_lib.sh with synthetic rows: the rows of a level, concurrency, counting and printing
# of results. Prints "ok NAME" and "not ok NAME: why" lines.
# shellcheck disable=SC2015,SC2016,SC2317 # check calls the functions; a row's shell expands
set -u
cd "$(dirname "$0")/../../.." || exit 1
work=$(mktemp -d) || exit 1
export work
trap 'rm -rf "$work"' EXIT
# shellcheck source-path=SCRIPTDIR source=../../results.sh
. test/results.sh
printf '# seconds level name\n30 default dear\n5 ci  only for ci\n5 long *, for hours\n' >"$work/costs"
# plays LEVEL SLOTS ROWS: runs a script that evaluates ROWS, which adds rows, and runs them.
plays() {
    rm -rf "$work/logs" && mkdir "$work/logs"
    : >"$work/began"
    chosen=$1 slots=$2 costs=$work/costs logs=$work/logs limit=${limit:-100} bash -c '
        set -u
        . scripts/common.sh
        . scripts/test_lib.sh
        '"$3"'
        run_rows
        show_failures
        say "$passed passed, $failed failed, $skipped skipped"' >"$work/out" 2>&1 </dev/null
}
ends_with() { [ "$(tail -n 1 "$work/out")" = "$1" ] ||
    { why="$(tail -n 1 "$work/out") instead of $1"; return 1; }; }

levels() {
    local level
    for level in "default 2" "ci 3" "long 4"; do
        plays "${level% *}" 2 '
            for name in dear unlisted "only for ci" "all, for hours"; do add one "$name" true; done'
        ends_with "${level#* } passed, 0 failed, 0 skipped" || { why="${level% *}: $why"; return 1; }
    done
}
check "each level runs the right rows" levels
counted() {
    plays default 2 '
        add one lines bash -c "echo ok a; echo ok b; echo not ok c; echo skip d: why; exit 1"
        add one cmocka bash -c "
            printf \"%s\\n\" \"[==========] tests: Running 3 test(s).\" \"[       OK ] a\" \"[  SKIPPED ] b\"
            exit 1"
        add one fine true
        add one fails false
        add one "says ok and fails" bash -c "echo ok a; exit 3"
        add one "is skipped" bash -c "exit 77"
        add one "is not there" /nowhere/program'
    ends_with "5 passed, 5 failed, 3 skipped" || return 1
    local line='^\[  [1-7]/7\] FAILED fails  .* 0 passed   1 failed   0 skipped +[0-9]+\.[0-9] s, about [0-9]+ s left$'
    grep -qE "$line" "$work/out" || { why=$(grep ' fails ' "$work/out"); return 1; }
    grep -q '^ *skip d: why$' "$work/out" || { why="the reason of a skip is not shown"; return 1; }
    [ "$(cut -f 2 "$work/logs/times.txt" | sort | tr '\n' ,)" = \
        "cmocka,fails,fine,is not there,is skipped,lines,says ok and fails," ] ||
        why="times: $(cat "$work/logs/times.txt")"
    [ -z "$why" ]
}
check "results are counted and shown" counted
repeated() {
    plays default 1 '
        add one cases bash -c "echo not ok first; seq 100; echo not ok second; exit 1"
        add one program bash -c "echo cannot open it; exit 3"
        add one fine true'
    diff "$work/out.expected" <(tail -n 6 "$work/out") >"$work/diff" || { why=$(cat "$work/diff"); return 1; }
    plays default 1 'add one fine true'
    ! grep -q FAILED "$work/out"
}
printf '%s\n' 'FAILED cases, exit code 1' '    not ok first' '    not ok second' \
    'FAILED program, exit code 3' '    cannot open it' '1 passed, 3 failed, 0 skipped' >"$work/out.expected"
check "the last lines repeat all failures" repeated
too_long() {
    limit=3 plays default 2 'add one endless sleep 100; add one fine true'
    ends_with "1 passed, 1 failed, 0 skipped" && grep -q 'took longer than 3 s' "$work/out"
}
check "a row that exceeds the time limit fails" too_long
# Each row records its start and end. Rows that must not run concurrently must not overlap. The
# first three wait for each other.
cat >"$work/row" <<'ROW'
echo "begin $1" >>"$work/began"
for ((i = 0; i < 600 && $(grep -c begin "$work/began") < 3; i++)); do sleep 0.1; done
sleep 0.2
echo "end $1" >>"$work/began"
ROW
together() {
    plays default 3 '
        row() { add "$1" "$2" bash "$work/row" "$2"; }
        row ranks r1; row ranks r2; row one o1; row one o2; row alone a1; row one o3; row ranks r3'
    ends_with "7 passed, 0 failed, 0 skipped" || return 1
    python3 - "$work/began" <<'E' || { why=$(tr '\n' ' ' <"$work/began"); return 1; }
import sys
running, most, beside = [], 0, set()
for line in open(sys.argv[1]):
    what, name = line.split()
    if what == "end":
        running.remove(name)
        continue
    assert not any(r[0] == "a" for r in running) and not (name[0] == "a" and running), name
    assert not (name[0] == "r" and any(r[0] == "r" for r in running)), name
    running.append(name)
    most = max(most, len(running))
assert most == 3, most
E
}
check "at most one MPI row at a time, others concurrently, exclusive rows alone" together
# A row interrupts the test run just after another row has started. Repeated several times.
interrupted() {
    local rc pid try
    for try in 1 2 3 4 5 6 7 8; do
        rm -rf "$work/logs" "$work/pids" && mkdir "$work/logs"
        chosen=default slots=2 costs=$work/costs logs=$work/logs limit=1000 setsid --wait \
            env --default-signal=INT bash -c '
            set -u
            . scripts/common.sh
            . scripts/test_lib.sh
            add one a bash -c "echo \$\$ >>$work/pids; exec sleep 1000"
            add one b bash -c "echo \$\$ >>$work/pids
                until [ \$(wc -l <$work/pids) = 2 ]; do :; done; kill -INT $$; exec sleep 1000"
            run_rows' >"$work/out" 2>&1 </dev/null
        rc=$?
        [ $rc = 130 ] || { why="exit code $rc"; return 1; }
        while read -r pid; do
            # A zombie has ended.
            grep -q '^State:.[^Z]' "/proc/$pid/status" 2>/dev/null || continue
            why="try $try: a row still runs"
            return 1
        done <"$work/pids"
    done
}
check "Ctrl-C ends the rows too" interrupted
left() { # the cost table, scaled by the ratio of actual to expected time so far
    plays default 1 'add one dear sleep 0.1; add one b true
        expected_done=100000 taken_done=1000000'
    [ "$(grep -c ', about [0-9]* s left$' "$work/out")" -ge 1 ] || { why=$(cat "$work/out"); return 1; }
    plays default 1 'add one b true; add one dear true; expected_done=100000 taken_done=1000000'
    grep -q ' b .*, about 5 min left$' "$work/out" || { why=$(cat "$work/out"); return 1; }
}
check "the remaining time is estimated" left
finish
