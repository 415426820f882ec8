#!/usr/bin/env bash
# Replica groups on this machine that find each other at build/rendezvous: three groups train while
# one is killed, one is frozen and the rendezvous restarts. Unknown keys, other runs and malformed
# frames are refused. The groups are test/e2e/group_member.c, which has no trainer.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
server=$BUILD/rendezvous member=$BUILD/test/e2e/group_member
[ -x "$member" ] || { not_ok "$member" "not built; run make BUILD=$BUILD test-programs"; finish; }
keys=$work/keys port=$((20000 + RANDOM % 10000)) pids=()
address=tcp://127.0.0.1:$port
stop_all() { local pid; for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null; done; cleanup; }
trap stop_all EXIT

serve() {
    "$server" serve --listen "$address" --keys "$keys" >>"$work/server" 2>&1 &
    server_pid=$!
    pids+=("$server_pid")
}
declare -A pid_of
join() { # LOG NAME FLAGS...: starts a group
    local log=$1 name=$2
    shift 2
    "$member" --name "$name" --rendezvous "$address" --keys "$keys" --grace 1 --step 0.1 "$@" \
        >"$work/$log" 2>&1 &
    pid_of[$log]=$!
    pids+=("$!")
}
wait_for() { # SECONDS PATTERN FILE: waits for a line
    local end=$((SECONDS + $1))
    until grep -q -e "$2" "$work/$3" 2>/dev/null; do
        [ $SECONDS -lt $end ] || { why="no '$2' in $3: $(tail -n 1 "$work/$3")"; return 1; }
        sleep 0.1
    done
}
last_round() { sed -n 's/^round 0 \([0-9]*\) .*/\1/p' "$work/$1" | tail -n 1; }
progress() { # LOG SECONDS: waits for two more rounds
    local from end=$((SECONDS + $2))
    from=$(last_round "$1")
    until [ "$(last_round "$1")" -ge $((${from:-0} + 2)) ] 2>/dev/null; do
        [ $SECONDS -lt $end ] || { why="$1 stays at round ${from:-0}"; return 1; }
        sleep 0.1
    done
}

made_keys() {
    "$server" keygen "$keys" a b c d evil >/dev/null || { why="exit code $?"; return 1; }
    [ "$(stat -c %a "$keys"/*.secret | sort -u)" = 600 ] || { why="others can read secret keys"; return 1; }
    ! "$server" keygen "$keys" a 2>"$work/err" || { why="an existing key was replaced"; return 1; }
    grep -q 'a.secret exists' "$work/err" || { why=$(cat "$work/err"); return 1; }
    mkdir "$work/half"
    cp "$keys/a.public" "$work/half/"
    ! "$server" keygen "$work/half" a 2>"$work/err" || { why="a public key was replaced"; return 1; }
    grep -q 'a.public exists' "$work/err" || { why=$(cat "$work/err"); return 1; }
    ln -s nowhere "$work/half/b.public"
    ! "$server" keygen "$work/half" b 2>"$work/err" || { why="a public key was written to a link"; return 1; }
    [ ! -e "$work/half/a.secret" ] && [ ! -e "$work/half/b.secret" ] ||
        { why="a secret key without its public key"; return 1; }
}
usage() {
    local code
    "$server" --help | grep -q keygen || { why="no help"; return 1; }
    for words in "" "dance" "serve --keys" "serve" "status" "keygen"; do
        # shellcheck disable=SC2086 # split on purpose
        "$server" $words >/dev/null 2>"$work/err"
        code=$?
        [ $code = 2 ] && [ "$(wc -l <"$work/err")" = 1 ] || { why="'$words': exit code $code"; return 1; }
    done
    for words in 256.1.1.1:1 127.0.0.1:0 127.0.0.1:70000; do # the last one would be port 4464
        timeout 5 "$server" serve --listen "tcp://$words" --keys "$keys" >/dev/null 2>"$work/err"
        code=$?
        [ $code -ge 2 ] && [ $code -le 3 ] && [ "$(wc -l <"$work/err")" = 1 ] ||
            { why="listens at $words: exit code $code"; return 1; }
    done
}
check "keygen makes secret files of mode 600 and replaces none" made_keys
check "wrong commands and flags are refused in one line" usage
serve
for name in a b c; do join $name $name --rounds 1000000 --min-groups 2; done

three_train() {
    wait_for 15 '^round 1 3 a,b,c' a && progress b 15 && progress c 15 || return 1
    "$server" status "$address" --keys "$keys" >"$work/status" || { why="no status"; return 1; }
    [ "$(grep -cE '^[abc] +training' "$work/status")" = 3 ] || { why=$(cat "$work/status"); return 1; }
}
check "three groups train, and status lists them" three_train

killed() {
    kill -KILL "${pid_of[c]}"
    progress a 15 || return 1
    join c2 c --rounds 1000000 --min-groups 2
    # Until c counts in both chunks it may need a payload of b, which is frozen next.
    wait_for 15 '^round 0 [0-9]* a,b,c' c2 && wait_for 15 '^round 1 [0-9]* a,b,c' c2
}
check "a killed group rejoins with the state of the others" killed

