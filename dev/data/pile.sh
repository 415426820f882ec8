#!/usr/bin/env bash
# Creates the corpus of the SDP4Bit paper: the deduplicated Pile (EleutherAI/the_pile_deduplicated
# on Hugging Face), as one Megatron-LM shard. Needs internet access and python3 with the packages
# huggingface_hub and pyarrow.
#
#   dev/data/pile.sh [--output-prefix PATH] [--max-files N] [--vocab FOLDER] [--workers N]
#                    [--work FOLDER] [--local FOLDER] [--files-per-part N]
#
#   --output-prefix   the shard is PATH.bin and PATH.idx (default data/pile_text_document)
#   --max-files       use only the first N of the data set's 1650 files (about 125 M tokens each)
#   --vocab           directory with vocab.json and merges.txt, which are downloaded if missing
#                     (default data/gpt2)
#   --workers         number of threads (default: one per CPU)
#   --work            directory for the parts (default data/pile)
#   --local           directory with .parquet files to use instead of a download
#   --files-per-part  files per part (default 25)
#
# Files are downloaded one at a time, streamed into preprocess_data and deleted. Finished parts are
# kept; after an interruption, the same command continues with the next part. At the end the parts
# are merged, which needs disk space for twice their size (2 x 415 GB for the entire Pile). Then the
# parts can be deleted. BUILD is the directory of the programs, PYTHON the interpreter.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD build=${BUILD:-}
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/data/pile.sh "$@"
set -euo pipefail
root=$PWD build=${build:-$PWD/build}
cd "$caller" # relative paths start at the caller's folder
python=${PYTHON:-python3}
output=$root/data/pile_text_document max_files=0 vocab=$root/data/gpt2 workers="" work=$root/data/pile
local_folder="" per_part=25

flags="--output-prefix --max-files --vocab --workers --work --local --files-per-part --help"
while [ $# -gt 0 ]; do
    case $1 in
        --output-prefix | --max-files | --vocab | --workers | --work | --local | --files-per-part)
            [ $# -ge 2 ] || die 2 "$1 needs a value" ;;&
        --output-prefix) output=$2 ;;
        --max-files) max_files=$2 ;;
        --vocab) vocab=$2 ;;
        --workers) workers=$2 ;;
        --work) work=$2 ;;
        --local) local_folder=$2 ;;
        --files-per-part) per_part=$2 ;;
        *) die 2 "unknown flag $1; known are $flags" ;;
    esac
    shift 2
done
[[ $max_files =~ ^[0-9]+$ ]] || die 2 "--max-files $max_files is not an integer; use a number such as 8"
[[ $per_part =~ ^[1-9][0-9]*$ ]] || die 2 "--files-per-part $per_part is not a positive integer; use a number such as 8"
for tool in preprocess_data merge_datasets; do
    [ -x "$build/$tool" ] || die 3 "$build/$tool is missing; run make"
done
modules=pyarrow.parquet
[ -n "$local_folder" ] || modules+=,huggingface_hub
"$python" -c "import $modules" || die 3 "$python lacks a package; pip install huggingface_hub pyarrow"
if [ ! -f "$vocab/vocab.json" ] || [ ! -f "$vocab/merges.txt" ]; then
    "$root/dev/data/get_gpt2_vocab.sh" "$vocab"
fi
mkdir -p "$work/parts" "$(dirname "$output")"

# pile.py list: prints the data set's file names in order.
# pile.py text ... NAME...: prints the documents of these files as JSON lines.
cat >"$work/pile.py" <<'END'
import json, os, sys
import pyarrow.parquet
DATA_SET = "EleutherAI/the_pile_deduplicated"
action, work, local, *names = sys.argv[1:]
if action == "list":
    if local:
        found = os.listdir(local)
    else:
        from huggingface_hub import HfApi
        found = HfApi().list_repo_files(DATA_SET, repo_type="dataset")
    print("\n".join(sorted(name for name in found if name.endswith(".parquet"))))
else:
    for name in names:
        if local:
            path = os.path.join(local, name)
        else:
            from huggingface_hub import hf_hub_download
            download = os.path.join(work, "download")
            path = hf_hub_download(DATA_SET, name, repo_type="dataset", local_dir=download)
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256, columns=["text"]):
            for text in batch.column(0).to_pylist():
                sys.stdout.write(json.dumps({"text": text or ""}) + "\n")
        if not local:
            os.remove(path)
END

"$python" "$work/pile.py" list "$work" "$local_folder" >"$work/files" ||
    die 3 "cannot list the data set's files; check the network"
mapfile -t files <"$work/files"
[ "$max_files" -eq 0 ] || files=("${files[@]:0:max_files}")
[ -n "${files[0]:-}" ] || die 5 "no .parquet files in ${local_folder:-the data set}"
parts=()
for ((first = 0; first < ${#files[@]}; first += per_part)); do
    names=("${files[@]:first:per_part}")
    # The name contains the range of files, so that a call with another --max-files or
    # --files-per-part does not reuse a wrong part.
    part=$(printf 'part_%05d_%05d' "$first" $((first + ${#names[@]} - 1)))
    parts+=("$work/parts/$part")
    if [ -f "$work/parts/$part.idx" ]; then
        echo "have $part"
        continue
    fi
    echo "$part: ${#names[@]} files"
    # Write to another name until the pipe has succeeded, because preprocess_data cannot distinguish
    # a broken download from the end of its input.
    "$python" "$work/pile.py" text "$work" "$local_folder" "${names[@]}" |
        "$build/preprocess_data" --input - --vocab-file "$vocab/vocab.json" --merge-file "$vocab/merges.txt" \
            --append-eod ${workers:+--workers "$workers"} --log-interval 100000 \
            --output-prefix "$work/unfinished" || die 3 "$part was not finished; run the same command again"
    mv "$work/unfinished_text_document.bin" "$work/parts/$part.bin"
    mv "$work/unfinished_text_document.idx" "$work/parts/$part.idx"
done
"$build/merge_datasets" --input "${parts[@]}" --output-prefix "$output"
echo "use --data-path $output; $work may be deleted"
