#!/usr/bin/env bash
# The rules of CONTRIBUTING.md that a program can check: where preprocessor conditionals may stand,
# how long files and lines may be, no tabs, no paths of one machine, scripts without shellcheck's
# complaints, a map in CONTRIBUTING that is true. (Layers: layers.sh.) Prints "ok NAME", "not
# ok NAME" and "skip NAME: reason" lines.
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

# Everything in the repository, and what is about to be. Without git, in a release archive, the
# folders that hold source.
list_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard
    else
        find . -type f -not -path './.git/*' -not -path './build*' -not -path './runs/*' \
            -not -path './data/*' | sed 's,^\./,,'
    fi | while IFS= read -r path; do [ ! -f "$path" ] || echo "$path"; done
}
mapfile -t files < <(list_files)
of_kind() { printf '%s\n' "${files[@]}" | grep -E "$1"; } # ENDING, a regular expression
# begins_with REGEX: files whose first line matches.
begins_with() {
    local path
    for path in "${files[@]}"; do
        if head -c 64 "$path" | head -n 1 | grep -qaE "$1"; then echo "$path"; fi
    done
}
mapfile -t sources < <(of_kind '\.(c|h|cu|cuh|cpp)$')
mapfile -t scripts < <(begins_with '^#!.*(bash|/sh)\b|^# shellcheck shell=')
mapfile -t python < <(begins_with '^#!.*python'; of_kind '\.py$')
[ ${#sources[@]} -gt 20 ] || report "source files are found" "only ${#sources[@]}"

# --- preprocessor conditionals -----------------------------------------------------------------
# Allowed: extern "C" in base.h, host/device markers in numerics.h, the precision in dtype.h, CUDA
# versions in common.cuh.
conditionals=$(grep -nE '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif)\b' "${sources[@]}" /dev/null |
    grep -vE \
        -e '^llmc/base/base\.h:[0-9]+:#ifdef __cplusplus$' \
        -e '^llmc/base/numerics\.h:[0-9]+:#ifdef __CUDA(CC|_ARCH)__$' \
        -e '^llmc/base/dtype\.h:[0-9]+:#ifdef PRECISION_FP32$' \
        -e '^llmc/cuda/common\.cuh:[0-9]+:#if (CUDART_VERSION|CUDNN_VERSION|NCCL_VERSION_CODE) ')
report "preprocessor conditionals only in the four places" "$conditionals"

# --- the look of files -------------------------------------------------------------------------
# train_gpt.c tells the whole story. A table of cases in a test may be longer than a module.
too_long=$(for path in "${sources[@]}"; do
    case $path in train_gpt.c) most=850 ;; test/*) most=1000 ;; *) most=620 ;; esac
    lines=$(wc -l <"$path")
    [ "$lines" -le $most ] || echo "$path has $lines lines, most are $most"
done)
report "no file is too long to read" "$too_long"
report "no tabs in sources" "$(grep -nP '\t' "${sources[@]}" /dev/null)"
report "no blanks at line ends" "$(grep -nE '[[:space:]]+$' "${sources[@]}" /dev/null)"
report "headers begin with #pragma once" "$(of_kind '\.h$' | while IFS= read -r path; do
    grep -q '^#pragma once$' "$path" || echo "$path"
done)"
report "files begin with what they are for" "$(for path in "${sources[@]}"; do
    head -n 1 "$path" | grep -qE '^(//|/\*)' || echo "$path"
done)"

# A header that says "Included by a.c and b.h." is included by each of them. Where that sentence
# ends in "only", no other file includes it.
untrue=$(for path in "${sources[@]}"; do
    case $path in *.h | *.cuh) ;; *) continue ;; esac
    said=$(sed '/^\/\//!q' "$path" | sed 's,^//,,' | tr -s '\n ' '  ' |
        grep -oE 'Included by ([^.;]|\.[a-z])*' | head -n 1)
    named=$(grep -oE '[A-Za-z0-9_/]+\.(c|h|cu|cuh)\b' <<<"$said")
    includers=$(grep -lF "#include \"$path\"" "${sources[@]}" /dev/null)
    for name in $named; do
        grep -qE "(^|/)$name\$" <<<"$includers" || echo "$path: $name does not include it"
    done
    case $said in
        *' tests only'*)
            grep -vE '^(test/|$)' <<<"$includers" | sed "s,^,$path: not only tests include it: ," ;;
        *' only'*)
            for includer in $includers; do
                grep -qxF "${includer##*/}" < <(sed 's,.*/,,' <<<"$named") ||
                    echo "$path: $includer includes it too"
            done ;;
    esac
done)
report "headers know who includes them" "$untrue"