frozen() {
    local going=1
    kill -STOP "${pid_of[b]}"
    progress a 15 || going=0
    sleep 1
    kill -CONT "${pid_of[b]}"
    [ $going = 1 ] && progress b 15
}
check "a frozen group is left out and catches up" frozen

restarted() {
    kill -KILL "$server_pid"
    sleep 1
    serve
    progress a 15 && progress b 15 && progress c2 15
}
check "the rendezvous restarts and the run continues" restarted

# not_joined KEYS PATTERN FLAGS...: group x cannot join, and its error has the pattern.
not_joined() {
    local folder=$1 pattern=$2
    shift 2
    "$member" --name x --rendezvous "$address" --keys "$folder" "$@" >"$work/x" 2>&1 &&
        { why="joined with $folder $*"; return 1; }
    grep -q "$pattern" "$work/x" || { why=$(tail -n 1 "$work/x"); return 1; }
}
refused() {
    local other=$work/other
    "$server" keygen "$other" x >/dev/null
    cp "$keys/server.public" "$other/"
    not_joined "$other" 'refuses the keys' || return 1   # its key is unknown
    chmod 644 "$other/x.secret"
    not_joined "$other" 'x.secret; run chmod 600' || return 1
    "$server" keygen "$other/3" evil >/dev/null
    cp "$keys/server.public" "$other/3/"
    "$member" --name evil --rendezvous "$address" --keys "$other/3" --attack ||
        { why="exit code $?"; return 1; }
    [ "$(grep -c 'refused address .*: its key' "$work/server")" = 1 ] ||
        { why="not one line for two unknown keys"; return 1; }
    "$server" keygen "$other/2" x >/dev/null
    cp "$other/2/x.public" "$keys/x.public"              # added while the server runs
    not_joined "$other/2" 'refuses the keys' || return 1 # the server.public is another one
    cp "$keys/server.public" "$other/2/"
    not_joined "$other/2" "another run: .*'test'.*'other'" --identity other || return 1
}
check "unknown keys and other runs are refused" refused

added() { # the other groups connect to x directly
    join x x --keys "$work/other/2" --rounds 1000000 --min-groups 2 --connections 2 \
        --listen "tcp://0.0.0.0:$((port + 1))" # others reach it at the address that it comes from
    wait_for 15 '^round 0 [0-9]* a,b,c,x' x || return 1
    wait_for 15 'group x is connected directly' a && wait_for 15 'group c is connected directly' x || return 1
    "$server" status "$address" --keys "$keys" | grep -q "^x .*tcp://127.0.0.1:$((port + 1))$" ||
        { why="status has no address of x"; return 1; }
    head -c 100000 /dev/urandom >"/dev/tcp/127.0.0.1/$((port + 1))" 2>/dev/null
    "$member" --name evil --rendezvous "tcp://127.0.0.1:$((port + 1))" --keys "$keys" --attack
    progress x 15 || return 1
    kill -TERM "${pid_of[x]}"
    progress a 15
}
check "a group is added while others run, with direct connections" added

attacked() {
    "$member" --name evil --rendezvous "$address" --keys "$keys" --attack || { why="exit code $?"; return 1; }
    head -c 100000 /dev/urandom >"/dev/tcp/127.0.0.1/$port" 2>/dev/null
    grep -q 'refused evil: a frame' "$work/server" || { why="no line about refused frames"; return 1; }
    [ "$(grep -c refused "$work/server")" -le 20 ] || { why="too many lines"; return 1; }
    kill -0 "$server_pid" && progress a 15 && progress b 15 && progress c2 15
}
check "malformed, replayed and oversized frames don't stop training" attacked

proxy() { # forwards connections from $port + 2 to the rendezvous
    python3 - $((port + 2)) "$port" <<'END' &
import socket, sys, threading
def forward(a, b):
    while data := a.recv(65536):
        b.sendall(data)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    near = listener.accept()[0]
    far = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for pair in (near, far), (far, near):
        threading.Thread(target=forward, args=pair, daemon=True).start()
END
    proxy_pid=$!
    pids+=("$proxy_pid")
}
reconnected() {
    proxy
    join d d --rendezvous "tcp://127.0.0.1:$((port + 2))" --rounds 1000000 --min-groups 2
    wait_for 15 '^round 0 [0-9]* a,b,c,d' d || return 1
    kill -KILL "$proxy_pid"
    wait_for 15 'a,b,c [0-9a-f]*$' a || return 1
    proxy
    progress d 20 || return 1 # d may have missed rounds, and then fetches the state
    ! grep 'seen before' "$work/d" || { why="frames after the reconnection are refused"; return 1; }
}
check "a group whose connection is lost continues after it reconnects" reconnected

same_hashes() {
    local different logs=("$work"/{a,b,c,c2,d,x})
    different=$(cat "${logs[@]}" | sed -n 's/^round \([0-9]* [0-9]*\) .* \([0-9a-f]*\)$/\1 \2/p' | sort -u |
        awk '{ if ($1 " " $2 in seen) print "chunk " $1 " round " $2; seen[$1 " " $2] = 1 }')
    [ -z "$different" ] || { why="weights differ: $(head -n 1 <<<"$different")"; return 1; }
    ! grep -q 'hashes differ' "${logs[@]}" || { why="the rendezvous saw different hashes"; return 1; }
}
check "all groups had the same weights after every round" same_hashes
finish
