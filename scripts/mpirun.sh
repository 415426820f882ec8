#!/usr/bin/env bash
# Runs mpirun with the same arguments, and replaces its messages about failed ranks with one line
# that names a killed rank and its signal. Programs print an error line themselves before they exit.
# Other messages, such as too few slots or a missing program, are kept. (mpirun -q of Open MPI 4
# hides all of them.)
#
#   scripts/mpirun.sh --oversubscribe -np 2 build/train_gpt_cpu @configs/tiny.args ...
# shellcheck source-path=SCRIPTDIR source=common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -gt 0 ] || help_if_asked scripts/mpirun.sh --help
case $1 in --help | -h) help_if_asked scripts/mpirun.sh "$1" ;; esac
cd "$caller" || exit 3
have_command mpirun || die 3 "mpirun was not found; install openmpi-bin"
# mpirun reads its standard input. It would take the commands that were typed or pasted in advance.
[ ! -t 0 ] || exec </dev/null
oom_before=$(oom_kills "$@")
exec 4> >(trap '' HUP USR1 TERM INT; without_banners "$@" >&2)
filter=$!
# In the background, so that signals are forwarded. Ctrl-C in a terminal reaches mpirun itself.
env --default-signal=INT mpirun "$@" <&0 2>&4 4>&- &
job=$!
exec 4>&-
again=1
for name in HUP TERM USR1; do
    # shellcheck disable=SC2064 # expand $name now
    trap "again=1; kill -s $name $job 2>/dev/null" $name
done
trap 'again=1' INT
while [ $again = 1 ]; do
    again=0
    wait "$job"
    status=$?
done
if wait "$filter"; then say_signal "$status" "$@"; fi
exit "$status"
