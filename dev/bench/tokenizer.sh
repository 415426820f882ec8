#!/usr/bin/env bash
# Measures the tokenizing speed of preprocess_data and of Hugging Face's `tokenizers` on the same
# files with the same number of cores.
#
#   dev/bench/tokenizer.sh [--vocab FOLDER] [--max-mb N] [--threads "1 2"] [--styles "gpt2 llama3"]
#                          [--model PATH]
#
# FOLDER contains vocab.json and merges.txt (default data/gpt2, the output of
# dev/data/get_gpt2_vocab.sh). The style gpt2 uses them with GPT2BPETokenizer. The other styles
# (llama3 qwen2 o200k) use a tokenizer.json with the pattern, normalizer and flags of
# test/golden/tokenizer_json/STYLE, but the GPT-2 vocabulary. --model adds a tokenizer.json or its
# folder.
#
# The corpora consist of files on this machine, without duplicates: unpacked manual pages (English
# prose with markup) and C headers. Each file is a document. preprocess_data is timed from the first
# read to the finished shard on disk. For `tokenizers` only the encode calls are timed, in batches
# of 256 documents that are already in memory. Loading the vocabulary is excluded. The result is the
# best of three runs. BUILD is the folder of the program, PYTHON an interpreter with the
# `tokenizers` package.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/tokenizer.sh "$@"
set -euo pipefail
build=${BUILD:-build} python=${PYTHON:-python3}
vocab=data/gpt2 max_mb=50 threads="1 2" styles="gpt2 llama3 qwen2 o200k" model=""
while [ $# -gt 0 ]; do
    case $1 in
        --vocab) vocab=$2 ;;
        --max-mb) max_mb=$2 ;;
        --threads) threads=$2 ;;
        --styles) styles=$2 ;;
        --model) model=$2 ;;
        *) die 2 "unknown flag $1; use --vocab --max-mb --threads --styles --model" ;;
    esac
    shift 2
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# first_bytes MB: reads a list of files and prints its beginning, up to MB megabytes of files.
first_bytes() {
    xargs -r -d '\n' stat -c '%s %n' |
        awk -v left="$1" 'BEGIN { left *= 1e6 } (left -= $1) >= 0 { print substr($0, length($1) + 2) }'
}
# Reads a list of files, drops duplicates by content, and limits the rest to max_mb.
bounded() {
    xargs -r -d '\n' md5sum | awk '!seen[$1]++ { print substr($0, 35) }' | first_bytes "$max_mb"
}
mkdir "$work/man"
# Unpacked manual pages are about four times as large. Unpack 1.5 times as many as needed, because
# duplicates are dropped.
find /usr/share/man/man[1-8] -type f -name '*.gz' | LC_ALL=C sort |
    first_bytes "$(awk -v most="$max_mb" 'BEGIN { print most * 1.5 / 4 }')" |
    while read -r page; do gzip -dc "$page" >"$work/man/$(basename "$page" .gz)"; done
find "$work/man" -type f | LC_ALL=C sort | bounded >"$work/man.list"
find /usr/include -type f -name '*.h' | LC_ALL=C sort | bounded >"$work/headers.list"

# Writes the tokenizer.json of a style.
cat >"$work/style.py" <<'END'
import json, sys
style, folder, out = sys.argv[1:]
whole = json.load(open(f"test/golden/tokenizer_json/{style}/tokenizer.json", encoding="utf-8"))
lines = open(folder + "/merges.txt", encoding="utf-8").read().splitlines()
whole["model"]["vocab"] = json.load(open(folder + "/vocab.json", encoding="utf-8"))
whole["model"]["merges"] = [line for line in lines if not line.startswith("#version")]
end = dict(whole["added_tokens"][0], id=50256, content="<|endoftext|>")
whole.update(post_processor=None, added_tokens=[end])
json.dump(whole, open(out, "w", encoding="utf-8"))
END
cat >"$work/peer.py" <<'END'
import os, sys, time
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers
folder, listing, model = sys.argv[1:]
if model:
    tokenizer = Tokenizer.from_file(os.path.join(model, "tokenizer.json") if os.path.isdir(model) else model)
