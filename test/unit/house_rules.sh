#!/usr/bin/env bash
# The rules of CONTRIBUTING.md that a program can check: where preprocessor conditionals may stand, how long files may be, no tabs, no paths of one
# machine, scripts without shellcheck's complaints, a README whose map is true. Prints "ok NAME", "not ok NAME" and "skip NAME: reason" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
failures=0

# report NAME FINDINGS: ok when there are none.
report() {
    if [ -z "$2" ]; then
        echo "ok $1"
    else
        echo "not ok $1"
        while IFS= read -r line; do echo "#   $line"; done <<<"$2"
        failures=$((failures + 1))
    fi
}

# Everything in the repository, and what is about to be; without git (a release archive) the folders that hold source.
list_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard
    else
        find . -type f -not -path './.git/*' -not -path './build*' -not -path './runs/*' -not -path './data/*' | sed 's,^\./,,'
    fi | while IFS= read -r path; do [ ! -f "$path" ] || echo "$path"; done
}
mapfile -t files < <(list_files)
mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep -E '\.(c|h|cu|cuh|cpp)$')
mapfile -t scripts < <(for path in "${files[@]}"; do head -c 64 "$path" | head -n 1 | grep -qaE '^#!.*(bash|/sh)\b|^# shellcheck shell=' && echo "$path"; done)
[ ${#sources[@]} -gt 20 ] || report "source files are found" "only ${#sources[@]}"

# --- preprocessor conditionals -------------------------------------------------------------------------------------------------------------
# Allowed: extern "C" in llmc/base/base.h, host/device markers in sdp4bit/codec.h, the precision in llmc/base/dtype.h, CUDA versions in llmc/cuda/common.cuh.
conditionals=$(grep -nE '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif)\b' "${sources[@]}" /dev/null | grep -vE \
    -e '^llmc/base/base\.h:[0-9]+:#ifdef __cplusplus$' \
    -e '^sdp4bit/codec\.h:[0-9]+:#ifdef __CUDA(CC|_ARCH)__$' \
    -e '^llmc/base/dtype\.h:[0-9]+:#ifdef PRECISION_FP32$' \
    -e '^llmc/cuda/common\.cuh:[0-9]+:#if (CUDART_VERSION|CUDNN_VERSION|NCCL_VERSION_CODE) ')
report "preprocessor conditionals only in the four places" "$conditionals"

# --- the look of files -----------------------------------------------------------------------------------------------------------------------
# train_gpt.cu tells the whole story in one file; a table of cases in a test may be longer than a module.
too_long=$(for path in "${sources[@]}"; do
    case $path in train_gpt.cu) most=820 ;; test/*) most=1000 ;; *) most=620 ;; esac
    lines=$(wc -l <"$path")
    [ "$lines" -le $most ] || echo "$path has $lines lines, most are $most"
done)
report "no file is too long to read" "$too_long"
report "no tabs in sources" "$(grep -nP '\t' "${sources[@]}" /dev/null)"
report "no blanks at line ends" "$(grep -nE '[[:space:]]+$' "${sources[@]}" /dev/null)"
report "headers begin with #pragma once" "$(for path in "${sources[@]}"; do case $path in *.h) grep -q '^#pragma once$' "$path" || echo "$path" ;; esac; done)"
report "files begin with what they are for" "$(for path in "${sources[@]}"; do head -n 1 "$path" | grep -qE '^(//|/\*)' || echo "$path"; done)"

# A header that says "Included by a.c and b.h." is included by each of them, and where it ends in "only" by no other file.
untrue=$(for path in "${sources[@]}"; do
    case $path in *.h | *.cuh) ;; *) continue ;; esac
    said=$(sed '/^\/\//!q' "$path" | sed 's,^//,,' | tr -s '\n ' '  ' | grep -oE 'Included by ([^.;]|\.[a-z])*' | head -n 1)
    named=$(grep -oE '[A-Za-z0-9_/]+\.(c|h|cu|cuh)\b' <<<"$said")
    includers=$(grep -lF "#include \"$path\"" "${sources[@]}" /dev/null)
    for name in $named; do grep -qE "(^|/)$name\$" <<<"$includers" || echo "$path: $name does not include it"; done
    case $said in
        *' tests only'*) grep -vE '^(test/|$)' <<<"$includers" | sed "s,^,$path: not only tests include it: ," ;;
        *' only'*) for includer in $includers; do grep -qxF "${includer##*/}" < <(sed 's,.*/,,' <<<"$named") || echo "$path: $includer includes it too"; done ;;
    esac
done)
report "headers know who includes them" "$untrue"

