#!/usr/bin/env bash
# Downloads GPT-2's vocab.json and merges.txt (for --vocab-file and --merge-file) and checks that
# they are the originals.
#
#   dev/data/get_gpt2_vocab.sh [FOLDER]        # default data/gpt2
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/data/get_gpt2_vocab.sh "$@"
set -euo pipefail
[ $# -le 1 ] || die 2 "expected at most one directory; see dev/data/get_gpt2_vocab.sh --help"
case ${1:-} in -*) die 2 "unknown flag $1; see dev/data/get_gpt2_vocab.sh --help" ;; esac
folder=${1:-$PWD/data/gpt2}
cd "$caller" # relative paths start at the caller's folder

# fetch FILE SHA256 URL...: downloads FILE from the first URL that works. Keeps an existing file
# with the right checksum.
fetch() {
    local file=$folder/$1 sum=$2 address
    shift 2
    if [ -f "$file" ] && sha256sum --status -c - <<<"$sum  $file"; then
        echo "have $file"
        return
    fi
    for address in "$@"; do
        echo "downloading $address"
        if curl --fail --location --silent --show-error --retry 3 --output "$file.part" "$address"; then
            if sha256sum --status -c - <<<"$sum  $file.part"; then
                mv "$file.part" "$file"
                return
            fi
            echo "not GPT-2's file (its SHA-256 differs)" >&2
        fi
        rm -f "$file.part"
    done
    die 3 "could not download $file; check the network, or copy it from another machine"
}

make_folder "$folder"
have_command curl || die 3 "curl is missing; apt-get install curl"
fetch vocab.json 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783 \
    https://huggingface.co/openai-community/gpt2/resolve/main/vocab.json \
    https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json
fetch merges.txt 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5 \
    https://huggingface.co/openai-community/gpt2/resolve/main/merges.txt \
    https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt
echo "use --vocab-file $folder/vocab.json --merge-file $folder/merges.txt"
