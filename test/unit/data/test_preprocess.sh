#!/usr/bin/env bash
# Tests the programs preprocess_data and merge_datasets: exact output bytes, error messages and exit
# codes. BUILD is the directory of the programs. Prints "ok <name>" or "not ok <name>" lines.
set -u
cd "$(dirname "$0")/../../.." || exit 1
build=${BUILD:-build}
golden=test/golden/tokenizer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

report() { # NAME EXIT-STATUS
    if [ "$2" -eq 0 ]; then echo "ok $1"; else echo "not ok $1"; failed=$((failed + 1)); fi
}
pre() { "$build/preprocess_data" "$@" 2>"$work/err"; }
small() { pre --vocab-file "$golden/vocab.json" --merge-file "$golden/merges.txt" "$@"; }
hex() { od -An -v -tx1 "$1" | tr -d ' \n'; }
same_shard() { cmp -s "$1.bin" "$2.bin" && cmp -s "$1.idx" "$2.idx"; }
clean() { ! compgen -G "$work/*.tmp" >/dev/null; } # no temporary files are left

# refused NAME EXIT-CODE TEXT COMMAND...: expects the exit code, one line on stderr that contains
# the text, no output and no temporary files.
refused() {
    local name=$1 code=$2 text=$3
    shift 3
    "$@" >/dev/null
    local rc=$? lines
    lines=$(grep -c '^error: ' "$work/err")
    [ "$rc" -eq "$code" ] && [ "$lines" -eq 1 ] && grep -qF -- "$text" "$work/err" && clean &&
        [ ! -e "$work/bad_text_document.idx" ] && [ ! -e "$work/bad_text_document.bin" ]
    local good=$?
    [ "$good" -eq 0 ] || { echo "# exit $rc, wanted $code and '$text':"; sed 's/^/# /' "$work/err"; }
    report "error for $name" "$good"
}

# --- the format: documents [5,6,50256], [], [7,50256] have the same bytes as from Megatron-LM ---
# A vocabulary of GPT-2's size without merges: 256 bytes in GPT-2's order, unused tokens and the
# end-of-document token.
awk 'BEGIN { printf "{"
    n = 0
    for (c = 33; c < 324; c++)
        if (c < 127 || (c > 160 && c != 173 && c < 256) || c > 255) printf "\"\\u%04x\": %d, ", c, n++
    for (; n < 50256; n++) printf "\"filler %d\": %d, ", n, n
    printf "\"<|endoftext|>\": 50256}\n" }' >"$work/wide.json"
printf '#version: 0.2\n' >"$work/none.txt"
printf '%s\n' '{"text":"&'"'"'"}' '{"text":""}' '{"text":"("}' >"$work/golden.jsonl"
pre --input "$work/golden.jsonl" --vocab-file "$work/wide.json" --merge-file "$work/none.txt" --append-eod \
    --workers 1 --output-prefix "$work/golden"
report "golden run" $?
[ "$(hex "$work/golden_text_document.bin")" = 0500060050c4070050c4 ]
report "golden .bin" $?
idx=4d4d4944494458000001000000000000000802000000000000000400000000000000
idx+=0300000002000000000000000000000006000000000000000000000000000000
idx+=010000000000000001000000000000000200000000000000
[ "$(hex "$work/golden_text_document.idx")" = $idx ]
report "golden .idx" $?

# --- the same bytes for any number of workers; several inputs; list of inputs; standard input ---
# The input has several megabytes, so all workers get blocks. Lines have many lengths; some are
# empty, some are not ASCII, and one is longer than a block.
awk 'BEGIN { srand(7); split("the of and loss gradient  training\\n\\t can\\u0027t 12 node, (weights) \\u00e9t\\u00e9 \\ud83d\\ude00 \\ud83d 中文", w, " ")
    for (i = 0; i < 6000; i++) { s = ""; k = i % 50 == 0 ? 0 : 1 + int(rand() * 200); for (j = 0; j < k; j++) s = s w[1 + int(rand() * 13)] " "
        printf "{\"id\": %d, \"text\": \"%s\", \"meta\": {\"text\": \"no\"}}\n", i, s }
    printf "{\"text\": \""; for (j = 0; j < 300000; j++) printf "long "; printf "\"}\n" }' >"$work/big.jsonl"
