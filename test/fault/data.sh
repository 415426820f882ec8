#!/usr/bin/env bash
# Damaged data on 4 ranks ends a run within seconds, with the documented exit code and one error
# line that names the file.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard good 300 1
four=(4 --gpus-per-node 2)

# broken: copies the good shard to $data.
broken() {
    data=$work/bad_text_document
    cp "$work/good_text_document.bin" "$data.bin"
    cp "$work/good_text_document.idx" "$data.idx"
}
# put FILE OFFSET BYTES: overwrites bytes; BYTES has printf escapes.
put() {
    # shellcheck disable=SC2059 # the format has the escapes
    printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
size() { wc -c <"$1"; }
sequences=$(od -An -t d8 -j 18 -N 8 "$work/good_text_document.idx" | tr -d ' ')
lengths=34
offsets=$((34 + 4 * sequences))
documents=$((34 + 12 * sequences))

# refuses NAME TEXT COMMAND...: the command damages the copy; training must end with exit code 5 and
# an error line that contains TEXT.
refuses() {
    local name=$1 text=$2
    broken
    "${@:3}"
    check "$name" refused 5 "$text" "${four[@]}"
}
cut_to() { truncate -s "$2" "$1"; }
missing_bin() { rm "$data.bin"; }
missing_idx() { rm "$data.idx"; }
swap() { cp "$data.bin" "$data.idx"; }
data=$work/bad_text_document
refuses "missing .idx" "$data.idx" missing_idx
refuses "missing .bin" "$data.bin" missing_bin
refuses "empty .idx" "$data.idx" cut_to "$data.idx" 0
refuses "a truncated header" "$data.idx" cut_to "$data.idx" 20
refuses "truncated lengths" "$data.idx" cut_to "$data.idx" $((lengths + 10))
refuses "truncated offsets" "$data.idx" cut_to "$data.idx" $((offsets + 12))
refuses "truncated document boundaries" "$data.idx" cut_to "$data.idx" \
    $(($(size "$work/good_text_document.idx") - 1))
refuses "a truncated .bin" "$data" cut_to "$data.bin" $(($(size "$work/good_text_document.bin") / 2))
refuses ".bin one byte short" "$data" cut_to "$data.bin" $(($(size "$work/good_text_document.bin") - 1))
refuses "empty .bin" "$data" cut_to "$data.bin" 0
refuses "wrong magic" "$data.idx" put "$data.idx" 0 'XMIDIDX'
refuses "unknown version" "$data.idx" put "$data.idx" 9 '\007'
refuses "unknown token type" "$data.idx" put "$data.idx" 17 '\011'
refuses "a huge number of sequences" "$data.idx" put "$data.idx" 18 '\377\377\377\377\377\377\377\177'
refuses "a negative number of sequences" "$data.idx" put "$data.idx" 18 '\377\377\377\377\377\377\377\377'
refuses "a negative length" "$data.idx" put "$data.idx" $((lengths + 400)) '\377\377\377\377'
refuses "an offset outside .bin" "$data" put "$data.idx" $((offsets + 800)) '\377\377\377\377\377\000\000\000'
refuses "a negative offset" "$data" put "$data.idx" $((offsets + 800)) '\377\377\377\377\377\377\377\377'
refuses "a document boundary past the sequences" "$data.idx" put "$data.idx" $((documents + 80)) \
    '\377\377\000\000\000\000\000\000'
refuses ".bin instead of .idx" "$data.idx" swap

# --- token ids outside the vocabulary: detected on reading a batch, or earlier by --check-data ---
everywhere() { # every token is larger than the vocabulary
    tr '\000-\377' '\177' <"$work/good_text_document.bin" >"$data.bin"
}
refuses "token ids beyond the vocabulary everywhere" "vocabulary" everywhere
broken
everywhere
check "the same on one rank" refused 5 "vocabulary" 1
check "the same with --check-data" refused 5 "$data" "${four[@]}" --check-data
# One invalid token, 0x7f7f, in sequence 150.
broken
at=$(od -An -t d8 -j $((offsets + 8 * 150)) -N 8 "$data.idx" | tr -d ' ')
put "$data.bin" $((at + 8)) '\177\177'
check "one token outside the vocabulary, read in training" refused 5 "32639" "${four[@]}" --train-iters 600 \
    --split 100,0,0 --log-interval 1000
check "one token outside the vocabulary, read in validation" refused 5 "32639" "${four[@]}" --train-iters 3 \
    --split 10,90,0 --eval-interval 2 --eval-iters 150 --log-interval 1000
check "one token outside the vocabulary, --check-data" refused 5 "32639" "${four[@]}" --check-data
check "a vocabulary that is too small for the data" refused 5 "vocabulary" "${four[@]}" \
    --tokenizer-type NullTokenizer --vocab-size 40

# --- files truncated during training: the rank that reads the missing part ends the job ---
keep=64
cut_in_use() { # SUFFIX RANKS FLAGS...: truncates the file during training
    broken
    in_background cut "${@:2}" --train-iters 1000000 --lr-decay-iters 100 --split 100,0,0 --log-interval 1000
    wait_for_iteration cut 5 || { say "no iteration 5"; return 1; }
    truncate -s "$keep" "$data.$1"
    wait "$job"
    error_names 5 "read data: $data.$1 was truncated while it was read" $? && error_names 5 " iteration " 5
}
check ".bin truncated during training" cut_in_use bin 2
check ".bin truncated during training, one rank" cut_in_use bin 1
check ".idx truncated during training" cut_in_use idx "${four[@]}"
keep=$(($(size "$work/good_text_document.bin") - 1))
check ".bin loses its last byte during training" cut_in_use bin 2
keep=$(($(size "$work/good_text_document.idx") - 8))
check ".idx loses its last number during training" cut_in_use idx 2

# --- too little data ---
data=$work/good_text_document
check "an empty validation split" refused 5 "--split" "${four[@]}" --split 99999,1,0
check "an empty test split" refused 5 "--split" "${four[@]}" --split 99999,0,1
check "an empty training split" refused 2 "--split" "${four[@]}" --split 0,50,50
printf '{"text": "short"}\n' >"$work/short.jsonl"
"$BUILD/preprocess_data" --input "$work/short.jsonl" --tokenizer-type Byte --append-eod \
    --output-prefix "$work/short" >/dev/null 2>&1
data=$work/short_text_document
check "a document shorter than a sample is repeated" trains "${four[@]}" --split 100,0,0
: >"$work/none.jsonl"
"$BUILD/preprocess_data" --input "$work/none.jsonl" --tokenizer-type Byte --append-eod \
    --output-prefix "$work/none" >/dev/null 2>&1
data=$work/none_text_document
check "a shard without documents" refused 5 "none" "${four[@]}" --split 100,0,0
data=$work/good_text_document
check "a blend with a missing part" refused 5 "nowhere" "${four[@]}" --data-path 1 "$data" 1 "$work/nowhere"
check "a blend with a non-numeric weight" refused 2 "--data-path" "${four[@]}" --data-path much \
    "$data" 1 "$data"
without_data() {
    ranks 4 "${model[@]}" "${batch[@]}"
    error_names 2 "--data-path" $?
}
check "no data at all" without_data
check "a directory instead of a shard" refused 5 "$work" "${four[@]}" --data-path "$work"
finish
