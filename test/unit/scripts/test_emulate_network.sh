#!/usr/bin/env bash
# scripts/emulate_network.sh in a network namespace of its own, whose loopback nobody else uses.
cd "$(dirname "$0")/../../.." || exit 3
passed=0 failed=0 skipped=0
check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@"; then echo "ok $name"; passed=$((passed + 1)); else echo "not ok $name"; failed=$((failed + 1)); \
        fi
}
script=$PWD/scripts/emulate_network.sh
if ! command -v tc >/dev/null || ! command -v ip >/dev/null ||
    ! unshare -n -m sh -c 'mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && ip link set lo up' \
    2>/dev/null; then
    echo "skip the loopback's speed: tc, ip or the right to make a network namespace is missing"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
# /sys too: it shows the interfaces of where it was mounted. And a /run of its own, where the script
# keeps what was set before.
inside() { unshare -n -m bash \
    -c "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && ip link set lo up && $1"; }
steering=/sys/class/net/lo/queues/rx-0/rps_cpus
shaped() { inside "$script 2 25 >/dev/null && tc qdisc show dev lo" | grep -q 'tbf .*rate 50Gbit'; }
fraction() { inside "$script 4 0.5 >/dev/null && tc qdisc show dev lo" | grep -q 'tbf .*rate 2Gbit'; }
again() { inside "$script 2 25 >/dev/null && $script 2 10 >/dev/null && tc qdisc show dev lo" |
    grep -q 'tbf .*rate 20Gbit'; }
quiet() { printf "$script %s >/dev/null && " "$@"; } # WORDS...: the script with each of them, as shell text
restored() { ! inside "$(quiet "2 25" restore restore) tc qdisc show dev lo" | grep -q tbf; }
unlimited() { ! inside "$script 2 25 >/dev/null && $script 2 unlimited >/dev/null && tc qdisc show dev lo" |
    grep -q tbf; }
# A connection's packets on one processor: every processor takes part, none at the end.
steered() {
    local all
    all=$(inside "$script 2 $1 >/dev/null && cat $steering") || return
    python3 -c 'import os, sys
mask = int(sys.argv[1].replace(",", ""), 16)
sys.exit(mask != (1 << os.sysconf("SC_NPROCESSORS_CONF")) - 1)' "$all"
}
not_steered() { inside "$script 2 $1 >/dev/null && $script restore >/dev/null && cat $steering" |
    tr -d ',\n' | grep -qE '^0+$'; }
# What was set before is set again, whatever came between; what somebody set later stays. Of two
# processors or more one alone is not what the script sets.
one_steered() { inside "echo 1 >$steering && $1 && cat $steering" | tr -d ',\n' | grep -qE "^0*$2\$"; }
back() { one_steered "$script 2 25 >/dev/null && $script restore >/dev/null" 1; }
back_after_two() { one_steered \
    "$(quiet "2 unlimited" "2 25" "2 10" restore restore) true" 1; }
back_each_time() { one_steered \
    "$(quiet "2 25" restore) echo 2 >$steering && $(quiet "2 25" restore) true" 2; }
set_since() { one_steered "$script 2 25 >/dev/null && echo 2 >$steering && $script restore >/dev/null" 2; }
forgotten() { one_steered "$(quiet "2 25") rm /run/emulate_network.* && $script restore >/dev/null" 0; }
nonsense() {
    one_steered "$(quiet "2 25") for file in /run/emulate_network.*; do echo 'rx-0 1;id' >\$file; done &&
        $script restore >/dev/null" 0
}
# 64 MB at 0.4 Gb/s take 0.6 s at least beyond the burst of 32 MB; unshaped a few hundredths.
slow() {
    inside "$script 1 0.4 >/dev/null && python3 - <<'END'
import socket, sys, threading, time
server = socket.create_server((\"127.0.0.1\", 0))
def drain():
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
thread = threading.Thread(target=drain)
thread.start()
start = time.time()
client = socket.create_connection(server.getsockname())
client.sendall(bytes(64 << 20))
client.close()
thread.join()
sys.exit(0 if time.time() - start > 0.5 else 1)
END"
}
refused() { local out; out=$("$script" "$@" 2>&1); [ $? -eq 2 ] && [[ $out == error:*usage:* ]] &&
    [ "$(wc -l <<<"$out")" -eq 1 ]; }
check "2 nodes of 25 Gb/s: 50 on the loopback" shaped
check "half a Gb/s" fraction
check "another speed replaces the first" again
check "restore, twice" restored
check "unlimited after a speed" unlimited
check "packets of a connection on one processor, 25 Gb/s" steered 25
check "packets of a connection on one processor, unlimited" steered unlimited
check "where they come after restore, 25 Gb/s" not_steered 25
check "where they come after restore, unlimited" not_steered unlimited
if [ "$(getconf _NPROCESSORS_CONF)" -gt 1 ]; then
    check "restore sets what was there" back
    check "restore after several speeds, twice" back_after_two
    check "restore each time what was there" back_each_time
    check "restore leaves what was set since" set_since
    check "restore without its file: none" forgotten
    check "restore with a file that says something else: none" nonsense
else
    echo "skip restore sets what was there: one processor"
    skipped=$((skipped + 1))
fi
check "bytes take their time" slow
check "no arguments" refused
check "no speed" refused 2
check "zero" refused 2 0
check "no number" refused two 25
check "something for the shell" refused 2 '25;id'
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
