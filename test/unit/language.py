#!/usr/bin/env python3
"""Checks the wording of all tracked text: code, comments, scripts, documents and file names.

    test/unit/language.py text       American spelling and the terms of CONTRIBUTING.md; prints
                                     FILE:LINE: word: what to write instead
    test/unit/language.py names      the same for file names
    test/unit/language.py commits    commit subjects: "area: imperative", at most 72 characters
    test/unit/language.py self-test  the rules find their words in bad samples, and nothing in good ones
Exit code 1 if anything was found. PENDING lists hits that are not fixed yet.
"""
import os
import re
import subprocess
import sys

# Commits before this one are not checked.
FIRST_COMMIT = "b3804cd"

# Measured data, generated text, quoted works and this file.
SKIPPED = re.compile(r"^(dev/(experiments|bench)/results/|test/golden/|test/fuzz/regressions/|LICENSE$"
                     r"|docs/.*\.svg$|test/unit/language\.py$)")

VERBS = ("canonical|capital|character|custom|emphas|equal|final|general|initial|linear|local|material|maxim|memor"
         "|minim|normal|optim|organ|parallel|parameter|penal|priorit|quant|random|real|recogn|regular|serial|special"
         "|stabil|standard|summar|synchron|token|util|vector|visual")

# name: (pattern, what to write instead). Patterns match whole words in any case.
RULES = {
    "-ise": (rf"(?:re|de|un|pre)?(?:{VERBS})i[s](?:e|es|ed|ing|er|ers|able|ation|ations)", "-ize"),
    "-our": (r"(?:col|behavi|neighb|fav|hon|flav|lab)ou[r]\w*", "-or"),
    "-lled": (r"(?:model|travel|signal|label|cancel|level|total|channel|marshal)l(?:ed|ing|er|ers)", "one l"),
    "british": (r"grey|licence|centred?|centres|towards|afterwards|learnt|spelt|whilst|artefacts?|analysed?"
                r"|programmes?", "the American spelling"),
    "island": (r"islands?", "replica group"),
    "masters": (r"masters", "master weights"),
    "share out": (r"(?:share|shares|shared|sharing)[ -]out", "shard"),
    "made-up": (r"made-up", "synthetic"),
    "lies on": (r"lies? on (?:\d+|N|four|eight|sixteen) bytes?", "is N-byte aligned"),
    "to the bit": (r"to the bit", "bitwise identical, bit-exact"),
    "rehearse": (r"rehears\w*", "warm up"),
    "trunk": (r"trunks?", "base run"),
    "twin": (r"twins?", "replicate"),
    "verdict": (r"verdicts?", "step status, result"),
    "sentry": (r"sentr(?:y|ies)", "anomaly guard"),
    "salvage": (r"salvag\w*", "node-failure recovery"),
    "survivors": (r"survivors?", "surviving groups"),
    "rooms": (r"rooms|house rules?", "directories, modules; repository rules"),
    "card": (r"cards?", "model config; GPU"),
    "grain": (r"grains?", "alignment"),
    "goes on": (r"(?:goes|went|gone) on", "resumes, continues"),
    "that of": (r"that of|those of|those which|that which", "repeat the noun"),
    "what travels": (r"what travels", "payload"),
    "own accord": (r"of (?:its|their) own accord", "by itself"),
    "behind": (r"behind", "after"),
    "in front of": (r"in front of", "before"),
    "anew": (r"anew", "again"),
    "whoever": (r"whoever", "name the caller or the rank"),
    "in spite of": (r"in spite of", "despite"),
    "no multiple": (r"no multiples? of", "not a multiple of"),
    "difference to": (r"difference to", "difference from"),
    "but for": (r"but for (?:a|the|its|one)", "except for"),
    "when wanted": (r"(?:when|where) wanted", "if requested"),
    "as ever": (r"as ever", "as usual, unchanged"),
}

