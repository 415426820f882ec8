#!/usr/bin/env bash
# The rooms of llmc/ stand in an order, and a file includes headers of its own room and of rooms
# below it only. Prints "ok NAME" and "not ok NAME" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1

# Lowest first. The boundary headers at the top of llmc/ are places of their own: the lowest room
# that may include each is the one behind it. device.h needs llmc/base/base.h alone and counts as
# llmc/base. The backends stand on ops.h and may use every room below "state".
order=(llmc/base llmc/ops.h llmc/ranks llmc/comm.h llmc/data sdp4bit llmc/config llmc/log llmc/state \
    llmc/model llmc/checkpoint llmc/plan llmc/run train_gpt.h)

# The number of a file's or header's room; -1: none.
place() {
    local i
    [ "$1" != llmc/device.h ] || { echo 0; return; }
    for i in "${!order[@]}"; do
        case $1 in "${order[$i]}" | "${order[$i]}"/*) echo "$i"; return ;; esac
    done
    echo -1
}

mapfile -t sources < <(find llmc sdp4bit -type f | grep -E '\.(c|h|cu|cuh|cpp)$' | sort)
[ ${#sources[@]} -gt 100 ] || { echo "not ok sources are found: ${#sources[@]}"; exit 1; }

upward=$(printf '%s\n' "${sources[@]}" | while IFS= read -r file; do
    [ -f "$file" ] || continue
    case $file in
    llmc/cpu/* | llmc/cuda/*) own=$(place llmc/state) ;;
    *) own=$(place "$file") ;;
    esac
    [ "$own" -ge 0 ] || { echo "$file stands in no room"; continue; }
    grep -oE '^#include "[^"]+"' "$file" | cut -d '"' -f 2 | while IFS= read -r header; do
        case $header in
        llmc/cpu/* | llmc/cuda/*) case $file in llmc/cpu/* | llmc/cuda/* | sdp4bit/*_cpu.c | sdp4bit/*.cu*) \
            continue ;; esac ;;
        esac
        at=$(place "$header")
        if [ "$at" -lt 0 ]; then echo "$file includes $header, which stands in no room"
        elif [ "$at" -gt "$own" ]; then echo "$file includes $header of a room above"; fi
    done
done)
if [ -z "$upward" ]; then echo "ok files include their own room and rooms below"; else
    echo "not ok files include their own room and rooms below"
    while IFS= read -r line; do echo "#   $line"; done <<<"$upward"
fi

stray=$(find llmc -maxdepth 1 -type f | grep -vE '^llmc/(device|ops|comm)\.h$')
if [ -z "$stray" ]; then echo "ok llmc/ itself holds the three boundary headers"; else
    echo "not ok llmc/ itself holds the three boundary headers: $stray"
fi
[ -z "$upward$stray" ]
