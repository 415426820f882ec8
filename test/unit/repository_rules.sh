#!/usr/bin/env bash
# Checks rules of CONTRIBUTING.md: preprocessor conditionals, formatting, length of files, functions
# and lines, machine-specific paths, and files and flags in documents. layers.sh checks layers,
# language.sh wording, shellcheck.sh scripts. Prints "ok NAME", "not ok NAME" and "skip NAME:
# reason" lines.
set -u
cd "$(dirname "$0")/../.." || exit 1
failures=0

# report NAME FINDINGS: passes if FINDINGS is empty.
report() {
    if [ -z "$2" ]; then
        echo "ok $1"
    else
        echo "not ok $1"
        while IFS= read -r line; do echo "#   $line"; done <<<"$2"
        failures=$((failures + 1))
    fi
}

# shellcheck source-path=SCRIPTDIR source=../file_list.sh
. test/file_list.sh
mapfile -t files < <(list_files)
of_kind() { printf '%s\n' "${files[@]}" | grep -E "$1"; } # ENDING, a regular expression
mapfile -t sources < <(of_kind '\.(c|h|cu|cuh|cpp)$')
mapfile -t scripts < <(shell_scripts "${files[@]}")
mapfile -t python < <(begins_with '^#!.*python' "${files[@]}"; of_kind '\.py$')
[ ${#sources[@]} -gt 20 ] || report "source files are found" "only ${#sources[@]}"

# --- preprocessor conditionals -----------------------------------------------------------------
# Allowed: extern "C" in base.h, host/device markers in numerics.h, the precision in dtype.h,
# library versions in common.cuh.
conditionals=$(grep -nE '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif)\b' "${sources[@]}" /dev/null |
    grep -vE \
        -e '^llmc/base/base\.h:[0-9]+:#ifdef __cplusplus$' \
        -e '^llmc/base/numerics\.h:[0-9]+:#ifdef __CUDA(CC|_ARCH)__$' \
        -e '^llmc/base/dtype\.h:[0-9]+:#ifdef PRECISION_FP32$' \
        -e '^llmc/cuda/common\.cuh:[0-9]+:#if (CUDART_VERSION|CUDNN_VERSION|NCCL_VERSION_CODE) ')
report "preprocessor conditionals occur only in the four allowed files" "$conditionals"

# --- formatting --------------------------------------------------------------------------------
# The limit is 620 lines, 850 for train_gpt.c and the table of all options, and 1000 for tests,
# which have tables of cases.
too_long=$(for path in "${sources[@]}"; do
    case $path in
    train_gpt.c | llmc/config/config_table.c) most=850 ;;
    test/*) most=1000 ;;
    *) most=620 ;;
    esac
    lines=$(wc -l <"$path")
    [ "$lines" -le $most ] || echo "$path has $lines lines; the limit is $most"
done)
report "files are within the line limit" "$too_long"
# Counts the lines between the braces of a function. In clang-format's style a line that ends in ")
# {" begins the function, and "}" in the first column ends it.
report "functions have at most 52 lines" "$(for path in "${sources[@]}"; do
    case $path in test/*) ;; *)
        awk -v path="$path" '/^[A-Za-z_ ].*\) (const )?\{$/ && !open { open = FNR }
            /^}/ && open { if (FNR - open - 1 > 52) print path ":" open ": " FNR - open - 1 " lines" }
            /^}/ { open = 0 }' "$path" ;;
    esac
done)"
# Other versions of clang-format format some lines differently.
if command -v clang-format-14 >/dev/null; then
    report "sources are formatted with clang-format 14" "$(printf '%s\0' "${sources[@]}" |
        xargs -0 -n 60 clang-format-14 --dry-run 2>&1 | grep 'warning:')"
else
    echo "skip clang-format: clang-format-14 is not installed"
fi
report "no tabs in sources" "$(grep -nP '\t' "${sources[@]}" /dev/null)"
report "no trailing whitespace" "$(grep -nE '[[:space:]]+$' "${sources[@]}" /dev/null)"
report "headers begin with #pragma once" "$(of_kind '\.h$' | while IFS= read -r path; do
    grep -q '^#pragma once$' "$path" || echo "$path"
done)"
report "source files begin with a comment" "$(for path in "${sources[@]}"; do
    head -n 1 "$path" | grep -qE '^(//|/\*)' || echo "$path"
done)"

# If a header says "Included by a.c and b.h.", both must include it. If the sentence ends in "only",
# no other file may include it.
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
report "Included by comments of headers are accurate" "$untrue"

# --- columns -----------------------------------------------------------------------------------
# Markdown and comments have at most 100 columns, code has at most 110. Exceptions: Markdown tables,
# code blocks and lines with a link; in scripts, quoted text of more than 40 columns, lines of
# Megatron-LM's log, shellcheck directives and input text of the tokenizer reference; in the
# Makefile, messages.
wide() { # COLUMNS FILES...: prints lines that are longer
    LC_ALL=C.UTF-8 grep -nE "^.{$(($1 + 1))}" /dev/null "${@:2}"
}
unbroken="'[^']{40,}'|\"[^\"]{40,}\"|^[^:]*:[0-9]+: *# shellcheck | iteration +[0-9]+/ "
unbroken+="|^dev/ref/make_tokenizer_golden.py:"
mapfile -t prose < <(of_kind '\.md$')
mapfile -t scripted < <(printf '%s\n' "${scripts[@]}" "${python[@]}" | sort -u)
report "documents have at most 100 columns" "$(wide 100 "${prose[@]}" | grep -vE '^[^:]*:[0-9]+:(\||    )|\]\(')"
report "comments have at most 100 columns" "$(wide 100 "${sources[@]}" | grep -E '^[^:]*:[0-9]+: *//'
    wide 100 Makefile "${scripted[@]}" | grep -E '^[^:]*:[0-9]+: *#' | grep -vE "$unbroken")"
report "code has at most 110 columns" "$(wide 110 "${sources[@]}"
    wide 110 Makefile | grep -vE '\$\((error|info) '
    wide 110 "${scripted[@]}" | grep -vE "$unbroken")"