# (rule, path, line, reason): exceptions. Path and line are regular expressions.
ALLOWED = [
    ("card", r".", r"NVIDIA|GPUs?\b|nvidia-smi|network card|NIC\b", "graphics and network cards"),
    ("rooms", r"^test/unit/dev/test_prose\.sh$", r".", "text of a book"),
    ("trunk", r"^(dev/experiments/|test/e2e/forks\.sh$)",
     r"trunk\.(json|checkpoints)|[\"']trunk|--trunk|/trunk/|deprecated names",
     "keys and files of stored results, and deprecated commands"),
    ("twin", r"^(dev/experiments/|test/e2e/forks\.sh$)", r"twin\d|\btwin\b.*replicate|replicate.*\btwin\b",
     "names of replicates in stored results"),
    ("verdict", r"^dev/bench/comm_table\.py$", r"norm and verdict", "a key of older logs"),
    ("lies on", r"^CONTRIBUTING\.md$", r"\| x lies on", "an example of what not to write"),
    ("masters", r"^(dev/convert|test/unit/convert)/", r"MASTERS|masters\b[^ ]|bool masters",
     "identifiers in readers of Megatron-LM's checkpoints"),
]

# Maximum number of hits of a rule in a directory, for text that is not fixed yet.
PENDING = {
    "test/fault": {"that of": 1},
}


def git(*arguments):
    return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          check=True).stdout


def tracked_files():
    try:
        names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    except (OSError, subprocess.CalledProcessError):  # a release archive
        names = [os.path.relpath(os.path.join(folder, name)) for folder, _, files in os.walk(".")
                 if not re.match(r"\./(build|runs|data)", folder) for name in files]
    return sorted(name for name in names if name and not SKIPPED.match(name))


# Underscores separate words in identifiers.
COMPILED = {name: re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.I)
            for name, (pattern, _) in RULES.items()}
ANY = re.compile("|".join(f"(?:{pattern})" for pattern, _ in RULES.values()), re.I)


def findings(path, line):
    if not ANY.search(line):
        return
    for name, pattern in COMPILED.items():
        for match in pattern.finditer(line):
            if not any(rule == name and re.search(where, path) and re.search(what, line)
                       for rule, where, what, _ in ALLOWED):
                yield name, match[0]


def directory(path):
    """Returns test/e2e for test/e2e/cli.sh; for a file in the root, its name."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def check_text():
    hits = {}
    for path in tracked_files():
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().split("\n")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        for number, line in enumerate(lines, 1):
            for name, word in findings(path, line):
                hits.setdefault((directory(path), name), []).append(
                    f"{path}:{number}: {word}: {RULES[name][1]}")
    for key, lines in sorted(hits.items()):
        if len(lines) > PENDING.get(key[0], {}).get(key[1], 0):
            yield from lines
    if "--pending" in sys.argv:
        folders = {}
        for (folder, name), lines in sorted(hits.items()):
            folders.setdefault(folder, {})[name] = len(lines)
        for folder, names in folders.items():
            print(f"    {folder!r}: {names},".replace("'", '"'), file=sys.stderr)


def check_names():
    for path in tracked_files():
        for name, word in findings("", path.replace("_", " ")):
            yield f"{path}: {word}: {RULES[name][1]}"


def check_commits():
    try:
        subjects = git("log", "--no-merges", "--format=%h %s", FIRST_COMMIT + "..HEAD").splitlines()
    except (OSError, subprocess.CalledProcessError):
        print("skip: no history since", FIRST_COMMIT)
        return
    for line in subjects:
        commit, _, subject = line.partition(" ")
        if len(subject) > 72:
            yield f"{commit}: {len(subject)} characters: {subject}"
        if not re.match(r"[a-z0-9][a-z0-9_./, -]*: [a-z]", subject):
            yield f"{commit}: not 'area: imperative': {subject}"


BAD = ("the optimiser quantises", "its neighbours", "a grey line", "x lies on 16 bytes", "the islands meet",
       "resumed to the bit", "its VERDICT", "training goes on", "of its own accord", "weights are shared out",
       "model_cards", "two modelled runs", "made anew", "whoever reads them", "opened in spite of it",
       "no multiple of 64", "the difference to the bound", "equal but for the padding",
       "backward when wanted", "rounded as ever")
GOOD = ("the optimizer quantizes", "a discarded step", "mastership", "organic rise", "advise and revise")


def self_test():
    for line in BAD:
        if not list(findings("llmc/x.c", line)):
            yield f"no rule finds: {line}"
    for line in GOOD:
        if list(findings("llmc/x.c", line)):
            yield f"a rule finds: {line}"


def main():
    checks = {"text": check_text, "names": check_names, "commits": check_commits, "self-test": self_test}
    lines = list(checks[sys.argv[1]]())
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


sys.exit(main())
