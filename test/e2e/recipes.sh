#!/usr/bin/env bash
# The commands in README.md and docs/recipes.md: bash and zsh expand them to the same words, every
# training command passes --plan, and its learning-rate schedule has the length of the run. So do
# scripts/train_*.sh with the recommended flags.
# shellcheck disable=SC2015,SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../.." || exit 1
BUILD=${BUILD:-build}
case $BUILD in /*) ;; *) BUILD=$PWD/$BUILD ;; esac
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# shellcheck source-path=SCRIPTDIR source=../results.sh
. test/results.sh
unset PRESET SPEED DATA_PATH VOCAB_FILE MERGE_FILE CHECKPOINT_PATH LOG_DIR RANKS HOSTFILE MPIRUN_FLAGS DEVICE
export RECORD=$work/record BUILD

# A copy of the source tree in which the programs only record their arguments: a line of JSON each.
tree=$work/tree
mkdir -p "$tree"/{build,dev/data,dev/experiments,scripts}
ln -s "$PWD/configs" "$PWD/sdp4bit" "$PWD/llmc" "$tree/"
cat >"$work/stub" <<'STUB'
#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    print(json.dumps([os.path.relpath(sys.argv[0], os.getcwd())] + sys.argv[1:]), file=record)
STUB
chmod +x "$work/stub"
for program in build/{train_gpt,train_gpt_cpu,generate,generate_cpu,preprocess_data} scripts/mpirun.sh \
    dev/compare_logs dev/experiments/study dev/data/{get_gpt2_vocab,linux_source}.sh; do
    ln -s "$work/stub" "$tree/$program"
done
echo "some text" >"$tree/my.txt"

# Prints the indented code blocks of a page, except quotations of text and the installation.
commands() { # PAGE
    python3 - "$1" <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
text = text.partition("\n## Recipes\n")[2] or text
for block in re.findall(r"(?:^    .*\n)+", text, re.M):
    if re.match(r" *([a-z]+=|[a-z]+\(\)|export |run |mkdir |printf |(build|scripts|dev)/)", block):
        print(re.sub(r"^    ", "", block, flags=re.M))
PYTHON
}
record() { # SHELL PAGE COMMANDS
    commands "$2" >"$work/commands"
    : >"$RECORD"
    (cd "$tree" && rm -rf data hosts && ${1/zsh/zsh -f} -e -u "$work/commands") >"$work/out" 2>&1 ||
        { why="$1: $(tail -n 1 "$work/out")"; return 1; }
    [ "$(wc -l <"$RECORD")" = "$3" ] || { why="$1: $(wc -l <"$RECORD") commands instead of $3"; return 1; }
    mv "$RECORD" "$work/$1.record"
}
# An interactive zsh takes the words of a comment as arguments.
without_comments() {
    ! grep -nE '(^|[[:space:]])#' "$work/commands" >"$work/out" || { why=$(cat "$work/out"); return 1; }
}
same_in_zsh() { record zsh "$1" "$2" && cmp -s "$work/bash.record" "$work/zsh.record" ||
    { why=${why:-$(diff "$work/bash.record" "$work/zsh.record" | head -n 3)}; return 1; }; }

# Reads lines of JSON with the words of a command; runs the program for CPUs with --plan for each
# training command, and checks the schedule.
cat >"$work/plan.py" <<'PYTHON'
import json, os, shlex, subprocess, sys
def read_in(word, folder=""):
    if not word.startswith("@"):
        return [word]
    path = os.path.join(folder, word[1:])
    return [w for inner in shlex.split(open(path).read(), comments=True)
            for w in read_in(inner, os.path.dirname(path))]
def length_problem(words):
    flags, name = {}, None
    for word in (w for arg in words for w in read_in(arg)):
        if word.startswith("--"):
            name, flags[word] = word, ""
        else:
            flags[name] = word
    iterations = int(flags["--train-iters"])
    decay = int(flags.get("--lr-decay-iters", iterations))
    warmup = float(flags.get("--lr-warmup-iters", decay * float(flags.get("--lr-warmup-fraction", 0))))
    if decay != iterations or warmup > 0.1 * iterations:
        return f"{iterations} iterations, decay over {decay}, warm-up over {warmup:g}"
trained, folders = 0, set()
for line in open(sys.argv[1]):
    words, ranks = json.loads(line), "1"
    program = next((i for i, word in enumerate(words) if "/train_gpt" in word), None)
    if program is None:
        continue
    trained += 1
    if "-np" in words[:program]:
        ranks = words[words.index("-np") + 1]
    words = words[program + 1:]
    if "--save" in words:
        folder = words[words.index("--save") + 1]
        if folder in folders:
            sys.exit(f"two recipes save to {folder}")
        folders.add(folder)
    if "--plan" not in words:
        problem = length_problem(words)
        if problem:
            sys.exit(f"{problem}: {line}")
        words += ["--plan", "--plan-world-size", ranks]
    result = subprocess.run([os.environ["BUILD"] + "/train_gpt_cpu"] + words, capture_output=True, text=True)
    if result.returncode or "WARNING" in result.stdout + result.stderr:
        sys.exit(f"exit code {result.returncode}, {result.stderr[:300]}: {line}")
if trained < int(sys.argv[2]):
    sys.exit(f"only {trained} training commands")
PYTHON
planned() { why=$(cd "$tree" && python3 "$work/plan.py" "$@" 2>&1); }

page() { # PAGE COMMANDS TRAINING-COMMANDS
    check "$1: bash runs the commands" record bash "$1" "$2"
    check "$1: no comments in the commands" without_comments
    if command -v zsh >/dev/null; then
        check "$1: zsh runs the same commands" same_in_zsh "$1" "$2"
    else
        skip "$1: zsh runs the same commands" "zsh is not installed"
    fi
    check "$1: training commands pass --plan, schedules have the length of the run" planned "$work/bash.record" "$3"
}
page README.md 13 4
page docs/recipes.md 17 13

# --- scripts/train_*.sh with the flags of docs/recipes.md ---------------------------------------
eval "$(sed -n 's/^    \(\(gpt\|llama\)=(.*)\)$/\1/p' docs/recipes.md)"
script() { # SCRIPT
    local flags=("${gpt[@]}") words
    case $1 in *llama*) flags=("${llama[@]}") ;; esac
    words=$(DRY_RUN=1 DEVICE=cpu RANKS=16 PRESET=sdp4bit DATA_PATH=d LOG_DIR='' "$1" "${flags[@]}") ||
        { why="$words"; return 1; }
    python3 -c 'import json, shlex, sys; print(json.dumps(shlex.split(sys.argv[1])))' "$words" >"$RECORD"
    planned "$RECORD" 1 || return 1
    DEVICE=cpu RANKS=1 PRESET=sdp4bit LOG_DIR='' "$1" "${flags[@]}" --plan --plan-world-size 16 \
        >"$work/out" 2>&1 || { why="exit code $?: $(tail -n 1 "$work/out")"; return 1; }
    ! grep -E 'WARNING|one rank|data parallel 0' "$work/out" >"$work/err" ||
        { why=$(head -n 1 "$work/err"); return 1; }
}
for path in scripts/train_*.sh; do
    check "$path: a run of 1000 iterations passes --plan" script "$path"
done
finish
