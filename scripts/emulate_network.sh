#!/usr/bin/env bash
# Limits the bandwidth of the loopback interface to emulate a network between nodes on this machine
# (--gpus-per-node N --emulate-nodes). All inter-node traffic uses the loopback, so n nodes with R
# Gb/s each need a limit of n x R. Requires root and tc (Debian: iproute2). Affects all other
# loopback traffic too.
#
# By default, packets are processed on the CPU core that sent them or that holds the queue. Packets
# of one connection can then be reordered, which TCP interprets as loss. At a limit of 100 Gb/s this
# reduced NCCL's throughput to a fifth and broke connections. Receive packet steering (rps_cpus) is
# therefore enabled, so that one core processes each connection. The previous masks are saved in a
# file in /run, or in $TMPDIR if /run is not writable. `restore` restores them, or clears the masks
# if there is no file.
#
#   scripts/emulate_network.sh NODES GBIT_PER_NODE    e.g. 2 25
#   scripts/emulate_network.sh NODES unlimited        no limit, receive packet steering only
#   scripts/emulate_network.sh restore
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked scripts/emulate_network.sh "$@"
set -euo pipefail
usage() { die 2 "$1; usage: scripts/emulate_network.sh NODES GBIT_PER_NODE (or unlimited), or restore"; }
# Lines "QUEUE BEFORE OURS" with CPU masks. One file per network namespace, each of which has a
# loopback.
state=/run
[ -w "$state" ] || state=${TMPDIR:-/tmp}
state+=/emulate_network.$(stat -Lc %i /proc/self/ns/net)
queues=/sys/class/net/lo/queues
mask_of() { tr -d '\n' <"$queues/$1/rps_cpus"; }
set_mask() { # QUEUE MASK
    { printf '%s\n' "$2" >"$queues/$1/rps_cpus"; } 2>/dev/null ||
        die 3 "$queues/$1/rps_cpus cannot be written; are you root?"
}
# kept QUEUE: sets $before and $ours to the masks in the file, or to empty strings.
kept() {
    local line queue
    before='' ours=''
    [ -O "$state" ] || return 0  # ignore other users' files in a shared folder
    while read -r line; do
        [[ $line =~ ^(rx-[0-9]+)\ ([0-9a-f,]+)\ ([0-9a-f,]+)$ ]] || continue
        if [ "${BASH_REMATCH[1]}" = "$1" ]; then before=${BASH_REMATCH[2]} ours=${BASH_REMATCH[3]}; fi
    done <"$state"
}
# Distributes connections over all CPU cores. Saves the previous masks, unless an earlier call of
# this script set them.
steer() {
    local file queue now before ours lines=''
    for file in "$queues"/rx-*/rps_cpus; do
        [ -e "$file" ] || continue
        queue=$(basename "$(dirname "$file")")
        kept "$queue"
        now=$(mask_of "$queue")
        [ -n "$ours" ] && [ "$now" = "$ours" ] || before=$now
        set_mask "$queue" "$(all_cores)"
        lines+="$queue $before $(mask_of "$queue")"$'\n'
    done
    rm -f "$state"
    (set -o noclobber && printf '%s' "$lines" >"$state") || # refuses another user's link
        echo "warning: $state cannot be written: restore will clear the CPU masks" >&2
}
# Restores the previous masks. Keeps masks that were changed since, and clears masks without a saved
# value.
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
all_cores() { # mask in groups of 32 bits, highest first
    local n group bits mask=''
    n=$(getconf _NPROCESSORS_CONF)
    for ((group = (n - 1) / 32; group >= 0; group--)); do
        bits=$((n - 32 * group >= 32 ? 32 : n - 32 * group))
        printf -v mask '%s%s%x' "$mask" "${mask:+,}" $(((1 << bits) - 1))
    done
    echo "$mask"
}
unshape() { # succeeds if there is no limit
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
[ $# -eq 2 ] || usage "two arguments are needed"
[[ $1 =~ ^[1-9][0-9]{0,2}$ ]] || usage "$1 is not a number of nodes"
if [ "$2" = unlimited ]; then
    unshape
    steer
    echo "loopback: no limit, packets of a connection stay in order; \
undo with scripts/emulate_network.sh restore"
    exit 0
fi
[[ $2 =~ ^[0-9]{1,4}(\.[0-9]{1,3})?$ ]] || usage "$2 is not a number of Gb/s"
mbit=$(awk -v n="$1" -v r="$2" 'BEGIN { printf "%d", 1000 * n * r + 0.5 }')
[ "$mbit" -gt 0 ] || usage "$2 Gb/s is too little"
steer
tc qdisc replace dev lo root tbf rate "${mbit}mbit" burst 32mb latency 20ms ||
    { unsteer; die 3 "tc could not shape the loopback; are you root?"; }
echo "loopback: $mbit Mb/s in total, $2 Gb/s for each of $1 nodes; \
undo with scripts/emulate_network.sh restore"