for workers in 1 2 5; do
    small --input "$work/big.jsonl" --append-eod --workers $workers --log-interval 1000 \
        --output-prefix "$work/w$workers"
    report "workers $workers" $?
done
grep -qE '^Processed [0-9]+ documents \([0-9.]+ docs/s, [0-9.]+ MB/s\)\. ETA [0-9]+:[0-9]{2}:[0-9]{2}$' \
    "$work/err"
report "progress line with ETA" $?
grep -qE ': 6001 documents \(120 empty\), ' "$work/err"
report "totals count empty documents" $?
surrogates=$(grep -o '\\ud83d ' "$work/big.jsonl" | wc -l)
grep -q "^Replaced $surrogates " "$work/err" && [ "$surrogates" -gt 100 ]
report "lone surrogates are counted" $?
same_shard "$work/w1_text_document" "$work/w2_text_document" &&
    same_shard "$work/w1_text_document" "$work/w5_text_document"
report "same output for 1, 2 and 5 workers" $?
head -n 2500 "$work/big.jsonl" >"$work/a.jsonl"
tail -n +2501 "$work/big.jsonl" | head -c -1 >"$work/b.jsonl" # without the final newline
small --input "$work/a.jsonl" "$work/b.jsonl" --append-eod --workers 2 --output-prefix "$work/two" &&
    same_shard "$work/w1_text_document" "$work/two_text_document"
report "several inputs" $?
printf '%s\n' "$work/a.jsonl" "" "$work/b.jsonl" >"$work/list"
small --input-list "$work/list" --append-eod --workers 2 --output-prefix "$work/list" &&
    same_shard "$work/w1_text_document" "$work/list_text_document"
report "a list of inputs" $?
# A byte-order mark, CR LF and blank lines, as editors on Windows write them.
printf '\xef\xbb\xbf%s\r\n\r\n' "$work/windows.jsonl" >"$work/list"
{ printf '\xef\xbb\xbf'; sed 's/$/\r/' "$work/a.jsonl"; printf '\r\n\n'; } >"$work/windows.jsonl"
small --input "$work/a.jsonl" --append-eod --output-prefix "$work/plain" &&
    small --input-list "$work/list" --append-eod --output-prefix "$work/windows" &&
    same_shard "$work/plain_text_document" "$work/windows_text_document"
report "byte-order marks, CR LF and blank lines" $?
cat "$work/a.jsonl" "$work/b.jsonl" | small --input - --append-eod --workers 2 --output-prefix "$work/pipe" &&
    same_shard "$work/w1_text_document" "$work/pipe_text_document"
report "standard input" $?


# --- common corpus formats: compressed JSON lines, parquet ---
if command -v zstd >/dev/null; then
    zstd -q "$work/a.jsonl" "$work/b.jsonl"
    zstd -dcq "$work/a.jsonl.zst" "$work/b.jsonl.zst" |
        small --input - --append-eod --workers 2 --output-prefix "$work/zstd" &&
        same_shard "$work/w1_text_document" "$work/zstd_text_document"
    report "JSON lines compressed with zstd" $?
else
    echo "skip JSON lines compressed with zstd: zstd is not installed"
fi
PYTHON=${PYTHON:-python3}
parquet() { "$PYTHON" dev/data/parquet_to_jsonl "$@" 2>"$work/err_parquet"; }
if "$PYTHON" -c 'import pyarrow.parquet' 2>/dev/null; then
    "$PYTHON" - "$work" <<'END'