# --- one memory plan ---------------------------------------------------------------------------
# device_alloc counts device memory; only device.cu may call the driver.
allocations=$(grep -nE 'cudaMalloc(Async|Managed|Pitch|FromPoolAsync)? *\(' "${sources[@]}" /dev/null)
report "GPU memory is allocated in one place" "$(grep -vE '^(llmc/cuda/device\.cu:|$)' <<<"$allocations")"

# --- paths and unfinished work -----------------------------------------------------------------
# The patterns are written such that they do not match this file. Tests may use optional data in a
# directory next to the repository.
beside='\.\./shared'
one_machine="(^|[^A-Za-z0-9_.])/(wor[k]|roo[t]|hom[e])/|$beside/spe[c]"
report "no paths of one machine" "$(grep -nIE "$one_machine" "${files[@]}" /dev/null)"
beside_tests=$(grep -lIE "$beside/data" "${files[@]}" /dev/null | grep -vE '^(test|dev/ref)/')
report "only tests use data outside the repository" "$beside_tests"
mapfile -t programs < <(printf '%s\n' "${sources[@]}" | grep -vE '^test/')
shells='\b(system|popen|wordexp|exec[lv]p?e?|posix_spawnp?) ?\('
report "programs start no shell" "$(grep -nE "$shells" "${programs[@]}" /dev/null)"
report "no markers of unfinished work" "$(grep -nIwE 'TOD[O]|FIXM[E]|XX[X]' "${sources[@]}" /dev/null)"

