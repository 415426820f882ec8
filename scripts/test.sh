#!/usr/bin/env bash
# Runs all tests that this machine supports. Installs missing packages, builds with warnings as
# errors, runs unit tests, repository rules, MPI tests, fault injection and whole runs, and shows
# the remaining time. Ends with all failures and "N passed, N failed, N skipped"; exit code 1 if any
# test failed.
#
# The default level takes fifteen minutes on two idle cores and covers every part of the program.
# --ci adds sanitizers, all numbers of ranks and longer runs. --long adds tests that take hours.
# scripts/test_costs.txt assigns tests to levels.
#
# How tests are found and counted:
#   test/unit/*/test_*.c  cmocka programs, run normally and with AddressSanitizer and UBSan. Each
#                         cmocka test counts. If the source mentions PRECISION=fp32, the fp32 build
#                         runs too
#   test/mpi/test_*.c     run under mpirun with the numbers of ranks in a line "// ranks: 1 2 4 8"
#                         (default 1 2 4), and with sanitizers with the largest of these up to 4. If
#                         the source mentions PRECISION=fp32, the fp32 build runs too
#   test/{unit,fault,e2e}/*.sh  get the folder of the programs as BUILD
#   test/fuzz/fuzz_*.c    parsers of untrusted input: run on stored inputs with sanitizers, and
#                         search for new ones if clang's libFuzzer is available
#   test/gpu/             tests that need a GPU; skipped without one
# MPI programs and scripts print "ok NAME", "not ok NAME" and "skip NAME REASON" lines, which are
# counted. Without such lines the exit code is the only result (77: skipped).
# shellcheck source-path=SCRIPTDIR source=common.sh source=test_lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set -u
exec </dev/null

no_install=0 limit=1800 chosen=default
for argument; do
    case $argument in
    --ci) chosen=ci ;;
    --long) export LONG=1; chosen=long limit=7200 ;;
    --no-install) no_install=1 ;;
    --help | -h)
        say "usage: scripts/test.sh [--ci | --long] [--no-install]"
        say "Builds and runs tests of every part of the program, in fifteen minutes on two cores."
        say "--ci: all tests except the longest; --long: all tests; --no-install: do not install packages."
        exit 0 ;;
    *) die 2 "unknown argument $argument; see scripts/test.sh --help" ;;
    esac
done

install_missing $no_install build run test
plain=$BUILD/check san=$BUILD/check-san tsan=$BUILD/check-tsan fp32=$BUILD/check-fp32 fuzz=$BUILD/check-fuzz
logs=$BUILD/check/logs
mkdir -p "$logs"
slots=$(core_count) # rows that run at once
. scripts/test_lib.sh

unit_tests=(test/unit/*/test_*.c) mpi_tests=(test/mpi/test_*.c) unit_scripts=(test/unit/*.sh test/unit/*/*.sh)
mapfile -t fp32_tests < <(grep -l 'PRECISION=fp32' "${unit_tests[@]}")

# --- how programs are started -------------------------------------------------------------

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export UBSAN_OPTIONS=print_stacktrace=1
# A tool that aborts ends the process without joining threads that may be waiting on a pipe; that is
# not a leak. The signal handler in llmc/data/mapped.c is synchronous, so it may call functions that
# are not async-signal-safe.
export TSAN_OPTIONS="report_thread_leaks=0 report_signal_unsafe=0"
one_machine
# Ranks that wait let other processes run. Open MPI does this by itself only with more ranks than
# cores, but rows run concurrently: two ranks that poll without yielding wait a whole time slice for
# every message.
export OMPI_MCA_mpi_yield_when_idle=1
# OpenBLAS selects matrix kernels by CPU model, and for a model that it does not know its slowest.
# Every CPU that runs the programs runs these.
[ "$(uname -m)" != x86_64 ] || export OPENBLAS_CORETYPE="${OPENBLAS_CORETYPE-Haswell}"
# Programs that call MPI_Init on a single process need no launcher agent.
alone=(env OMPI_MCA_plm=isolated)
launched=(bash -c '. scripts/common.sh; launch "$@"' launch)
# Some kernels randomize addresses more than gcc's sanitizers tolerate. Not every container allows
# turning randomization off.
steady=()
if setarch "$(uname -m)" -R true 2>/dev/null; then steady=(setarch "$(uname -m)" -R); fi
# Without this, Open MPI hooks munmap and madvise. The hook takes a libfabric lock in threads that
# are exiting and that ThreadSanitizer no longer knows, which crashes ThreadSanitizer.
watched=(env OMPI_MCA_memory=^patcher ${steady[@]+"${steady[@]}"})

