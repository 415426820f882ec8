# shellcheck shell=bash
# Runs the list of tests in scripts/test.sh: selects rows by level, runs several at once, counts
# their cases and estimates the remaining time. Sourced by scripts/test.sh.
#
# A row of the list is a name, a command, and where it runs:
#   one     on one core, concurrently with others
#   ranks   on several ranks, which use all cores; only one such row at a time
#   alone   without any other row
# scripts/test_costs.txt has the duration of each row, and the level from which it runs. The script
# that sources this file sets $chosen (level: default, ci or long), $slots (rows that run at once),
# $limit (seconds per row) and $logs (a folder).

row_name=() row_where=() row_command=() row_seconds=() row_state=() row_log=() row_began=()
passed=0 failed=0 skipped=0 done_rows=0 expected_done=0 taken_done=0 failures=()

# --- the list ---------------------------------------------------------------------------

cost_pattern=() cost_seconds=() cost_level=()
while read -r seconds level pattern; do
    case $seconds in '' | '#'*) continue ;; esac
    cost_seconds+=("$seconds") cost_level+=("$level") cost_pattern+=("$pattern")
done <"${costs:-scripts/test_costs.txt}"

# find_cost NAME: sets $seconds (on two idle cores) and $level from the first matching line.
find_cost() {
    local i
    seconds=2 level=default
    for i in "${!cost_pattern[@]}"; do
        # shellcheck disable=SC2053 # the right side is a pattern
        if [[ $1 == ${cost_pattern[i]} ]]; then
            seconds=${cost_seconds[i]} level=${cost_level[i]}
            return
        fi
    done
}

# in_level NAME: succeeds if the chosen level ($chosen) includes the row.
in_level() {
    local seconds level
    find_cost "$1"
    case $chosen-$level in long-* | *-default | ci-ci) return 0 ;; *) return 1 ;; esac
}

# add WHERE NAME COMMAND...: adds a row if the level includes it.
add() {
    local where=$1 name=$2 seconds level
    shift 2
    in_level "$name" || return 0
    find_cost "$name"
    row_where+=("$where") row_name+=("$name") row_seconds+=("$seconds") row_state+=(waits)
    row_log+=("$logs/${name//[ \/]/-}.log")
    row_command+=("$(printf '%q ' "$@")")
}

# --- counting ---------------------------------------------------------------------------

count_lines() { grep -acE -- "$1" "$2" || true; } # pattern, file

# count LOG: sets $ok, $bad and $skip. For cmocka, tests that started but neither passed nor were
# skipped count as failed. Other programs print "ok", "not ok" and "skip" lines.
count() {
    local total
    total=$(grep -aoE '\] (tests: |[^:]*: )?Running [0-9]+ test' "$1" | grep -oE '[0-9]+ test' |
        awk '{ n += $1 } END { print n + 0 }')
    if [ "$total" -gt 0 ]; then
        ok=$(count_lines '\[       OK \]' "$1")
        skip=$(grep -aoE '\[  SKIPPED \] [A-Za-z_][A-Za-z0-9_]*$' "$1" | sort -u | wc -l)
        bad=$((total - ok - skip))
        [ "$bad" -ge 0 ] || bad=0
    else
        ok=$(count_lines '^ok ' "$1")
        bad=$(count_lines '^not ok ' "$1")
        skip=$(count_lines '^skip ' "$1")
    fi
}

# evaluate LOG CODE: like count, but includes the exit code. The exit code is the only result if the
# log has none (77: skipped). A nonzero code adds a failure if the log shows none.
evaluate() {
    count "$1"
    if [ $((ok + bad + skip)) = 0 ]; then
        case $2 in 0) ok=1 ;; 77) skip=1 ;; *) bad=1 ;; esac
    elif [ "$2" != 0 ] && [ "$2" != 77 ] && [ "$bad" = 0 ]; then
        bad=1
    fi
}

# --- progress ---------------------------------------------------------------------------

now() { say $((${EPOCHREALTIME//[.,]/} / 1000)); } # in ms

# Sets $left, the estimated remaining time in ms: the cost table times the ratio of actual to
# expected time so far. One-core rows share the cores; multi-rank rows run one at a time.
time_left() {
    local i rest ones=0 ranks=0 alone=0 longest
    for i in "${!row_name[@]}"; do
        case ${row_state[i]} in
        waits) rest=$((1000 * row_seconds[i])) ;;
        runs) rest=$((1000 * row_seconds[i] - ($(now) - row_began[i]))) ;;
        *) continue ;;
        esac
        [ $rest -gt 0 ] || rest=0
        case ${row_where[i]} in
        one) ones=$((ones + rest)) ;;
        ranks) ranks=$((ranks + rest)) ;;
        alone) alone=$((alone + rest)) ;;
        esac
    done
    longest=$(((ones + ranks) / slots))
    [ $longest -ge $ranks ] || longest=$ranks
    left=$((alone + longest))
    [ $expected_done -lt 20000 ] || left=$((left * (taken_done + 1) / expected_done))
}