# --- columns -----------------------------------------------------------------------------------
# Prose has at most 100 columns, in Markdown and in comments; code has at most 110. What cannot be
# broken may be longer: in Markdown tables, code blocks and lines with a link; in scripts a line
# with a quoted text of more than 40 columns, a line of Megatron-LM's log, what tells shellcheck,
# and the texts that the tokenizer's reference is made of; in the Makefile messages.
wide() { # COLUMNS FILES...: lines that have more
    LC_ALL=C.UTF-8 grep -nE "^.{$(($1 + 1))}" /dev/null "${@:2}"
}
unbroken="'[^']{40,}'|\"[^\"]{40,}\"|^[^:]*:[0-9]+: *# shellcheck | iteration +[0-9]+/ "
unbroken+="|^dev/ref/make_tokenizer_golden.py:"
mapfile -t prose < <(of_kind '\.md$')
mapfile -t scripted < <(printf '%s\n' "${scripts[@]}" "${python[@]}" | sort -u)
report "prose has at most 100 columns" "$(wide 100 "${prose[@]}" | grep -vE '^[^:]*:[0-9]+:(\||    )|\]\(')"
report "comments have at most 100 columns" "$(wide 100 "${sources[@]}" | grep -E '^[^:]*:[0-9]+: *//'
    wide 100 Makefile "${scripted[@]}" | grep -E '^[^:]*:[0-9]+: *#' | grep -vE "$unbroken")"
report "code has at most 110 columns" "$(wide 110 "${sources[@]}"
    wide 110 Makefile | grep -vE '\$\((error|info) '
    wide 110 "${scripted[@]}" | grep -vE "$unbroken")"

# --- one memory plan ---------------------------------------------------------------------------
# Device memory comes from device_alloc, which counts it. device.cu calls the driver for it and for
# one probe.
allocations=$(grep -nE 'cudaMalloc(Async|Managed|Pitch|FromPoolAsync)? *\(' "${sources[@]}" /dev/null)
report "GPU memory is allocated in one place" "$(grep -vE '^(llmc/cuda/device\.cu:|$)' <<<"$allocations")"

# --- what does not belong into a repository ----------------------------------------------------
# Patterns are written so that this file does not match itself. Tests may use data that lies beside
# the repository when it is there.
beside='\.\./shared'
one_machine="(^|[^A-Za-z0-9_.])/(wor[k]|roo[t]|hom[e])/|$beside/spe[c]"
report "no paths of one machine" "$(grep -nIE "$one_machine" "${files[@]}" /dev/null)"
beside_tests=$(grep -lIE "$beside/data" "${files[@]}" /dev/null | grep -vE '^(test|dev/ref)/')
report "data beside the repository only in tests" "$beside_tests"
mapfile -t programs < <(printf '%s\n' "${sources[@]}" | grep -vE '^test/')
shells='\b(system|popen|wordexp|exec[lv]p?e?|posix_spawnp?) ?\('
report "no path or name goes through a shell" "$(grep -nE "$shells" "${programs[@]}" /dev/null)"
report "no unfinished work" "$(grep -nIwE 'TOD[O]|FIXM[E]|XX[X]' "${sources[@]}" /dev/null)"