# leaks_of SOURCE: prints 1 if the test runs with leak detection. MPI libraries hold memory until
# exit, so this covers programs that do not start MPI or filter its allocations (test/leaks.h).
leaks_of() {
    if ! grep -qE 'MPI_Init|launch_init' "$1" || grep -qE 'test/leaks\.h|__lsan_' "$1"; then
        say 1
    else
        say 0
    fi
}

# --- the list -------------------------------------------------------------------------------

targets_plain=(all test-programs) targets_san=() targets_tsan=() targets_fp32=()

list_unit_tests() {
    local source name
    for source in "${unit_tests[@]}"; do
        name=$(basename "$source" .c)
        add one "unit $name" "${alone[@]}" "$plain/${source%.c}"
    done
    for source in "${fp32_tests[@]}"; do
        add_built targets_fp32 "$fp32" "$source" one "unit $(basename "$source" .c), fp32" "${alone[@]}"
    done
    for source in "${unit_scripts[@]}"; do
        add one "unit $(basename "$source")" "${alone[@]}" BUILD="$plain" bash "$source"
    done
    for source in "${unit_tests[@]}"; do
        name=$(basename "$source" .c)
        add_built targets_san "$san" "$source" one "unit $name, sanitizers" \
            "${alone[@]}" ASAN_OPTIONS=detect_leaks="$(leaks_of "$source")" ${steady[@]+"${steady[@]}"}
        add_built targets_tsan "$tsan" "$source" one "unit $name, ThreadSanitizer" \
            "${alone[@]}" "${watched[@]}"
    done
    # preprocess_data is multithreaded.
    name="unit test_preprocess.sh, ThreadSanitizer"
    if in_level "$name"; then targets_tsan+=("$tsan/preprocess_data" "$tsan/merge_datasets"); fi
    add one "$name" "${watched[@]}" env BUILD="$tsan" bash test/unit/data/test_preprocess.sh
}

# add_built TARGETS DIR SOURCE WHERE NAME COMMAND...: adds a row that runs the program built in that
# directory, and its build target if the level includes the row.
add_built() {
    local -n list=$1
    local program=$2/${3%.c}
    if in_level "$5"; then list+=("$program"); fi
    add "${@:4}" "$program"
}

list_fuzzing() {
    local name="fuzz: stored inputs, sanitizers"
    if in_level "$name"; then targets_san+=(fuzz-targets); fi
    add one "$name" "${alone[@]}" BUILD="$san" test/fuzz/run.sh replay
}