import json, pyarrow, pyarrow.parquet, sys
for part in "ab":
    # Parquet rejects a lone surrogate.
    lines = open(f"{sys.argv[1]}/{part}.jsonl", encoding="utf-8").read().splitlines()
    texts = [json.loads(line)["text"].replace("\ud83d ", "\ufffd ") for line in lines]
    table = pyarrow.table({"id": list(range(len(texts))), "content": texts})
    pyarrow.parquet.write_table(table, f"{sys.argv[1]}/{part}.parquet", row_group_size=1000)
END
    parquet --column content "$work/a.parquet" "$work/b.parquet" |
        small --input - --append-eod --output-prefix "$work/parquet" &&
        same_shard "$work/w1_text_document" "$work/parquet_text_document"
    report "parquet files" $?
    for wrong in "--column id $work/a.parquet" "--column content $work/a.parquet $work/a.jsonl" \
        "$work/a.parquet"; do
        # shellcheck disable=SC2086 # split on purpose
        parquet $wrong >"$work/half.jsonl"
        [ $? -eq 5 ] && [ "$(grep -c '^error: ' "$work/err_parquet")" -eq 1 ] && ! pre --input - \
            --tokenizer-type Byte --output-prefix "$work/bad" <"$work/half.jsonl" &&
            [ ! -e "$work/bad_text_document.idx" ]
        report "parquet_to_jsonl ${wrong//$work\//} is refused, and so is its output" $?
    done
else
    parquet "$work/a.parquet" >"$work/half.jsonl"
    [ $? -eq 3 ] && grep -q 'pip install pyarrow' "$work/err_parquet"
    report "parquet_to_jsonl reports a missing pyarrow" $?
    echo "skip parquet files: $PYTHON has no pyarrow"
fi

# --- merging ---
for part in a b; do small --input "$work/$part.jsonl" --append-eod --output-prefix "$work/part_$part"; done
"$build/merge_datasets" --input "$work/part_a_text_document" "$work/part_b_text_document" \
    --output-prefix "$work/merged" 2>"$work/err" && same_shard "$work/w1_text_document" "$work/merged"
report "merge of two shards equals one run" $?
mkdir "$work/folder"
cp "$work"/part_[ab]_text_document.* "$work/folder"
"$build/merge_datasets" --input "$work/folder" --output-prefix "$work/merged_folder" 2>"$work/err" &&
    same_shard "$work/w1_text_document" "$work/merged_folder"
report "merge of a folder, sorted by name" $?
merge() { "$build/merge_datasets" "$@" 2>"$work/err"; }
refused "merge onto an input" 2 "is one of the inputs" merge --input "$work/folder" \
    --output-prefix "$work/folder/part_a_text_document"
refused "merge of a missing shard" 5 "$work/nothing" merge --input "$work/part_a_text_document" \
    "$work/nothing" --output-prefix "$work/bad_text_document"
awk 'BEGIN { printf "{"; n = 0
    for (c = 33; c < 324; c++)
        if (c < 127 || (c > 160 && c != 173 && c < 256) || c > 255) printf "\"\\u%04x\": %d, ", c, n++
    for (; n < 70000; n++) printf "\"filler %d\": %d, ", n, n
    printf "\"<|endoftext|>\": 70000}\n" }' >"$work/wider.json"
pre --input "$work/golden.jsonl" --vocab-file "$work/wider.json" --merge-file "$work/none.txt" --append-eod \
    --output-prefix "$work/wide"
[ "$(hex "$work/wide_text_document.bin")" = 0500000006000000701101000700000070110100 ]
report "ids of four bytes for a large vocabulary" $?
refused "merge of different dtypes" 5 "dtype" merge --input "$work/golden_text_document" \
    "$work/wide_text_document" --output-prefix "$work/bad_text_document"
