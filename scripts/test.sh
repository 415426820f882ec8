#!/usr/bin/env bash
# Every test that this machine can run: installs what is missing, builds with warnings as errors, plainly and with sanitizers, runs unit
# tests, house rules, tests over MPI ranks, faults and whole runs. Ends with "N passed, N failed, N skipped"; exit code 1 when any failed.
#
# How tests are found and counted:
#   test/unit/*/test_*.c   cmocka programs, each run plainly and with AddressSanitizer and UBSan; each of their tests counts. Those whose
#                        source speaks of PRECISION=fp32 are run a third time in that build
#   test/mpi/test_*.c    run under mpirun at the numbers of ranks that a line "// ranks: 1 2 4 8" states (without it 1 2 4), and with
#                        sanitizers at the largest of them up to 4
#   test/{unit,fault,e2e}/*.sh  get the folder of the programs as BUILD
#   test/fuzz/fuzz_*.c   parsers of outside bytes: given inputs with sanitizers, and a search for new ones where there is clang's libFuzzer
#   test/gpu/            what needs a GPU: skipped without one
# Programs over MPI and scripts print "ok NAME", "not ok NAME" and "skip NAME REASON" lines, which count; without such lines the exit code
# is the one result (77: skipped).
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set -u
exec </dev/null

no_install=0 limit=600
for argument; do
    case $argument in
    --long) export LONG=1; limit=3600 ;;
    --no-install) no_install=1 ;;
    --help | -h)
        say "usage: scripts/test.sh [--long] [--no-install]"
        say "Builds and runs every test that this machine can run. --long: also those that take long; --no-install: install nothing."
        exit 0 ;;
    *) die 2 "unknown argument $argument; see scripts/test.sh --help" ;;
    esac
done

install_missing $no_install run test
plain=$BUILD/check san=$BUILD/check-san tsan=$BUILD/check-tsan fp32=$BUILD/check-fp32 fuzz=$BUILD/check-fuzz logs=$BUILD/check/logs
mkdir -p "$logs"
jobs=$(core_count)
passed=0 failed=0 skipped=0

# --- running and counting --------------------------------------------------------------------------------------------------------------

count_lines() { grep -cE -- "$1" "$2" || true; } # pattern, file

# count LOG: sets ok, bad and skip. A cmocka program tells how many tests began: those that are neither well nor skipped went wrong.
count() {
    local total
    total=$(grep -oE '\] (tests: |[^:]*: )?Running [0-9]+ test' "$1" | grep -oE '[0-9]+ test' | awk '{ n += $1 } END { print n + 0 }')
    if [ "$total" -gt 0 ]; then
        ok=$(count_lines '\[       OK \]' "$1")
        skip=$(grep -oE '\[  SKIPPED \] [A-Za-z_][A-Za-z0-9_]*$' "$1" | sort -u | wc -l)
        bad=$((total - ok - skip))
    else
        ok=$(count_lines '^ok ' "$1")
        bad=$(count_lines '^not ok ' "$1")
        skip=$(count_lines '^skip ' "$1")
    fi
}

# run NAME COMMAND...: runs a test program within the time limit, counts its tests, shows one line, and its output when it failed.
run() {
    local name=$1 log start code=0 ok=0 bad=0 skip=0 verdict=ok
    shift
    log=$logs/${name//[ \/]/-}.log
    start=${EPOCHREALTIME//[.,]/}
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 || code=$?
    [ "$code" -ne 124 ] || say "took longer than $limit s" >>"$log"
    count "$log"
    if [ $((ok + bad + skip)) = 0 ]; then
        case $code in 0) ok=1 ;; 77) skip=1 ;; *) bad=1 ;; esac
    elif [ "$code" != 0 ] && [ "$code" != 77 ] && [ "$bad" -le 0 ]; then
        bad=1
    fi
    [ "$bad" -ge 0 ] || bad=0
    [ "$bad" = 0 ] || verdict=FAILED
    [ "$((ok + bad))" != 0 ] || verdict=skip
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
    printf '%-6s %-44s %5d passed %3d failed %3d skipped %7.1f s\n' "$verdict" "$name" "$ok" "$bad" "$skip" "$(((${EPOCHREALTIME//[.,]/} - start) / 100000))e-1"
    grep -E '^skip(ped:)? ' "$log" | uniq | sed 's/^/         /' | head -n 20
    if [ "$bad" != 0 ]; then
        say "---- exit code $code; the end of $log:"
        tail -n 80 "$log"
        say "----"
    fi
}

