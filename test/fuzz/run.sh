#!/usr/bin/env bash
# Fuzzes the parsers of external data. Called by scripts/test.sh, and manually for longer searches.
# Prints "ok" or "not ok" per target:
#   BUILD=build-san test/fuzz/run.sh replay
#       runs seeds and past failures with the targets of `make fuzz-targets`
#   BUILD=build/fuzz test/fuzz/run.sh search 600 jsonl
#       searches for failures in fuzz_jsonl for 600 s with the targets of `make fuzz`; without a
#       name, in all targets
# Failing inputs are saved in BUILD/fuzz-found/; after the fix, add them to
# test/fuzz/regressions/TARGET/. The corpus is kept in BUILD/fuzz-corpus/ for the next search.
set -u
cd "$(dirname "$0")/../.." || exit 1
BUILD=${BUILD:-build}
mode=${1:-} seconds=${2:-10}
case $mode in
replay) shift ;;
search) shift 2 ;;
*) echo "usage: test/fuzz/run.sh replay|search SECONDS [TARGET...]" >&2; exit 2 ;;
esac
targets=("$@")
[ ${#targets[@]} -gt 0 ] ||
    mapfile -t targets < <(cd test/fuzz && printf '%s\n' fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')
failed=0

# Targets write their files to memory if possible. The files are removed at the end.
work=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
export TMPDIR=$work
python3 test/fuzz/make_seeds.py "$work/seeds" || exit 1

# Limits in MB of a single allocation and of all allocations. Inputs have a few kilobytes.
most_at_once=64 most=1024
base=max_allocation_size_mb=$most_at_once:hard_rss_limit_mb=$most:allocator_may_return_null=0
steady=()
if setarch "$(uname -m)" -R true 2>/dev/null; then steady=(setarch "$(uname -m)" -R); fi

dictionary() { # target
    case $1 in
    manifest | arguments | jsonl | chat | tasks | vocabulary | tokenizer_json | data_args | hf)
        echo test/fuzz/json.dict ;;
    tokenizer | corpus) echo test/fuzz/text.dict ;;
    shard) echo test/fuzz/shard.dict ;;
    options)
        { cat test/fuzz/options.dict; grep -oE 'HEADING|"[a-z][a-zA-Z0-9_-]+"' llmc/config/config_table.c |
            grep '"' | sed 's/^"/"--/' | sort -u; } >"$work/options.dict"
        echo "$work/options.dict" ;;
    esac
}

replay() { # target
    ASAN_OPTIONS=${ASAN_OPTIONS:-}:$base timeout -k 5 120 ${steady[@]+"${steady[@]}"} \
        "$BUILD/test/fuzz/fuzz_$1" "$work/seeds/$1" "test/fuzz/regressions/$1"
}

search() { # target
    local corpus=$BUILD/fuzz-corpus/$1 found=$BUILD/fuzz-found words folders=("$work/seeds/$1")
    mkdir -p "$corpus" "$found"
    words=$(dictionary "$1")
    [ ! -d "test/fuzz/regressions/$1" ] || folders+=("test/fuzz/regressions/$1")
    timeout -k 5 $((seconds + 60)) ${steady[@]+"${steady[@]}"} "$BUILD/test/fuzz/fuzz_$1" \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=$most \
        -malloc_limit_mb=$most_at_once -max_len=16384 -print_final_stats=1 -verbosity=1 \
        ${words:+-dict="$words"} -artifact_prefix="$found/$1-" "$corpus" "${folders[@]}"
}

for target in "${targets[@]}"; do
    if [ ! -x "$BUILD/test/fuzz/fuzz_$target" ]; then
        echo "not ok fuzz $target: $BUILD/test/fuzz/fuzz_$target is not built"
        failed=1
    elif $mode "$target" </dev/null >"$work/log" 2>&1; then
        echo "ok fuzz $target: $(grep -aE '^# [0-9]+ inputs|number_of_executed_units' "$work/log" | tail -n 1 | tr -s ' ')"
    else
        echo "not ok fuzz $target: exit code $?"
        tail -n 60 "$work/log" | cut -c 1-400
        failed=1
    fi
done
exit $failed
