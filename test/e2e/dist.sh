#!/usr/bin/env bash
# make dist: the tarball's programs need no libraries except Open MPI and the C library, and its
# quickstart runs on a machine without compiler and make.
# shellcheck disable=SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source-path=SCRIPTDIR source=../results.sh
. test/results.sh
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

unpacked() {
    make -j "$(nproc)" BUILD="$work/build" dist >"$work/log" 2>&1 &&
        mkdir "$work/machine" && tar -xzf "$work"/build/sdp4bit-*.tar.gz -C "$work/machine" ||
        { why=$(tail -n 1 "$work/log"); return 1; }
    rm -rf "$work/build"
}
check "make dist writes a tarball" unpacked
folder=$(echo "$work"/machine/sdp4bit-*)

few_libraries() {
    local program library libraries
    for program in "$folder"/build/*; do
        [ -f "$program" ] || continue
        libraries=$(objdump -p "$program" |
            awk '$1 == "NEEDED" && $2 !~ /^(libc|libm|libmpi|ld-linux.*)\.so/ { print $2 }')
        for library in $libraries; do
            [ -f "$folder/build/lib/$library" ] || { why="${program##*/} needs $library"; return 1; }
        done
    done
}
check "programs need only Open MPI and the C library" few_libraries

without_compiler() {
    local program
    mkdir "$work/bin" "$work/tmp"
    for program in /usr/bin/* /bin/*; do
        case ${program##*/} in
        *cc | *cc-* | *c++* | *g++* | *clang* | *make | ld | ld.* | as | pkg-config | pkgconf) ;;
        *) ln -sf "$program" "$work/bin/" ;;
        esac
    done
    (cd "$folder" && env -u BUILD -u CC PATH="$work/bin" scripts/quickstart.sh --no-install --iters 10) \
        >"$work/out" 2>&1 </dev/null
    [ $? -le 1 ] && grep -q 'bytes per step between nodes .* met$' "$work/out" ||
        { why=$(tail -n 1 "$work/out"); return 1; }
}
check "quickstart runs without a compiler" without_compiler
finish