else:
    tokenizer = Tokenizer(models.BPE.from_file(folder + "/vocab.json", folder + "/merges.txt"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
texts = [open(path, "rb").read().decode("utf-8", "replace") for path in open(listing).read().splitlines()]
megabytes = sum(len(text.encode()) for text in texts) / 1e6
encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
best = 0.0
for _ in range(3):
    start, tokens = time.perf_counter(), 0
    for i in range(0, len(texts), 256):
        tokens += sum(len(e.ids) for e in encode(texts[i:i + 256], add_special_tokens=False))
    best = max(best, megabytes / (time.perf_counter() - start))
print(f"{best:.1f} {tokens}")
END

ours() { # LIST THREADS MODEL (may be empty): prints "MB/s tokens" of preprocess_data
    local best=0 tokens=0 line rate which=(--vocab-file "$vocab/vocab.json" --merge-file "$vocab/merges.txt")
    [ -z "$3" ] || which=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$3"
        --tokenizer-hf-no-include-special-tokens)
    for _ in 1 2 3; do
        line=$(taskset -c "0-$(($2 - 1))" "$build/preprocess_data" --text --input-list "$1" \
            "${which[@]}" --workers "$2" \
            --log-interval 1000000000 --output-prefix "$work/out" 2>&1 | grep '^Wrote')
        rate=$(sed -E 's/.*\(([0-9.]+) MB\/s\).*/\1/' <<<"$line")
        tokens=$(sed -E 's/.* ([0-9]+) tokens.*/\1/' <<<"$line")
        best=$(awk -v a="$best" -v b="$rate" 'BEGIN { print (a > b ? a : b) }')
    done
    echo "$best $tokens"
}
peer() { # the same for the `tokenizers` package
    taskset -c "0-$(($2 - 1))" env RAYON_NUM_THREADS="$2" TOKENIZERS_PARALLELISM=true \
        "$python" "$work/peer.py" "$vocab" "$1" "$3"
}

have_peer=0
"$python" -c 'import tokenizers' 2>/dev/null && have_peer=1
[ $have_peer = 1 ] || echo "# $python has no tokenizers package: no comparison" >&2
processor=$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)
echo "# $processor, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
[ $have_peer = 0 ] ||
    echo "# tokenizers $("$python" -c 'import tokenizers; print(tokenizers.__version__)');" \
        "$("$build/preprocess_data" --version)"
[ -z "$model" ] || styles+=" $model"
printf '%-8s %-8s %8s %8s %10s %16s %16s\n' corpus style MB threads tokens preprocess_data tokenizers
row() { # corpus, style, threads
    local path="" name=$2 mb rate tokens peer_rate=-
    case $2 in
        gpt2) ;;
        llama3 | qwen2 | o200k)
            path=$work/$2.json
            "$python" "$work/style.py" "$2" "$vocab" "$path"
            ;;
        *) path=$2 name=model ;;
    esac
    mb=$(xargs -r -d '\n' stat -c %s <"$work/$1.list" | awk '{ n += $1 } END { printf "%.1f", n / 1e6 }')
    read -r rate tokens < <(ours "$work/$1.list" "$3" "$path")
    local peer_tokens=$tokens
    [ $have_peer = 0 ] || read -r peer_rate peer_tokens < <(peer "$work/$1.list" "$3" "$path")
    printf '%-8s %-8s %8s %8s %10s %11s MB/s %11s MB/s\n' "$1" "$name" "$mb" "$3" "$tokens" "$rate" "$peer_rate"
    [ "$tokens" = "$peer_tokens" ] || die 1 "token counts differ: $tokens and $peer_tokens"
}
for style in $styles; do
    for corpus in man headers; do
        for n in $threads; do row $corpus "$style" "$n"; done
    done
done
