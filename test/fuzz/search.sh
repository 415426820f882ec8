#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer in directory BUILD and runs each one for SECONDS, JOBS at a
# time. Called by scripts/test.sh.
#
#   BUILD=FOLDER test/fuzz/search.sh JOBS [SECONDS]
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
set -u
make_folder "$BUILD"
if ! printf 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return 0; }\n' |
    clang -x c -fsanitize=fuzzer,address - -o "$BUILD/libfuzzer" 2>/dev/null; then
    say "skip fuzz: search: needs clang with libFuzzer (on Debian: apt-get install clang libclang-rt-14-dev)"
    exit 77
fi
make -k -j "$1" WERROR=1 BUILD="$BUILD" FUZZ=1 fuzz-targets >"$BUILD/make.log" 2>&1 ||
    { tail -n 40 "$BUILD/make.log"; say "not ok fuzz targets with libFuzzer are built"; }
exec test/fuzz/run.sh search "${2:-2}"