# --- scripts -----------------------------------------------------------------------------------
report "scripts are executable" "$(for path in ${scripts[@]+"${scripts[@]}"}; do
    case $path in test/*) continue ;; esac
    if head -n 1 "$path" | grep -q '^#!' && [ ! -x "$path" ]; then echo "$path"; fi
done)"
report "scripts parse" "$(for path in ${scripts[@]+"${scripts[@]}"}; do bash -n "$path" 2>&1; done)"

# --- documents ---------------------------------------------------------------------------------
# The map in CONTRIBUTING has lines "    path   description".
map=$(sed -n '/^## Map/,/^## /p' CONTRIBUTING.md | grep -E '^    [A-Za-z.]' | awk '{ print $1 }')
report "CONTRIBUTING has a map" "$([ "$(wc -l <<<"$map")" -ge 10 ] || echo "fewer than ten lines")"
report "paths of the map exist" "$(for path in $map; do
    [ -e "$path" ] || echo "$path does not exist"
done)"
folders=$(printf '%s\n' "${files[@]}" | grep / | cut -d / -f 1 | sort -u | grep -v '^\.'
    printf '%s\n' "${files[@]}" | grep -oE '^llmc/[a-z0-9_]+/' | sort -u | sed 's,/$,,')
report "the map names every directory and module" "$(while IFS= read -r folder; do
    grep -qE "^$folder/" <<<"$map" || echo "$folder/"
done <<<"$folders")"
# The section "Files" must name every source file. A header and a .c or .cu of the same name count
# as one.
report "CONTRIBUTING names every source file" "$(printf '%s\n' "${sources[@]}" |
    grep -E '^(llmc|sdp4bit|dev/convert|dev/data|dev/lib)/|^(dev/)?[^/]+$' | while IFS= read -r path; do
    stem=${path##*/}
    grep -qE "[\`/]${stem%.*}\.[a-z]" CONTRIBUTING.md || echo "$path"
done)"
report "the README has at most 250 lines" "$([ "$(wc -l <README.md)" -le 250 ] || wc -l README.md)"
# Paths in backticks and targets of links must exist.
paths=$(grep -ohE '`(llmc|sdp4bit|dev|docs|scripts|configs|test)/[A-Za-z0-9_./]+`' "${prose[@]}" |
    tr -d '`' | sort -u)
report "paths in documents exist" "$(for path in $paths; do [ -e "$path" ] || echo "$path"; done)"
report "link targets in documents exist" "$(for page in "${prose[@]}"; do
    grep -oE '\]\([^)#:]+' "$page" | cut -c 3- | while IFS= read -r target; do
        [ -e "$(dirname "$page")/$target" ] || echo "$page: $target"
    done
done)"
report "tables in documents are complete" "$(test/unit/documents.py tables "${prose[@]}" 2>&1)"
report "code in documents follows an empty line" "$(test/unit/documents.py code "${prose[@]}" 2>&1)"
report "links to headings match a heading" "$(test/unit/documents.py anchors "${prose[@]}" 2>&1)"
picture=$(mktemp)
dev/bench/step_time_picture.py dev/bench/results/comm_2gpu.json "$picture"
report "the README's picture matches the measurements" "$(cmp docs/step_time.svg "$picture" 2>&1)"
rm -f "$picture"
program=${BUILD:-build}/train_gpt_cpu
if [ -x "$program" ]; then
    known=$({
        echo --allow-run-as-root --oversubscribe --bind-to --gpus-per-task # of mpirun and srun
        echo --muon-use-nesterov # of other versions of Megatron-LM
        "$program" --help
        "${BUILD:-build}/preprocess_data" --help
        "${BUILD:-build}/convert_checkpoint" --help
        "${BUILD:-build}/generate_cpu" --help
        for helps in dev/compare_logs dev/data/*.sh dev/bench/comm.sh dev/experiments/local_steps_model \
            scripts/{quickstart,run_until_done,test}.sh; do
            "$helps" --help
        done
        for verb in run base fork report; do dev/experiments/study "$verb" --help; done
    } 2>&1)
    flags=$(grep -ohE -- '`--[a-z][a-zA-Z_-]+' "${prose[@]}" | tr -d '`' | sort -u)
    report "flags in documents exist" "$(while IFS= read -r flag; do
        grep -qF -- "$flag" <<<"$known" || echo "$flag"
    done <<<"$flags")"
else
    echo "skip flags in documents exist: $program is not built"
fi
[ $failures = 0 ]
