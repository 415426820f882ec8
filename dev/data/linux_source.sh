#!/usr/bin/env bash
# Creates a large corpus from a Debian or Ubuntu mirror: the source code and documentation of the
# Linux kernel, as Megatron-LM shards with one document per text file. Linux 6.1 has 946 MB of text
# (458 M GPT-2 tokens).
#
#   dev/data/linux_source.sh [--output-prefix PATH] [--max-mb N] [--vocab FOLDER] [--workers N]
#                            [--tokenizer-type TYPE] [--work FOLDER] [--deb FILE]
#
#   --output-prefix   the shard is PATH_text_document.bin and .idx (default data/linux)
#   --max-mb          use only the first N MB of text
#   --vocab           folder with vocab.json and merges.txt (default data/gpt2)
#   --tokenizer-type  GPT2BPETokenizer or Byte (default: GPT2BPETokenizer if the vocabulary exists,
#                     otherwise Byte)
#   --workers         number of threads (default: one per CPU)
#   --work            directory for the package and its contents, which take 1.7 GB (default
#                     data/linux_source)
#   --deb             use a local linux-source-*.deb, for machines without a mirror
#
# Duplicate files are dropped, and documents are sorted by MD5 sum. The order is therefore the same
# on every machine and as good as random: the validation split (--split) resembles the training
# split, and --max-mb takes a random sample. Binary files and files above 1 MiB, mostly tables of
# register names, are skipped. BUILD is the directory of preprocess_data (default build).
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD build=${BUILD:-}
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/data/linux_source.sh "$@"
set -euo pipefail
root=$PWD build=${build:-$PWD/build}
cd "$caller" # relative paths start at the caller's folder
output=$root/data/linux max_mb=0 vocab=$root/data/gpt2 type="" workers="" deb=""
work=$root/data/linux_source

flags="--output-prefix --max-mb --vocab --tokenizer-type --workers --work --deb --help"
while [ $# -gt 0 ]; do
    case $1 in
        --output-prefix | --max-mb | --vocab | --tokenizer-type | --workers | --work | --deb)
            [ $# -ge 2 ] || die 2 "$1 needs a value" ;;&
        --output-prefix) output=$2 ;;
        --max-mb) max_mb=$2 ;;
        --vocab) vocab=$2 ;;
        --tokenizer-type) type=$2 ;;
        --workers) workers=$2 ;;
        --work) work=$2 ;;
        --deb) deb=$2 ;;
        *) die 2 "unknown flag $1; known are $flags" ;;
    esac
    shift 2
done
[[ $max_mb =~ ^[0-9]+$ ]] || die 2 "--max-mb $max_mb is not an integer"
if [ -z "$type" ]; then
    type=Byte
    [ ! -f "$vocab/vocab.json" ] || type=GPT2BPETokenizer
fi
tokenizer=(--tokenizer-type "$type")
[ "$type" != GPT2BPETokenizer ] ||
    tokenizer+=(--vocab-file "$vocab/vocab.json" --merge-file "$vocab/merges.txt")
[ -x "$build/preprocess_data" ] || die 3 "$build/preprocess_data is missing; run make"
for tool in dpkg-deb tar xz md5sum; do
    have_command $tool || die 3 "$tool is missing; apt-get install dpkg tar xz-utils coreutils"
done
mkdir -p "$work" "$(dirname "$output")"

# Prints the name of the newest linux-source-VERSION package, on which linux-source depends.
package_name() {
    apt-cache depends linux-source 2>/dev/null | awk '/Depends: linux-source-/ { print $2; exit }'
}

# Downloads the package and sets $deb to its file.
download() {
    have_command apt-get ||
        die 3 "apt-get is missing; download a linux-source-*.deb elsewhere and pass it with --deb"
    local package have
    package=$(package_name)
    if [ -z "$package" ]; then
        echo "apt has no linux-source package; updating its lists"
        if [ "$(id -u)" -eq 0 ]; then apt-get -q update; else sudo apt-get -q update; fi ||
            die 3 "apt-get update failed; check the mirror"
        package=$(package_name)
    fi
    [ -n "$package" ] ||
        die 3 "no mirror in apt's sources has linux-source; add Debian's main or Ubuntu's main"
    newest() { find "$work" -maxdepth 1 -name "${package}_*.deb" | LC_ALL=C sort | tail -n 1; }
    have=$(newest)
    if [ -z "$have" ]; then
        echo "downloading $package"
        # Download to a separate directory, so that a later call does not use an incomplete package.
        rm -rf "$work/download"
        mkdir "$work/download"
        (cd "$work/download" && apt-get -q -o APT::Sandbox::User=root download "$package") ||
            die 3 "apt-get download $package failed; check the mirror and the disk"
        mv "$work/download/"*.deb "$work/"
        rmdir "$work/download"
        have=$(newest)
    fi
    deb=$have
}

# Unpacks the source. The package contains a compressed tar file, which is unpacked through a pipe
# to save disk space.
unpack() {
    local name decompress
    name=$(dpkg-deb --fsys-tarfile "$deb" | tar -tv |
        awk '$1 ~ /^-/ && $NF ~ /linux-source-[^\/]*\.tar\.[a-z0-9]+$/ { print $NF }')
    case $name in
        *.xz) decompress=-J ;;
        *.bz2) decompress=-j ;;
        *.gz) decompress=-z ;;
        *.zst) decompress=--zstd ;;
        *) die 5 "$deb has no linux-source-*.tar file; use a linux-source-VERSION package" ;;
    esac
    echo "unpacking $name of $(basename "$deb")"
    rm -rf "$work/source"
    mkdir "$work/source"
    dpkg-deb --fsys-tarfile "$deb" | tar -xO "$name" |
        tar -x "$decompress" -C "$work/source" --no-same-owner ||
        die 3 "unpacking failed; check the disk ($work needs 1.7 GB)"
    basename "$deb" >"$work/source.of"
}

# Lists non-empty text files up to 1 MiB without duplicates, sorted by MD5 sum. A file with a NUL
# byte counts as binary.
list_documents() {
    (cd "$work/source" && find . -type f -size -2049 -print0 | LC_ALL=C xargs -0 grep -lI -Z '' |
        xargs -0 md5sum) | LC_ALL=C sort |
        awk '!seen[$1]++ { print substr($0, 35) }' | sed "s|^\./|$work/source/|" |
        xargs -r -d '\n' stat -c '%s %n' |
        awk -v left="$max_mb" 'BEGIN { all = !left; left *= 1e6 }
            (left -= $1) >= 0 || all { print substr($0, length($1) + 2) }'
}

[ -n "$deb" ] || download
[ -f "$deb" ] || die 5 "$deb is missing; check --deb"
[ "$(cat "$work/source.of" 2>/dev/null)" = "$(basename "$deb")" ] || unpack
list_documents >"$work/documents"
echo "$(wc -l <"$work/documents") documents, tokenizer $type"
"$build/preprocess_data" --text --input-list "$work/documents" "${tokenizer[@]}" --append-eod \
    ${workers:+--workers "$workers"} --log-interval 20000 --output-prefix "$output"
echo "use --data-path ${output}_text_document"