refused "merge without input" 2 "--input is missing" merge --output-prefix "$work/bad_text_document"
merge --input "$work/folder" --output-prefix "$work/made/of/merging/x" &&
    same_shard "$work/w1_text_document" "$work/made/of/merging/x"
report "merge into a folder that does not exist yet" $?
refused "merge into a directory that cannot be created" 3 "/proc/nowhere" merge --input "$work/folder" \
    --output-prefix /proc/nowhere/x
refused "merge into a read-only directory" 3 "/proc/x.bin" merge --input "$work/folder" \
    --output-prefix /proc/x
mkdir "$work/taken.idx"
refused "merge onto a directory" 3 "$work/taken.idx" merge --input "$work/folder" \
    --output-prefix "$work/taken"
refused "merge to a directory as output name" 2 "ends in '/'" merge --input "$work/folder" \
    --output-prefix "$work/"

# --- plain text, the byte tokenizer, another key ---
printf 'ab' >"$work/1.txt"
: >"$work/2.txt"
printf 'c\xff\n' >"$work/3.txt"
pre --text --input "$work"/[123].txt --tokenizer-type Byte --append-eod --workers 2 \
    --output-prefix "$work/plain"
report "plain text run" $?
[ "$(hex "$work/plain_text_document.bin")" = 6100620000016300ef00bf00bd000a000001 ]
report "plain text: one document per file, bytes as ids, U+FFFD" $?
grep -q '^Replaced 1 ' "$work/err" && grep -q ': 3 documents (1 empty), 9 tokens' "$work/err"
report "plain text totals" $?
printf '{"text":"no","content":"ab"}\n' >"$work/key.jsonl"
pre --input "$work/key.jsonl" --json-keys content --tokenizer-type Byte --output-prefix "$work/key" &&
    [ "$(hex "$work/key_content_document.bin")" = 61006200 ]
report "another key, no end of document" $?
pre --text --input "$work/2.txt" --tokenizer-type Byte --output-prefix "$work/empty" &&
    [ "$(stat -c %s "$work/empty_text_document.idx")" -eq 50 ]
report "an empty text is a document" $?
pre --input "$work/key.jsonl" --json-keys content --tokenizer-type Byte --keep-newlines --partitions 1 \
    --keep-sequential-samples --dataset-impl mmap --output-prefix "$work/flags"
report "Megatron's flags that change nothing" $?

# --- Hugging Face's tokenizer.json: <|begin_of_text|> of its post_processor is 0x22e, EOD is 0x22f
printf '%s\n' '{"text":"!"}' '{"text":""}' >"$work/json.jsonl"
json() { pre --input "$work/json.jsonl" --tokenizer-type HuggingFaceTokenizer --append-eod "$@"; }
json --tokenizer-model test/golden/tokenizer_json/llama3 --output-prefix "$work/json" &&
    [ "$(hex "$work/json_text_document.bin")" = 2e0200002f022e022f02 ]
report "tokenizer.json: first token, text, end of document" $?
json --tokenizer-model test/golden/tokenizer_json/llama3/tokenizer.json --output-prefix "$work/json" \
    --tokenizer-hf-no-include-special-tokens && [ "$(hex "$work/json_text_document.bin")" = 00002f02 ] &&
    grep -q ': 2 documents (1 empty)' "$work/err"
report "tokenizer.json: without its first token, an empty text is an empty document" $?
json --tokenizer-model test/golden/tokenizer_json/llama3 --tokenizer-eod '<|eot_id|>' \
    --tokenizer-hf-no-include-special-tokens --output-prefix "$work/json" &&
    [ "$(hex "$work/json_text_document.bin")" = 00003002 ]
report "tokenizer.json: another end of document" $?
noted() { [ "$(grep -c 'have no effect' "$work/err")" -eq "$1" ]; }
pre --input "$work/key.jsonl" --json-keys content --tokenizer-type Byte --merge-file "$golden/merges.txt" \
    --output-prefix "$work/flags" && noted 1 &&
    grep -q '^--vocab-file and --merge-file have no effect: only GPT2BPETokenizer uses them$' "$work/err"