# --- one memory plan ----------------------------------------------------------------------------------------------------------------------------
# Device memory comes from device_alloc, which counts it; device.cu calls the driver for it and for one probe.
report "GPU memory is allocated in one place" "$(grep -nE 'cudaMalloc(Async|Managed|Pitch|FromPoolAsync)? *\(' "${sources[@]}" /dev/null | grep -vE '^llmc/cuda/device\.cu:')"

# --- what does not belong into a repository ----------------------------------------------------------------------------------------------------
# Patterns are written so that this file does not match itself. Tests may use data that lies beside the repository when it is there.
beside='\.\./shared'
report "no paths of one machine" "$(grep -nIE "(^|[^A-Za-z0-9_.])/(wor[k]|roo[t]|hom[e])/|$beside/spe[c]" "${files[@]}" /dev/null)"
report "data beside the repository only in tests" "$(grep -lIE "$beside/data" "${files[@]}" /dev/null | grep -vE '^(test|dev/ref)/')"
mapfile -t programs < <(printf '%s\n' "${sources[@]}" | grep -vE '^test/')
report "no path or name goes through a shell" "$(grep -nE '\b(system|popen|wordexp|exec[lv]p?e?|posix_spawnp?) ?\(' "${programs[@]}" /dev/null)"
report "no unfinished work" "$(grep -nIwE 'TOD[O]|FIXM[E]|XX[X]' "${sources[@]}" /dev/null)"

# --- scripts -------------------------------------------------------------------------------------------------------------------------------------
report "scripts can be executed" "$(for path in ${scripts[@]+"${scripts[@]}"}; do case $path in test/*) ;; *) head -n 1 "$path" | grep -q '^#!' && [ ! -x "$path" ] && echo "$path" ;; esac; done)"
report "scripts are well-formed" "$(for path in ${scripts[@]+"${scripts[@]}"}; do bash -n "$path" 2>&1; done)"
if command -v shellcheck >/dev/null; then
    # Not asked: what shellcheck cannot know of variables and arguments across sourced files, and commas within a flag's value.
    report "shellcheck" "$(shellcheck --exclude=SC2034,SC2054,SC2120,SC2154 --external-sources --severity=warning --source-path=SCRIPTDIR --format=gcc ${scripts[@]+"${scripts[@]}"} 2>&1)"
else
    echo "skip shellcheck: not installed"
fi

# --- the README ------------------------------------------------------------------------------------------------------------------------------------
# Its map is a block of lines "    path   what it is"; the paths must exist. Its flags must be known to the program.
map=$(sed -n '/^## Map/,/^## /p' README.md | grep -E '^    [A-Za-z.]' | awk '{ print $1 }')
report "the README has a map" "$([ "$(wc -l <<<"$map")" -ge 10 ] || echo "fewer than ten lines")"
report "the README's map is true" "$(for path in $map; do [ -e "$path" ] || echo "$path does not exist"; done)"
report "the README's map names every folder" "$(printf '%s\n' "${files[@]}" | grep / | cut -d / -f 1 | sort -u | grep -v '^\.' |
    while IFS= read -r folder; do grep -qE "^$folder/" <<<"$map" || echo "$folder/"; done)"
program=${BUILD:-build}/train_gpt_cpu
if [ -x "$program" ]; then
    known=$({ echo --allow-run-as-root --oversubscribe; "$program" --help; "${BUILD:-build}/preprocess_data" --help; dev/compare_logs --help; scripts/quickstart.sh --help; scripts/test.sh --help; } 2>&1)
    report "the README's flags exist" "$(grep -oE -- '`--[a-z][a-zA-Z_-]+' README.md | tr -d '`' | sort -u | while IFS= read -r flag; do grep -qF -- "$flag" <<<"$known" || echo "$flag"; done)"
else
    echo "skip the README's flags exist: $program is not built"
fi
[ $failures = 0 ]
