#!/usr/bin/env bash
# --replica-group over the network: two groups of different layout, one of which is killed,
# restarted by run_until_done.sh, and frozen. The rendezvous restarts, and groups that do not belong
# to the run are refused. elastic_layouts.sh tests the layouts.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 11
data=$work/text_text_document
keys=$work/keys
launcher+=(--bind-to none) # each launcher would bind its first rank to the same core
port=$((20000 + $$ % 20000))
url=tcp://127.0.0.1:$port
grace=6 # also the limit for a last contribution, which takes a few steps of the other group
run=(--train-iters 40000 --local-steps 5 --log-interval 5 --save-interval 1000000 --max-replica-groups 2
    --sync-grace-seconds "$grace" --rendezvous "$url" --rendezvous-keys "$keys" --quantized-gradients
    --gradient-quantization-method eden --gq-group-size-inter 256)
two=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)
"$BUILD/rendezvous" keygen "$keys" one two three >/dev/null || exit 1

around=() # command that runs the launcher
# group NAME NP FLAGS...: starts a group in the background and sets $pid. Output goes to
# $work/NAME.out and .err.
group() {
    local name=$1 np=$2
    shift 2
    : >"$work/$name.out"
    timeout -k 5 "$LIMIT" ${around[@]+"${around[@]}"} "${launcher[@]}" -np "$np" "$trainer" "${model[@]}" \
        "${batch[@]}" --data-path "$data" "${run[@]}" --replica-group "$name" "$@" >"$work/$name.out" \
        2>"$work/$name.err" </dev/null &
    pid=$!
}
rendezvous() {
    "$BUILD/rendezvous" serve --listen "tcp://127.0.0.1:$port" --keys "$keys" >>"$work/rendezvous.out" 2>&1 &
    server=$!
}
# of NAME: the ranks of a group.
of() {
    rank_pids | while read -r id; do
        tr '\0' ' ' <"/proc/$id/cmdline" | grep -q -- "--replica-group $1 " && echo "$id"
    done
}
lines() { grep -c "^replica groups: .* [1-9][0-9]* with this" "$work/$1.out"; }
# more_syncs NAME COUNT: waits until the log of a group has COUNT more lines with syncs of its own.
more_syncs() {
    local at
    at=$(($(lines "$1") + $2))
    wait_until eval "[ \$(lines $1) -ge $at ]" || { why="group $1: $(tail -n 1 "$work/$1.err")"; return 1; }
}
iteration() { sed -n 's/^ iteration *\([0-9]*\)\/.*/\1/p' "$work/$1.out" | tail -n 1; }
last_loss() { sed -n 's/^ iteration .* lm loss: \([0-9.E+-]*\) .*/\1/p' "$work/$1.out" | tail -n 1; }
agree() { ! cat "$work"/*.out | grep -E 'hash(es)? .*differ' || { why="the groups differ"; return 1; }; }

starts() {
    rendezvous
    group one 1
    first=$pid
    more_syncs one 1 || return 1
    around=(scripts/run_until_done.sh --pause 0 --)
    group two 2 "${two[@]}" --save "$work/b" --load "$work/b" --save-interval 10
    around=()
    second=$pid
    more_syncs two 2 && more_syncs one 2 && agree && grep -q "^joined at iteration" "$work/two.out"
}
check "two groups of different layout sync" starts

# Ends all ranks of group two at once. The other group waits for them for at most a grace period.
killed() {
    local began
    # shellcheck disable=SC2046 # one word per rank
    kill -KILL $(of two)
    began=$SECONDS
    more_syncs one 2 && [ $((SECONDS - began)) -le $((2 * grace + 5)) ] || { why="too slow"; return 1; }
}
check "a group that is killed does not stop the other" killed

rejoins() {
    wait_until grep -q "loading checkpoint" "$work/two.out" && more_syncs two 2 && more_syncs one 1 &&
        agree && [ "$(grep -c '^joined at iteration' "$work/two.out")" -ge 2 ]
}
check "run_until_done.sh restarts it, and it rejoins" rejoins

frozen() {
    local ids
    mapfile -t ids < <(of two)
    kill -STOP "${ids[@]}"
    more_syncs one 2 || { kill -CONT "${ids[@]}"; return 1; }
    kill -CONT "${ids[@]}"
    more_syncs two 2 && more_syncs one 1 && agree
}
check "a frozen group comes back" frozen

# A group has samples for at most 8 H = 40 steps. Then it waits for the rendezvous for a grace
# period, and continues with samples of its own choice.
restarted() {
    local before
    before=$(iteration one)
    kill -KILL "$server"
    wait "$server" 2>/dev/null
    wait_until eval "[ \$(iteration one) -gt $((before + 100)) ]" || { why="group one stopped"; return 1; }
    wait_until eval "[ \$(iteration two) -gt $((before + 100)) ]" || { why="group two stopped"; return 1; }
    grep -q "rendezvous has dealt no training samples for" "$work/one.out" || { why="no message"; return 1; }
    rendezvous
    more_syncs one 2 && more_syncs two 2 && agree
}
check "training continues without the rendezvous, until it restarts" restarted

refused() { # CODE PATTERN GROUP FLAGS...
    local rc code=$1 pattern=$2
    shift 2
    group "$@"
    wait "$pid"
    rc=$?
    [ $rc -eq "$code" ] && grep -q "^error: .*$pattern" "$work/$1.err" ||
        { why="exit code $rc, $(cat "$work/$1.err")"; return 1; }
}
check "a group with another learning rate is refused" refused 2 "another run.*lr" three 1 --lr 1e-3
check "a group without keys is refused" refused 3 "four" four 1

# The groups that could serve a newcomer are frozen. Unless the rendezvous still has a copy of their
# state, it waits until a signal ends it.
stopped_while_joining() {
    local ids rc
    mapfile -t ids < <(of one && of two)
    kill -STOP "${ids[@]}"
    group three 1
    wait_until grep -q "group three joined" "$work/rendezvous.out" && sleep 1
    # shellcheck disable=SC2046 # one word per rank
    kill -TERM $(of three)
    wait "$pid"
    rc=$?
    kill -CONT "${ids[@]}"
    [ $rc -eq 75 ] || { why="exit code $rc, $(tail -n 1 "$work/three.err")"; return 1; }
    more_syncs one 1 && more_syncs two 1 && agree
}
check "a signal ends a group that waits to join" stopped_while_joining

# A signal makes a group save, contribute what it has trained since the last sync, and leave.
leaves() {
    kill -TERM "$(pgrep -P "$second" -f run_until_done | head -n 1)"
    wait "$second"
    grep -q "exiting program after receiving SIG" "$work/two.out" || { why="two did not save"; return 1; }
    grep -q "^contributed the training since the last sync" "$work/two.out" &&
        grep "^replica groups: " "$work/two.out" | tail -n 1 | grep -q "goodput 100.0 %" ||
        { why="$(grep -E "^replica groups: |left after" "$work/two.out" | tail -n 2)"; return 1; }
    more_syncs one 1 && agree
}
check "a group that leaves on a signal contributes before" leaves

# Group two continues with its samples once. After a crash they may have been used.
own_samples() {
    local flags=(--save "$work/b" --load "$work/b")
    group two 2 "${two[@]}" "${flags[@]}"
    more_syncs two 1 && grep -q "^continues with [0-9]* samples" "$work/two.out" || return 1
    # shellcheck disable=SC2046 # one word per rank
    kill -KILL $(of two)
    wait "$pid"
    group two 2 "${two[@]}" "${flags[@]}"
    more_syncs two 1 && grep -q "^skips [0-9]* samples" "$work/two.out" || return 1
    # shellcheck disable=SC2046
    kill -TERM $(of two)
    wait "$pid"
    agree
}
check "a group continues with its own samples only once" own_samples

unreachable() { # a signal ends a group that waits for the rendezvous
    local rc began=$SECONDS
    group three 1 --rendezvous tcp://127.0.0.1:1
    wait_until eval '[ -n "$(of three)" ]' && sleep 1
    # shellcheck disable=SC2046
    kill -TERM $(of three)
    wait "$pid"
    rc=$?
    [ $rc -eq 75 ] && [ $((SECONDS - began)) -lt 20 ] ||
        { why="exit code $rc, $(tail -n 1 "$work/three.err")"; return 1; }
}
check "a signal ends a group that cannot reach the rendezvous" unreachable

last_leaves() {
    local loss
    loss=$(last_loss one)
    awk -v loss="$loss" 'BEGIN { exit !(loss > 0 && loss < 3) }' || { why="loss $loss"; return 1; }
    kill -TERM "$(of one)"
    wait "$first"
    [ $? -eq 75 ] && agree
}
check "the last group leaves, and has learned" last_leaves
kill "$server"
finish