report "an unused vocabulary is reported" $?
small --input "$work/key.jsonl" --json-keys content --output-prefix "$work/flags" && noted 0
report "a used vocabulary is not reported" $?
pre --input "$work/key.jsonl" --json-keys content --tokenizer-type Byte --output-prefix "$work/made/of/key" &&
    same_shard "$work/key_content_document" "$work/made/of/key_content_document"
report "a missing folder is created" $?

# --- bad command lines ---
bad() { pre --output-prefix "$work/bad" "$@"; }
byte() { bad --tokenizer-type Byte "$@"; }
refused "unknown flag" 2 "did you mean --append-eod" bad --input "$work/a.jsonl" --append-eos
refused "no input" 2 "--input or --input-list is missing" bad --append-eod
refused "no output" 2 "--output-prefix is missing" pre --input "$work/a.jsonl"
refused "a directory as output name" 2 "ends in '/'" pre --input "$work/a.jsonl" --tokenizer-type Byte \
    --output-prefix "$work/"
refused "no vocabulary" 2 "--vocab-file" bad --input "$work/a.jsonl"
refused "unknown tokenizer" 2 "GPT2BPETokenizer|Byte" bad --input "$work/a.jsonl" --tokenizer-type Bytes
refused "no workers" 2 "--workers" byte --input "$work/a.jsonl" --workers 0
refused "two keys" 2 "2 keys" byte --input "$work/a.jsonl" --json-keys text url
refused "key with plain text" 2 "--json-keys cannot be combined with --text" byte --input "$work/1.txt" --text \
    --json-keys text
refused "partitions" 2 "--partitions" byte --input "$work/a.jsonl" --partitions 2
refused "sentences" 2 "--split-sentences" byte --input "$work/a.jsonl" --split-sentences
refused "language" 2 "--lang" byte --input "$work/a.jsonl" --lang english
refused "SentencePiece model" 2 "GPT2BPETokenizer|Byte|HuggingFaceTokenizer" bad --input "$work/a.jsonl" \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m
refused "HuggingFaceTokenizer without its model" 2 "--tokenizer-model" bad --input "$work/a.jsonl" \
    --tokenizer-type HuggingFaceTokenizer
refused "a model that is not a tokenizer.json" 5 "$golden/cases.json" bad --input "$work/a.jsonl" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$golden/cases.json"
refused "an unknown end-of-document token" 5 '"</s>", the end-of-document token according to --tokenizer-eod' bad --input "$work/a.jsonl" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model test/golden/tokenizer_json/llama3 \
    --tokenizer-eod '</s>'
# --- conversations: test_chat.c tests the templates ---
printf '%s\n' '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}' '' \
    >"$work/chat.jsonl"
long=$(printf 'x%.0s' {1..700})
awk -v long="$long" 'NR == 1 { for (i = 0; i < 2000; i++) { line = $0; sub(/"a"/, "\"" i " " long "\"", line)
    print line; print "" } }' "$work/chat.jsonl" >"$work/chats.jsonl"
chat() { pre --tokenizer-type Byte --input "$1" --output-prefix "$work/$2" "${@:3}"; }
masks() { od -An -v -tu1 "$1_messages_document_loss_mask.bin" | tr -d ' \n'; }
chat "$work/chat.jsonl" chat --chat plain
[ "$(masks "$work/chat")" = 000000000000000000111 ] &&
    grep -q '_messages_document_loss_mask.bin and .idx: the loss counts 3 tokens (14.3%)' "$work/err"
report "masks of a conversation" $?
chat "$work/chats.jsonl" one --chat plain --workers 1 &&
    chat "$work/chats.jsonl" three --chat plain --workers 3 &&
    same_shard "$work/one_messages_document" "$work/three_messages_document" &&
    same_shard "$work/one_messages_document_loss_mask" "$work/three_messages_document_loss_mask"