skip_one() { # name, reason
    skipped=$((skipped + 1))
    printf '%-6s %-44s %s\n' skip "$1" "$2"
}
fail_one() { # name, reason
    failed=$((failed + 1))
    printf '%-6s %-44s %s\n' FAILED "$1" "$2"
}

# --- building ----------------------------------------------------------------------------------------------------------------------------

unit_tests=(test/unit/*/test_*.c) mpi_tests=(test/mpi/test_*.c)
[ -e "${unit_tests[0]}" ] || unit_tests=()
[ -e "${mpi_tests[0]}" ] || mpi_tests=()
mapfile -t fp32_tests < <(grep -l 'PRECISION=fp32' "${unit_tests[@]}" /dev/null)

# build NAME FOLDER VARIABLE TARGETS...: what cannot be built is shown, and an older program of the same name is removed, which counts as
# failed later; the rest is still tested.
build() {
    local name=$1 folder=$2 variable=$3 start=$SECONDS log program
    shift 3
    log=$logs/build-${name// /-}.log
    if make -k -j "$jobs" WERROR=1 BUILD="$folder" "$variable" "$@" >"$log" 2>&1; then
        printf '%-6s %-44s %54d s\n' built "$name" $((SECONDS - start))
        return
    fi
    fail_one "build: $name" "the errors of $log:"
    grep -E 'error|warning|\*\*\*|undefined' "$log" | head -n 40
    while IFS= read -r program; do
        make -q WERROR=1 BUILD="$folder" "$variable" "$program" >/dev/null 2>&1 || rm -f "$program"
    done < <(find "$folder" -maxdepth 4 -type f -perm -u+x)
}

# built PROGRAM: one that could not be built counts as failed.
built() {
    [ ! -x "$1" ] || return 0
    fail_one "$1" "not built"
    return 1
}

programs() { # folder, sources
    local folder=$1 source
    shift
    for source; do say "$folder/${source%.c}"; done
}

mapfile -t san_targets < <(programs "$san" ${unit_tests[@]+"${unit_tests[@]}"} ${mpi_tests[@]+"${mpi_tests[@]}"})
# Threads run in preprocess_data and where weights are drawn; with --long everything that can run is watched, for threads that nobody knows of.
tsan_targets=("$tsan/preprocess_data" "$tsan/merge_datasets" "$tsan/test/unit/ranks/test_parallel")
[ -z "${LONG:-}" ] || mapfile -t -O 3 tsan_targets < <(programs "$tsan" ${unit_tests[@]+"${unit_tests[@]}"} ${mpi_tests[@]+"${mpi_tests[@]}"})
mapfile -t fp32_targets < <(programs "$fp32" ${fp32_tests[@]+"${fp32_tests[@]}"})
build "programs and tests" "$plain" SAN= all test-programs
[ ${#san_targets[@]} = 0 ] || build "tests with sanitizers" "$san" SAN=1 "${san_targets[@]}" fuzz-targets ${LONG:+all}
build "programs for ThreadSanitizer" "$tsan" SAN=thread "${tsan_targets[@]}"
[ ${#fp32_targets[@]} = 0 ] || build "tests in fp32" "$fp32" PRECISION=fp32 "${fp32_targets[@]}"

# --- unit tests --------------------------------------------------------------------------------------------------------------------------

# Programs that start MPI alone need no launcher agent, and may be run by root in a container.
export OMPI_MCA_plm=isolated OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export UBSAN_OPTIONS=print_stacktrace=1
# Some kernels randomise addresses more than gcc's sanitizers can bear; not every container lets us turn it off.
steady=()
if setarch "$(uname -m)" -R true 2>/dev/null; then steady=(setarch "$(uname -m)" -R); fi

# MPI libraries keep memory until the process ends: leaks are looked for in programs that do not start MPI, or tell its memory from theirs (test/leaks.h).
leaks_of() { if grep -qE 'MPI_Init|launch_init' "$1" && ! grep -qE 'test/leaks\.h|__lsan_' "$1"; then say 0; else say 1; fi; } # source

for source in ${unit_tests[@]+"${unit_tests[@]}"}; do
    name=$(basename "$source" .c)
    if built "$plain/${source%.c}"; then run "unit $name" "$plain/${source%.c}"; fi
    if built "$san/${source%.c}"; then
        run "unit $name, sanitizers" env ASAN_OPTIONS=detect_leaks="$(leaks_of "$source")" ${steady[@]+"${steady[@]}"} "$san/${source%.c}"
    fi
done
for source in ${fp32_tests[@]+"${fp32_tests[@]}"}; do
    if built "$fp32/${source%.c}"; then run "unit $(basename "$source" .c), fp32" "$fp32/${source%.c}"; fi
done
for script in test/unit/*.sh test/unit/*/*.sh; do
    [ ! -e "$script" ] || run "unit $(basename "$script")" env BUILD="$plain" bash "$script"
done
# A tool that gives up ends the process without waiting for its threads, which may wait for a pipe: no leak. The handler of llmc/data/mapped.c may call what a thread may.
# Open MPI's hook in munmap and madvise takes a lock of libfabric as a thread ends, when ThreadSanitizer has forgotten the thread: its segmentation fault.
export TSAN_OPTIONS="report_thread_leaks=0 report_signal_unsafe=0"
watched=(env OMPI_MCA_memory=^patcher ${steady[@]+"${steady[@]}"})
run "unit test_preprocess.sh, threads watched" "${watched[@]}" env BUILD="$tsan" bash test/unit/data/test_preprocess.sh
for source in ${unit_tests[@]+"${unit_tests[@]}"}; do
    [ -n "${LONG:-}" ] || [ "$source" = test/unit/ranks/test_parallel.c ] || continue
    if built "$tsan/${source%.c}"; then run "unit $(basename "$source" .c), threads watched" "${watched[@]}" "$tsan/${source%.c}"; fi
done

# --- hostile input -----------------------------------------------------------------------------------------------------------------------

run "fuzz: inputs that were found, sanitizers" env BUILD="$san" test/fuzz/run.sh replay
if printf '#include <stddef.h>\nint LLVMFuzzerTestOneInput(const char *d, size_t n) { return 0; }\n' | clang -x c -fsanitize=fuzzer,address - -o "$logs/libfuzzer" 2>/dev/null; then
    build "fuzz targets with libFuzzer" "$fuzz" FUZZ=1 fuzz-targets
    run "fuzz: search" env BUILD="$fuzz" test/fuzz/run.sh search "$([ -z "${LONG:-}" ] && say 2 || say 120)"
else
    skip_one "fuzz: search" "needs clang with libFuzzer (on Debian: apt-get install clang libclang-rt-14-dev)"
fi

# --- over MPI ranks ----------------------------------------------------------------------------------------------------------------------

unset OMPI_MCA_plm
launch_by_script=(bash -c '. scripts/common.sh; launch "$@"' launch)
for source in ${mpi_tests[@]+"${mpi_tests[@]}"}; do
    name=$(basename "$source" .c) most=1
    ranks=$(sed -n 's,^// ranks: *\([0-9 ]*\).*,\1,p' "$source" | head -n 1)
    for n in ${ranks:=1 2 4}; do
        [ "$n" -gt 4 ] || [ "$n" -le "$most" ] || most=$n
    done
    if built "$plain/${source%.c}"; then
        for n in $ranks; do run "mpi $name, $n ranks" "${launch_by_script[@]}" "$n" "$plain/${source%.c}"; done
    fi
    if built "$san/${source%.c}"; then
        # LeakSanitizer's tracer itself died (signal 11) in 6 of 42 runs in a fresh Debian, in 0 of 42 without Open MPI's transports for fabrics.
        run "mpi $name, $most ranks, sanitizers" env OMPI_MCA_btl=^tcp,openib,ofi ASAN_OPTIONS=detect_leaks="$(leaks_of "$source")" ${steady[@]+"${steady[@]}"} "${launch_by_script[@]}" "$most" "$san/${source%.c}"
    fi
    if [ -n "${LONG:-}" ] && built "$tsan/${source%.c}"; then
        run "mpi $name, 2 ranks, threads watched" "${watched[@]}" "${launch_by_script[@]}" 2 "$tsan/${source%.c}"
    fi
done

# --- faults and whole runs -----------------------------------------------------------------------------------------------------------------

for folder in fault e2e; do
    for script in "test/$folder"/*.sh; do
        [ ! -e "$script" ] || run "$folder $(basename "$script")" env BUILD="$plain" bash "$script"
    done
done

# Whole runs with sanitizers; MPI's leaks are not ours.
for script in test/e2e/arms.sh test/e2e/resume.sh test/e2e/data.sh; do
    [ -n "${LONG:-}" ] && [ -e "$script" ] || continue
    run "e2e $(basename "$script"), sanitizers" env BUILD="$san" ASAN_OPTIONS=detect_leaks=0 LIMIT=600 ${steady[@]+"${steady[@]}"} bash "$script"
done

# --- what the GPU program needs --------------------------------------------------------------------------------------------------------------

read -ra mpi_flags < <(mpicc --showme:compile 2>/dev/null || mpicc -show 2>/dev/null | grep -oE -- '-I[^ ]+' | paste -s -d ' ')
common_subset=(-std=c++17 -D_GNU_SOURCE -DOMPI_SKIP_MPICXX ${mpi_flags[@]+"${mpi_flags[@]}"} -I.)
run "the trainer is C++ too" g++ "${common_subset[@]}" -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -Werror -fsyntax-only -x c++ train_gpt.cu
nvcc_path=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -n "$nvcc_path" ]; then
    run "nvcc compiles train_gpt.cu" "$nvcc_path" "${common_subset[@]}" -c train_gpt.cu -o "$plain/nvcc.o"
else
    skip_one "nvcc compiles train_gpt.cu" "no nvcc on this machine"
fi

# Every CUDA source for every architecture; each counts. Without --long without optimising, which finds the same errors in a third of the time.
# What cannot be compiled for want of a library is skipped with the Makefile's words: all when NCCL or cuDNN is missing, one file without cudnn-frontend.
compile_for_gpu() { # jobs, folder, variable
    local output wrong=0 folder=$2/cuda object reason source sources=(llmc/cuda/*.cu llmc/cuda/*.cpp sdp4bit/*.cu test/gpu/*.cu dev/bench/*.cu train_gpt.cu)
    [ "$3" != FAST=1 ] || folder=$2/cuda-fast
    output=$(make -k -j "$1" gpu-check WERROR=1 BUILD="$2" "$3" 2>&1)
    printf '%s\n' "$output"
    if reason=$(grep -m 1 -oE '\*\*\* (CUDA|MPI|NCCL|cuDNN): .*' <<<"$output"); then
        printf 'skip gpu-check: %s\n' "${reason#\*\*\* }"
        return 77
    fi
    for source in "${sources[@]}"; do
        object=${source%.*}.o
        if grep -qE "\*\*\* \[[^]]*/$object\]" <<<"$output"; then
            printf 'not ok compile %s\n' "$source"
            wrong=1
        elif [ "${source%.cpp}" != "$source" ] && reason=$(grep -m 1 '^cudnn-frontend could not be fetched' <<<"$output"); then
            printf 'skip compile %s: %s\n' "$source" "$reason"
        elif [ -e "$folder/$object" ]; then
            printf 'ok compile %s\n' "$source"
        else
            printf 'not ok compile %s: no object\n' "$source"
            wrong=1
        fi
    done
    return $wrong
}
export -f compile_for_gpu
if [ -z "$nvcc_path" ]; then
    skip_one "make gpu-check" "no nvcc on this machine"
else
    run "make gpu-check" bash -c 'compile_for_gpu "$@"' compile "$jobs" "$plain" "FAST=$([ -n "${LONG:-}" ] || say 1)"
fi

if ! have_command nvidia-smi || ! nvidia-smi >/dev/null 2>&1; then
    skip_one "tests on a GPU" "no NVIDIA GPU on this machine"
else
    run "gpu.sh" env BUILD="$plain" bash test/gpu.sh
fi

say "$((SECONDS)) s; logs in $logs"
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
