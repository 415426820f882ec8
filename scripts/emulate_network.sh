#!/usr/bin/env bash
# Gives the loopback of this machine the speed of a network, for nodes emulated inside it
# (--gpus-per-node N --emulate-nodes). All nodes' traffic passes the loopback, so n nodes of R Gb/s
# each take n x R. Needs root and tc (Debian's iproute2). Everything else on the loopback is slowed
# too.
#
# Packets are handed on by whichever processor sent them or holds the queue. So those of one
# connection overtake each other, which TCP takes for losses. Shaped to 100 Gb/s, NCCL then got a
# fifth of what it gets in order, and connections broke. So the receiving side is told to treat each
# connection on one processor (receive packet steering, rps_cpus). What was set before is kept in a
# file in /run, or in $TMPDIR where /run cannot be written. restore sets it again; without the file
# it sets none.
#
#   scripts/emulate_network.sh NODES GBIT_PER_NODE    e.g. 2 25
#   scripts/emulate_network.sh NODES unlimited        as fast as this machine's processors copy
#   scripts/emulate_network.sh restore
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked scripts/emulate_network.sh "$@"
set -euo pipefail
usage() { die 2 "$1; usage: scripts/emulate_network.sh NODES GBIT_PER_NODE (or unlimited), or restore"; }
# Lines "QUEUE BEFORE OURS" of masks of processors, for this network namespace: each has a loopback.
state=/run
[ -w "$state" ] || state=${TMPDIR:-/tmp}
state+=/emulate_network.$(stat -Lc %i /proc/self/ns/net)
queues=/sys/class/net/lo/queues
mask_of() { tr -d '\n' <"$queues/$1/rps_cpus"; }
set_mask() { # QUEUE MASK
    { printf '%s\n' "$2" >"$queues/$1/rps_cpus"; } 2>/dev/null ||
        die 3 "$queues/$1/rps_cpus cannot be written; are you root?"
}
# kept QUEUE: sets $before and $ours to what the file says of it, or to nothing.
kept() {
    local line queue
    before='' ours=''
    [ -O "$state" ] || return 0  # in a folder of all users another's file means nothing
    while read -r line; do
        [[ $line =~ ^(rx-[0-9]+)\ ([0-9a-f,]+)\ ([0-9a-f,]+)$ ]] || continue
        if [ "${BASH_REMATCH[1]}" = "$1" ]; then before=${BASH_REMATCH[2]} ours=${BASH_REMATCH[3]}; fi
    done <"$state"
}
# Divides connections among all processors, and keeps what was set before. A mask that this script
# has set is not taken for that.
steer() {
    local file queue now before ours lines=''
    for file in "$queues"/rx-*/rps_cpus; do
        [ -e "$file" ] || continue
        queue=$(basename "$(dirname "$file")")
        kept "$queue"
        now=$(mask_of "$queue")
        [ -n "$ours" ] && [ "$now" = "$ours" ] || before=$now
        set_mask "$queue" "$(all_processors)"
        lines+="$queue $before $(mask_of "$queue")"$'\n'
    done
    rm -f "$state"
    printf '%s' "$lines" >"$state" ||
        echo "warning: $state cannot be written: restore will divide packets among no processors" >&2
}
# Back to what was there. A mask that somebody has set since stays. Where nothing is known, packets
# are treated where they come.
unsteer() {
    local file queue now before ours
    for file in "$queues"/rx-*/rps_cpus; do
        [ -e "$file" ] || continue
        queue=$(basename "$(dirname "$file")")
        kept "$queue"
        now=$(mask_of "$queue")
        if [ -z "$ours" ]; then [[ $now =~ ^[0,]*$ ]] || set_mask "$queue" 0
        elif [ "$now" = "$ours" ] && [ "$now" != "$before" ]; then set_mask "$queue" "$before"; fi
    done
}
all_processors() { # as a mask of groups of 32, the highest first
    local n group bits mask=''
    n=$(getconf _NPROCESSORS_CONF)
    for ((group = (n - 1) / 32; group >= 0; group--)); do
        bits=$((n - 32 * group >= 32 ? 32 : n - 32 * group))
        printf -v mask '%s%s%x' "$mask" "${mask:+,}" $(((1 << bits) - 1))
    done
    echo "$mask"
}
unshape() { # nothing to take away is as good
    tc qdisc del dev lo root 2>/dev/null || true
    ! tc qdisc show dev lo | grep -q 'qdisc tbf' || die 3 "the loopback could not be restored; are you root?"
}
have_command tc || die 3 "tc was not found; install iproute2"
if [ $# -eq 1 ] && [ "$1" = restore ]; then
    unshape
    unsteer
    echo "loopback: unlimited"
    exit 0
fi
[ $# -eq 2 ] || usage "two numbers are wanted"
[[ $1 =~ ^[1-9][0-9]{0,2}$ ]] || usage "$1 is no number of nodes"
if [ "$2" = unlimited ]; then
    unshape
    steer
    echo "loopback: unlimited, a connection's packets in order; \
scripts/emulate_network.sh restore takes it away"
    exit 0
fi
[[ $2 =~ ^[0-9]{1,4}(\.[0-9]{1,3})?$ ]] || usage "$2 is no number of Gb/s"
mbit=$(awk -v n="$1" -v r="$2" 'BEGIN { printf "%d", 1000 * n * r + 0.5 }')
[ "$mbit" -gt 0 ] || usage "$2 Gb/s is no speed"
steer
tc qdisc replace dev lo root tbf rate "${mbit}mbit" burst 32mb latency 20ms ||
    { unsteer; die 3 "tc could not shape the loopback; are you root?"; }
echo "loopback: $mbit Mb/s in all, $2 Gb/s for each of $1 nodes; \
scripts/emulate_network.sh restore takes it away"
