#!/usr/bin/env python3
"""Finds Markdown that renders incorrectly: broken tables, rows with a wrong number of cells, code
that renders as prose, links to missing headings. Called by repository_rules.sh.

usage: documents.py tables|code|anchors FILE.md ...   prints one line per finding
"""
import os
import re
import sys


def lines_of(path):
    """Yields (number from 1, line); lines of fenced blocks are empty."""
    fenced = False
    with open(path, encoding="utf-8") as page:
        for number, line in enumerate(page, 1):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            yield number, "" if fence or fenced else line.rstrip("\n")


def cells(row):
    """Counts cells like GitHub: every | without a backslash ends one, even between backticks."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def tables(path):
    """Checks that tables have a header, a line of dashes, and rows with the same number of cells."""
    above = []  # rows of the current table
    for number, line in [*lines_of(path), (0, "")]:
        if len(above) == 1 and not re.fullmatch(r"\|(:?-+:?\|)+", line.replace(" ", "")):
            yield above[0][0], "a row without a header: " + above[0][1]
        if not line.startswith("|"):
            above = []
            continue
        above.append((number, line))
        if cells(line) != cells(above[0][1]):
            yield number, f"{cells(line)} cells in a table of {cells(above[0][1])}: {line}"


def code(path):
    """Finds indented code that GitHub renders as prose. Four spaces start a code block only after an
    empty line. In a list they continue the item."""
    before, listed = "", False
    for number, line in lines_of(path):
        if line and not line.startswith(" "):
            listed = bool(re.match(r"([-*]|\d+\.) ", line))
        if line.startswith("    ") and before and not before.startswith("    ") and not listed:
            yield number, "no empty line before code: " + line.strip()
        before = line


def slugs(path):
    """Returns GitHub's anchors of a file's headings."""
    found = {}
    for _, line in lines_of(path):
        if heading := re.match(r"#+ +(.*)", line):
            slug = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
            yield f"{slug}-{found[slug]}" if found[slug] else slug


def anchors(path):
    for number, line in lines_of(path):
        for page, anchor in re.findall(r"\]\(([^)#: ]*)#([^) ]+)\)", line):
            target = os.path.join(os.path.dirname(path), page) if page else path
            if os.path.isfile(target) and anchor not in slugs(target):
                yield number, f"{target} has no heading #{anchor}"


check = {"tables": tables, "code": code, "anchors": anchors}[sys.argv[1]]
for path in sys.argv[2:]:
    for number, finding in check(path):
        print(f"{path}:{number}: {finding}")
