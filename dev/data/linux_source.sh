#!/usr/bin/env bash
# Makes a large corpus from a Debian or Ubuntu mirror: the Linux kernel's source, code
# and documentation, as Megatron shards with one document per text file. Linux 6.1: 78 k documents,
# 946 MB of text, 458 M GPT-2 tokens.
#
#   dev/data/linux_source.sh [--output-prefix PATH] [--max-mb N] [--vocab FOLDER] [--workers N]
#                            [--tokenizer-type TYPE] [--work FOLDER] [--deb FILE]
#
#   --output-prefix   the shard is PATH_text_document.bin and .idx (default data/linux)
#   --max-mb          use the first N MB of text only
#   --vocab           folder of vocab.json and merges.txt (default data/gpt2)
#   --tokenizer-type  GPT2BPETokenizer or Byte (default: the first if the vocabulary is there,
#                     otherwise Byte)
#   --workers         threads (default: one per CPU)
#   --work            directory for the package and its contents (default data/linux_source), 1.7
#                     GB
#   --deb             use a local linux-source-*.deb, for machines without a mirror
#
# Documents are sorted by MD5 sum, and duplicate files are dropped, so that the order is the
# same on every machine and well mixed: the validation split (--split) resembles the rest,
# and --max-mb takes a random sample. Files above 1 MiB (tables of register names) and binaries are
# skipped. BUILD is the directory of preprocess_data (default build).
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD build=${BUILD:-}
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/data/linux_source.sh "$@"
set -euo pipefail
root=$PWD build=${build:-$PWD/build}
cd "$caller" # relative paths are the caller's
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

# The newest linux-source-VERSION package, which the package linux-source depends on.
package_name() {
    apt-cache depends linux-source 2>/dev/null | awk '/Depends: linux-source-/ { print $2; exit }'
}

# Sets $deb to the name of the .deb.
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
        # In a separate directory, so that a broken download is never mistaken for the package.
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

# The package contains a compressed tar file. A pipe unpacks both, so that only the source uses disk
# space.
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

# Lists non-empty text files up to 1 MiB, without duplicates, sorted by MD5. A file is binary if it
# contains a NUL byte.
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