# show RESULT NAME MS COUNTS: prints a progress line.
show() {
    local left text
    time_left
    text="about $(((left + 500) / 1000)) s left"
    [ $left -lt 90000 ] || text="about $(((left + 30000) / 60000)) min left"
    printf '[%3d/%d] %-6s %-42s %s %6d.%d s, %s\n' "$done_rows" ${#row_name[@]} "$1" "$2" "$4" \
        $(($3 / 1000)) $(($3 / 100 % 10)) "$text"
}

# --- running ----------------------------------------------------------------------------

declare -A row_of=() # process id -> row
exec 9<> <(:)     # finished rows: lines "row code"

# Ends all running rows. Signals them repeatedly, because a signal may be lost while a row starts
# its timeout process or while timeout starts the command.
stop_rows() {
    local pids
    while pids=$(jobs -pr) && [ -n "$pids" ]; do
        # shellcheck disable=SC2086 # $pids is a list
        kill -TERM $pids 2>/dev/null
        sleep 0.1
    done
}
trap 'stop_rows; exit 130' INT
trap 'stop_rows; exit 143' TERM HUP

# Background commands of a script ignore SIGINT by default.
start_row() { # row
    local i=$1
    row_state[i]=runs row_began[i]=$(now)
    (
        pid=
        trap '[ -z "$pid" ] || kill -TERM -- "-$pid" 2>/dev/null' TERM
        eval "env --default-signal=INT,QUIT timeout --kill-after=10 $limit ${row_command[i]} 9>&- &"
        pid=$!
        until wait "$pid"; code=$?; ! kill -0 "$pid" 2>/dev/null; do :; done # SIGTERM ends wait
        say "$i $code" >&9
    ) >"${row_log[i]}" 2>&1 </dev/null &
    row_of[$!]=$i
}

# end_row ROW CODE: counts its tests, prints one line, and prints its output if it failed.
end_row() {
    local i=$1 code=$2 ok bad skip result=ok took
    took=$(($(now) - row_began[i]))
    row_state[i]=ended
    done_rows=$((done_rows + 1)) taken_done=$((taken_done + took))
    expected_done=$((expected_done + 1000 * row_seconds[i]))
    [ "$code" != 124 ] || say "took longer than $limit s" >>"${row_log[i]}"
    evaluate "${row_log[i]}" "$code"
    [ "$bad" = 0 ] || result=FAILED
    [ $((ok + bad)) != 0 ] || result=skip
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
    show "$result" "${row_name[i]}" $took \
        "$(printf '%4d passed %3d failed %3d skipped' "$ok" "$bad" "$skip")"
    printf '%d\t%s\n' $((took / 1000)) "${row_name[i]}" >>"$logs/times.txt"
    grep -aE '^skip(ped:)? ' "${row_log[i]}" | uniq | sed 's/^/              /' | head -n 20
    if [ "$bad" != 0 ]; then
        failures+=("${row_name[i]}, exit code $code"$'\n'"$(first_failures "${row_log[i]}")")
        say "---- exit code $code; the end of ${row_log[i]}:"
        tail -n 80 "${row_log[i]}"
        say "----"
    fi
}

# first_failures LOG: prints the first failed cases, or the last line if the log names none.
first_failures() {
    local cases
    cases=$(grep -aE '^not ok |^\[  FAILED  \] |^SUMMARY: ' "$1" | head -n 5)
    [ -n "$cases" ] || cases=$(tail -n 1 "$1")
    [ -z "$cases" ] || sed 's/^/    /' <<<"$cases"
}

# show_failures: repeats the failures of all rows. Some services keep only the end of a long output.
show_failures() {
    [ ${#failures[@]} = 0 ] || printf 'FAILED %s\n' "${failures[@]}"
}

# fits WHERE: succeeds if such a row can start next to those running.
fits() {
    local i
    for i in "${row_of[@]}"; do
        case $1-${row_where[i]} in alone-* | *-alone | ranks-ranks) return 1 ;; esac
    done
    [ ${#row_of[@]} -lt "$slots" ]
}

# Starts all rows that can run now. Later rows may overtake one that cannot, except a row that must
# run alone, which would otherwise starve.
start_rows() {
    local i
    for i in "${!row_name[@]}"; do
        [ "${row_state[i]}" = waits ] || continue
        if fits "${row_where[i]}"; then
            start_row "$i"
        elif [ "${row_where[i]}" = alone ]; then
            return
        fi
    done
}

run_rows() {
    local i pid code
    : >"$logs/times.txt"
    while :; do
        start_rows
        [ ${#row_of[@]} -gt 0 ] || return 0
        read -r i code <&9
        for pid in "${!row_of[@]}"; do
            if [ "${row_of[$pid]}" = "$i" ]; then unset "row_of[$pid]"; fi
        done
        end_row "$i" "$code"
    done
}