# --- scripts -----------------------------------------------------------------------------------
report "scripts can be executed" "$(for path in ${scripts[@]+"${scripts[@]}"}; do
    case $path in test/*) continue ;; esac
    if head -n 1 "$path" | grep -q '^#!' && [ ! -x "$path" ]; then echo "$path"; fi
done)"
report "scripts are well-formed" "$(for path in ${scripts[@]+"${scripts[@]}"}; do bash -n "$path" 2>&1; done)"
if command -v shellcheck >/dev/null; then
    # Not asked: what shellcheck cannot know of variables and arguments across sourced files, and
    # commas within a flag's value.
    report "shellcheck" "$(shellcheck --exclude=SC2034,SC2054,SC2120,SC2154 --external-sources \
        --severity=warning --source-path=SCRIPTDIR --format=gcc ${scripts[@]+"${scripts[@]}"} 2>&1)"
else
    echo "skip shellcheck: not installed"
fi

# --- what users read ---------------------------------------------------------------------------
# CONTRIBUTING's map is a block of lines "    path   what it is"; the paths must exist. Flags that
# the documents name must be known to a program.
map=$(sed -n '/^## Map/,/^## /p' CONTRIBUTING.md | grep -E '^    [A-Za-z.]' | awk '{ print $1 }')
report "CONTRIBUTING has a map" "$([ "$(wc -l <<<"$map")" -ge 10 ] || echo "fewer than ten lines")"
report "the map is true" "$(for path in $map; do
    [ -e "$path" ] || echo "$path does not exist"
done)"
folders=$(printf '%s\n' "${files[@]}" | grep / | cut -d / -f 1 | sort -u | grep -v '^\.'
    printf '%s\n' "${files[@]}" | grep -oE '^llmc/[a-z0-9_]+/' | sort -u | sed 's,/$,,')
report "the map names every folder and every module" "$(while IFS= read -r folder; do
    grep -qE "^$folder/" <<<"$map" || echo "$folder/"
done <<<"$folders")"
# Its section "Files" names every source file; a header goes with its .c or .cu.
report "CONTRIBUTING names every source file" "$(printf '%s\n' "${sources[@]}" |
    grep -E '^(llmc|sdp4bit|dev/convert|dev/data)/|^(dev/)?[^/]+$' | while IFS= read -r path; do
    stem=${path##*/}
    grep -qE "[\`/]${stem%.*}\.[a-z]" CONTRIBUTING.md || echo "$path"
done)"
report "the README is short" "$([ "$(wc -l <README.md)" -le 250 ] || echo "more than 250 lines")"
# A path in backticks, and the target of a link, is there.
paths=$(grep -ohE '`(llmc|sdp4bit|dev|docs|scripts|configs|test)/[A-Za-z0-9_./]+`' "${prose[@]}" |
    tr -d '`' | sort -u)
report "files that the documents name exist" "$(for path in $paths; do [ -e "$path" ] || echo "$path"; done)"
report "the documents' links lead somewhere" "$(for page in "${prose[@]}"; do
    grep -oE '\]\([^)#:]+' "$page" | cut -c 3- | while IFS= read -r target; do
        [ -e "$(dirname "$page")/$target" ] || echo "$page: $target"
    done
done)"
report "tables of documents are whole" "$(test/unit/documents.py tables "${prose[@]}" 2>&1)"
report "code in documents stands behind an empty line" "$(test/unit/documents.py code "${prose[@]}" 2>&1)"
report "links to headings lead to one" "$(test/unit/documents.py anchors "${prose[@]}" 2>&1)"
picture=$(mktemp)
dev/bench/step_time_picture.py dev/bench/results/comm_2gpu.json "$picture"
report "the README's picture shows the measured figures" "$(cmp docs/step_time.svg "$picture" 2>&1)"
rm -f "$picture"
program=${BUILD:-build}/train_gpt_cpu
if [ -x "$program" ]; then
    known=$({
        echo --allow-run-as-root --oversubscribe --gpus-per-task # of mpirun and srun
        "$program" --help
        "${BUILD:-build}/preprocess_data" --help
        "${BUILD:-build}/convert_checkpoint" --help
        "${BUILD:-build}/generate_cpu" --help
        for helps in dev/compare_logs dev/data/*.sh dev/bench/comm.sh dev/experiments/local_steps_model \
            scripts/{quickstart,run_until_done,test}.sh; do
            "$helps" --help
        done
        for verb in run trunk branch report; do dev/experiments/study "$verb" --help; done
    } 2>&1)
    flags=$(grep -ohE -- '`--[a-z][a-zA-Z_-]+' "${prose[@]}" | tr -d '`' | sort -u)
    report "the documents' flags exist" "$(while IFS= read -r flag; do
        grep -qF -- "$flag" <<<"$known" || echo "$flag"
    done <<<"$flags")"
else
    echo "skip the documents' flags exist: $program is not built"
fi
[ $failures = 0 ]