report "the same conversations and masks for any number of workers" $?
chat <(sed 's/messages/chats/' "$work/chat.jsonl") other --chat plain --json-keys chats &&
    cmp -s "$work/chat_messages_document.bin" "$work/other_chats_document.bin"
report "--json-keys names the messages" $?
(cat "$work/chats.jsonl" && echo '{"messages":[{"role":"assistant","content":""}]}') >"$work/empty.jsonl"
refused "an empty answer" 5 "empty.jsonl line 4001 message 1 is an empty assistant turn" chat "$work/empty.jsonl" bad \
    --chat plain
refused "a line that is not JSON" 5 "a.jsonl line 1 " chat "$work/a.jsonl" bad --chat rendered
refused "an unknown template" 2 "--chat x is not a template; use one of chatml," chat "$work/chat.jsonl" bad --chat x
refused "a template whose tokens are missing" 2 "the tokenizer has no token <|im_start|>" \
    chat "$work/chat.jsonl" bad --chat chatml
for flag in --text --append-eod --tokenizer-hf-no-include-special-tokens; do
    refused "--chat with $flag" 2 "$flag cannot be combined with --chat plain" \
        chat "$work/chat.jsonl" bad --chat plain $flag
done
compgen -G "$work/bad_*" >/dev/null
report "refused conversations write nothing" $((1 - $?))
helps() { # PROGRAM TEXT: --help and -h print the same text, with at most 100 columns
    "$build/$1" --help >"$work/help" && "$build/$1" -h --unknown | cmp -s - "$work/help" &&
        grep -q -- "$2" "$work/help" &&
        ! grep -qE '.{101}' "$work/help"
}
helps preprocess_data --append-eod && helps merge_datasets --output-prefix
report "help" $?
"$build/preprocess_data" --version | grep -qE 'PCRE2 [0-9.]+, Unicode [0-9.]+'
report "version names the Unicode tables" $?

# --- bad input: exit code 5; the first error has file and line for any number of workers ---
line() { # TEXT: replaces line 4003 of big.jsonl, which is not in the first block
    { head -n 4002 "$work/big.jsonl"; printf '%s\n' "$1"; tail -n +4003 "$work/big.jsonl"; printf '%s\n' \
        '{bad'; } >"$work/bad.jsonl"
    byte --input "$work/golden.jsonl" "$work/bad.jsonl" --workers 3
}
refused "a line that is not JSON" 5 "$work/bad.jsonl line 4003 is not valid JSON" line '{"text": "x"'
refused "plain text as JSON lines" 5 \
    "(byte 1: expected a JSON object); for plain text files, one document each, add --text" \
    byte --input "$work/1.txt"
printf 'PAR1\x15\x04rows' >"$work/a.parquet"
refused "a parquet file" 5 "$work/a.parquet is a parquet file; use a pipe: dev/data/parquet_to_jsonl" byte \
    --input "$work/a.parquet"
refused "a parquet file as plain text" 5 "is a parquet file" byte --text --input "$work/a.parquet"
printf '[{"text": "x"},\n{"text": "y"}]\n' >"$work/array.json"
printf '{"text": "x"}\n\0\0\n' >"$work/nul.jsonl"
refused "a line of NUL bytes" 5 "$work/nul.jsonl line 2 is not valid JSON" byte --input "$work/nul.jsonl"
refused "a JSON array" 5 "for a JSON array with: jq -c '.[]'" byte --input "$work/array.json"
refused "a line without the key" 5 "$work/bad.jsonl line 4003 lacks the key \"text\"" line '{"txt": "x"}'
refused "a text that is not a string" 5 "$work/bad.jsonl line 4003 has a \"text\" that is not a string" line \
    '{"text": ["x"]}'
