#!/usr/bin/env bash
# Creates a corpus of English prose from packages of a Debian or Ubuntu mirror: handbooks, manuals,
# dictionaries and books, as Megatron-LM shards. Debian 12 gives 135 MB of text (34 M GPT-2 tokens).
#
#   dev/data/prose.sh [--output-prefix PATH] [--vocab FOLDER] [--workers N] [--tokenizer-type TYPE]
#                     [--work FOLDER] [--packages "NAME ..."]
#
#   --output-prefix   the shard is PATH_text_document.bin and .idx (default data/prose)
#   --vocab           folder with vocab.json and merges.txt (default data/gpt2)
#   --tokenizer-type  GPT2BPETokenizer or Byte (default: GPT2BPETokenizer if the vocabulary exists,
#                     otherwise Byte)
#   --workers         number of threads (default: one per CPU)
#   --work            directory for packages and their contents, which take 2 GB (default
#                     data/prose_packages)
#   --packages        replaces the list of packages below
#
# dev/data/prose_filter.py extracts the sentences and drops duplicate paragraphs. Packages that the
# mirror lacks are skipped with a message. BUILD is the directory of preprocess_data (default
# build).
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD build=${BUILD:-}
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/data/prose.sh "$@"
set -euo pipefail
root=$PWD build=${build:-$PWD/build}
cd "$caller" # relative paths start at the caller's folder
output=$root/data/prose vocab=$root/data/gpt2 type="" workers="" work=$root/data/prose_packages

# Books and handbooks, then dictionaries, then manuals.
packages="anarchism debian-handbook debian-history debian-reference-en developers-reference
abs-guide harden-doc installation-guide-amd64 maint-guide debian-policy debian-faq aptitude-doc-en
fortunes dict-gcide dict-wn dict-foldoc dict-jargon dict-devil
gnome-user-docs gnucash-docs gimp-help-en libreoffice-help-en-us grass-doc
perl-doc python3.11-doc python-django-doc racket-doc rust-doc erlang-doc octave-doc maxima-doc r-doc-html
apache2-doc bind9-doc exim4-doc-html git-doc lilypond-doc-html postgis-doc postgresql-doc-15
slurm-wlm-doc sqlite3-doc zsh-doc autoconf-doc gnu-standards"

flags="--output-prefix --vocab --tokenizer-type --workers --work --packages --help"
while [ $# -gt 0 ]; do
    case $1 in
        --output-prefix | --vocab | --tokenizer-type | --workers | --work | --packages)
            [ $# -ge 2 ] || die 2 "$1 needs a value" ;;&
        --output-prefix) output=$2 ;;
        --vocab) vocab=$2 ;;
        --tokenizer-type) type=$2 ;;
        --workers) workers=$2 ;;
        --work) work=$2 ;;
        --packages) packages=$2 ;;
        *) die 2 "unknown flag $1; known are $flags" ;;
    esac
    shift 2
done
if [ -z "$type" ]; then
    type=Byte
    [ ! -f "$vocab/vocab.json" ] || type=GPT2BPETokenizer
fi
tokenizer=(--tokenizer-type "$type")
[ "$type" != GPT2BPETokenizer ] ||
    tokenizer+=(--vocab-file "$vocab/vocab.json" --merge-file "$vocab/merges.txt")
[ -x "$build/preprocess_data" ] || die 3 "$build/preprocess_data is missing; run make"
for tool in dpkg-deb python3; do
    have_command $tool || die 3 "$tool is missing; apt-get install dpkg python3"
done
mkdir -p "$work/debs" "$work/unpacked" "$(dirname "$output")"

# newest PACKAGE: prints the newest downloaded .deb of the package, or nothing.
newest() { find "$work/debs/" -maxdepth 1 -name "${1}_*.deb" | LC_ALL=C sort | tail -n 1; }

# Downloads to a separate directory, so that a later call does not use an incomplete package.
download() { # PACKAGE
    have_command apt-get || return 1
    rm -rf "$work/download"
    mkdir "$work/download"
    (cd "$work/download" && apt-get -q -o APT::Sandbox::User=root download "$1") >/dev/null 2>&1 || return 1
    mv "$work/download/"*.deb "$work/debs/"
}

found=0
for package in $packages; do
    if [ -z "$(newest "$package")" ] && ! download "$package"; then
        say "$package: not available, skipped"
        continue
    fi
    rm -rf "${work:?}/unpacked/$package"
    dpkg-deb -x "$(newest "$package")" "$work/unpacked/$package" ||
        die 3 "$(newest "$package") cannot be unpacked; check the disk, or remove the file"
    found=$((found + 1))
done
[ $found != 0 ] || die 3 "none of the packages is available; check apt's sources and run apt-get update"
say "$found packages, tokenizer $type"
"$root/dev/data/prose_filter.py" "$work/unpacked" >"$work/prose.jsonl"
"$build/preprocess_data" --input "$work/prose.jsonl" "${tokenizer[@]}" --append-eod \
    ${workers:+--workers "$workers"} --log-interval 20000 --output-prefix "$output"
say "use --data-path ${output}_text_document"