list_ranks() {
    local source name ranks n most
    for source in "${mpi_tests[@]}"; do
        name=$(basename "$source" .c) most=1
        ranks=$(sed -n 's,^// ranks: *\([0-9 ]*\).*,\1,p' "$source" | head -n 1)
        for n in ${ranks:=1 2 4}; do
            [ "$n" -gt 4 ] || [ "$n" -le "$most" ] || most=$n
            add ranks "mpi $name, $n ranks" "${launched[@]}" "$n" "$plain/${source%.c}"
        done
        # LeakSanitizer's tracer crashed (signal 11) in 6 of 42 runs on a fresh Debian, and in 0 of
        # 42 runs without Open MPI's fabric transports.
        add_built targets_san "$san" "$source" ranks "mpi $name, $most ranks, sanitizers" \
            env OMPI_MCA_btl=^tcp,openib,ofi ASAN_OPTIONS=detect_leaks="$(leaks_of "$source")" \
            ${steady[@]+"${steady[@]}"} "${launched[@]}" "$most"
        add_built targets_tsan "$tsan" "$source" ranks "mpi $name, 2 ranks, ThreadSanitizer" \
            "${watched[@]}" "${launched[@]}" 2
        grep -q 'PRECISION=fp32' "$source" || continue
        add_built targets_fp32 "$fp32" "$source" ranks "mpi $name, $most ranks, fp32" "${launched[@]}" "$most"
    done
}

list_runs() {
    local folder script name
    for folder in e2e fault; do
        for script in "test/$folder"/*.sh; do
            add ranks "$folder $(basename "$script")" env BUILD="$plain" bash "$script"
        done
    done
    # Whole runs with sanitizers, without leak detection because of MPI.
    for script in test/e2e/presets.sh test/e2e/resume.sh test/e2e/data.sh; do
        name="e2e $(basename "$script"), sanitizers"
        if in_level "$name"; then targets_san+=(all); fi
        add ranks "$name" env BUILD="$san" ASAN_OPTIONS=detect_leaks=0 LIMIT=1200 \
            ${steady[@]+"${steady[@]}"} bash "$script"
    done
}

list_the_rest() {
    add one "compile for GPUs" bash test/gpu_compile.sh "$plain" "${LONG:-}"
    add alone "fuzz: search" "${alone[@]}" BUILD="$fuzz" bash test/fuzz/search.sh "$slots" "${LONG:+120}"
    add alone "tests on a GPU" env BUILD="$plain" bash -c '
        if nvidia-smi >/dev/null 2>&1; then exec bash test/gpu.sh; fi
        echo "skip tests on a GPU: no NVIDIA GPU on this machine"'
}

# One-core rows fill the cores next to multi-rank rows, which start first.
list_ranks
list_runs
list_unit_tests
list_fuzzing
list_the_rest

# --- building, running ------------------------------------------------------------------------

# build NAME DIR VARIABLE TARGETS...: a target that fails to build is shown and counts as failed.
# Its stale program is removed, so that its tests fail too. The other tests still run.
build() {
    local name=$1 folder=$2 variable=$3 start=$SECONDS log program
    shift 3
    log=$logs/build-${name// /-}.log
    [ $# -gt 0 ] || return 0
    say "building $name ..."
    if make -k -j "$slots" WERROR=1 ASSERTS=1 BUILD="$folder" "$variable" "$@" >"$log" 2>&1; then
        say "built in $((SECONDS - start)) s"
        return
    fi
    failed=$((failed + 1)) failures+=("build: $name")
    say "FAILED build: $name; the errors of $log:"
    grep -E 'error|warning|\*\*\*|undefined' "$log" | head -n 40
    while IFS= read -r program; do
        make -q WERROR=1 ASSERTS=1 BUILD="$folder" "$variable" "$program" >/dev/null 2>&1 || rm -f "$program"
    done < <(find "$folder" -maxdepth 4 -type f -perm -u+x)
}

build "programs and tests" "$plain" SAN= "${targets_plain[@]}"
build "tests with sanitizers" "$san" SAN=1 ${targets_san[@]+"${targets_san[@]}"}
build "tests for ThreadSanitizer" "$tsan" SAN=thread ${targets_tsan[@]+"${targets_tsan[@]}"}
build "tests in fp32" "$fp32" PRECISION=fp32 ${targets_fp32[@]+"${targets_fp32[@]}"}
run_rows

show_failures
say "$((SECONDS / 60)) min $((SECONDS % 60)) s; logs in $logs"
say "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