refused "a missing input" 5 "$work/missing" byte --input "$work/a.jsonl" "$work/missing"
refused "a missing list" 5 "$work/missing" byte --input-list "$work/missing"
refused "a directory as input" 5 "is a directory" byte --text --input "$work/folder"
gzip -c "$work/a.jsonl" >"$work/a.gz"
refused "compressed input" 5 "compressed with gzip" byte --input "$work/a.gz"
refused "compressed plain text" 5 "compressed with gzip" byte --text --input "$work/1.txt" "$work/a.gz"
refused "a malformed merge list" 5 "$work/a.jsonl line 1" bad --input "$work/a.jsonl" \
    --vocab-file "$golden/vocab.json" --merge-file "$work/a.jsonl"
refused "an input without documents" 5 "no document" byte --input "$work/2.txt"
from_nothing() { : | byte --input -; }
refused "standard input without documents" 5 "no document" from_nothing

# --- output that cannot be created: exit code 3 before any input is read
refused "a directory that cannot be created" 3 "/proc/nowhere" pre --input "$work/a.jsonl" \
    --tokenizer-type Byte \
    --output-prefix /proc/nowhere/x
refused "a read-only directory" 3 "/proc/x_text_document" pre --input "$work/a.jsonl" \
    --tokenizer-type Byte --output-prefix /proc/x
refused "a file instead of a directory" 3 "$work/a.jsonl" pre --input "$work/a.jsonl" \
    --tokenizer-type Byte --output-prefix "$work/a.jsonl/x"
mkdir "$work/folder_text_document.bin"
refused "a directory with the name of the output" 3 "$work/folder_text_document.bin" pre \
    --input "$work/bad.jsonl" \
    --tokenizer-type Byte --output-prefix "$work/folder"

# --- a full disk (imitated by a file size limit) and an interruption leave no files
limited() { (ulimit -f 512 && byte --input "$work/big.jsonl" --workers 2); }
refused "full disk" 3 "free disk space" limited
merge_limited() { (ulimit -f 512 && merge --input "$work/folder" --output-prefix "$work/bad_text_document"); }
refused "full disk while merging" 3 "free disk space" merge_limited
# In a shared folder, another user may have planted links to this user's files.
echo precious >"$work/precious"
for suffix in .bin.tmp .idx.tmp .bin .idx; do ln -s precious "$work/linked_text_document$suffix"; done
"$build/preprocess_data" --input "$work/golden.jsonl" --tokenizer-type Byte --output-prefix "$work/linked" \
    2>"$work/err" && [ "$(cat "$work/precious")" = precious ] && [ ! -h "$work/linked_text_document.bin" ] &&
    clean && ! compgen -G "$work/*.lock" >/dev/null
report "links under the names of output files are replaced, not followed" $?
ln -s precious "$work/bad_text_document.lock"
refused "a link in place of the lock" 5 "is a link" byte --input "$work/golden.jsonl"
rm "$work/bad_text_document.lock"
mkfifo "$work/fifo"
exec 3<>"$work/fifo" # a pipe that stays open without more data
"$build/preprocess_data" --tokenizer-type Byte --input "$work/fifo" --output-prefix "$work/bad" \
    2>"$work/err_first" &
tool=$!
cat "$work/golden.jsonl" >&3
for _ in {1..1200}; do [ -e "$work/bad_text_document.bin.tmp" ] && break; sleep 0.1; done
before=$(ls "$work")
byte --input "$work/golden.jsonl"
[ $? -eq 5 ] && grep -q 'another program is writing' "$work/err" && [ "$before" = "$(ls "$work")" ]
report "a second run onto the same output is refused" $?
kill -TERM $tool
wait $tool
[ $? -eq 143 ] && clean && [ ! -e "$work/bad_text_document.idx" ]
report "SIGTERM removes the temporary files" $?
exec 3>&-

echo "# $failed failed"
[ "$failed" -eq 0 ]
