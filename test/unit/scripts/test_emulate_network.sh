#!/usr/bin/env bash
# scripts/emulate_network.sh in a private network namespace.
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
    echo "skip the loopback's speed: needs tc, ip and permission to create a network namespace"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
# inside COMMANDS: runs shell commands in a new network namespace. Mounts /sys again, because it
# shows the interfaces of the namespace in which it was mounted, and a private /run for the saved
# settings.
inside() { unshare -n -m bash \
    -c "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && ip link set lo up && $1"; }
steering=/sys/class/net/lo/queues/rx-0/rps_cpus
shaped() { inside "$script 2 25 >/dev/null && tc qdisc show dev lo" | grep -q 'tbf .*rate 50Gbit'; }
fraction() { inside "$script 4 0.5 >/dev/null && tc qdisc show dev lo" | grep -q 'tbf .*rate 2Gbit'; }
again() { inside "$script 2 25 >/dev/null && $script 2 10 >/dev/null && tc qdisc show dev lo" |
    grep -q 'tbf .*rate 20Gbit'; }
quiet() { printf "$script %s >/dev/null && " "$@"; } # ARGUMENT...: commands, one per argument
restored() { ! inside "$(quiet "2 25" restore restore) tc qdisc show dev lo" | grep -q tbf; }
unlimited() { ! inside "$script 2 25 >/dev/null && $script 2 unlimited >/dev/null && tc qdisc show dev lo" |
    grep -q tbf; }
# Receive packet steering must use every CPU, and after restore none.
steered() {
    local all
    all=$(inside "$script 2 $1 >/dev/null && cat $steering") || return
    python3 -c 'import os, sys
mask = int(sys.argv[1].replace(",", ""), 16)
sys.exit(mask != (1 << os.sysconf("SC_NPROCESSORS_CONF")) - 1)' "$all"
}
not_steered() { inside "$script 2 $1 >/dev/null && $script restore >/dev/null && cat $steering" |
    tr -d ',\n' | grep -qE '^0+$'; }
# restore must restore the settings from before the first call, and keep settings that were changed
# by hand since then. The tests use a mask with one CPU, which the script never sets on machines
# with several CPUs.
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
# At 0.4 Gb/s, after a burst of 32 MB, 64 MB take at least 0.6 s. Without a limit they take a few
# hundredths of a second.
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
check "2 nodes of 25 Gb/s: 50 Gb/s on the loopback" shaped
check "limits the loopback to half a Gb/s" fraction
check "another speed replaces the first one" again
check "restore works twice" restored
check "unlimited removes an earlier limit" unlimited
check "packet steering at 25 Gb/s" steered 25
check "packet steering without a limit" steered unlimited
check "no packet steering after restore, 25 Gb/s" not_steered 25
check "no packet steering after restore, unlimited" not_steered unlimited
if [ "$(getconf _NPROCESSORS_CONF)" -gt 1 ]; then
    check "restore restores the earlier settings" back
    check "restore after several speeds, twice" back_after_two
    check "restore restores the settings each time" back_each_time
    check "restore keeps settings that were changed since" set_since
    check "restore without its file does nothing" forgotten
    check "restore with an invalid file does nothing" nonsense
else
    echo "skip restore restores the earlier settings: one CPU"
    skipped=$((skipped + 1))
fi
check "transfers take as long as expected" slow
check "refuses a call without arguments" refused
check "refuses a call without a speed" refused 2
check "refuses a speed of zero" refused 2 0
check "refuses an argument that is not a number" refused two 25
check "refuses shell syntax in an argument" refused 2 '25;id'
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
