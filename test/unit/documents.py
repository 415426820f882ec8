#!/usr/bin/env python3
"""Finds what Markdown shows otherwise than its author meant: tables in pieces, rows of another
length, code that is taken for prose, links to headings that are not there. Called by
house_rules.sh: documents.py tables|code|anchors FILE.md ... prints a line for each finding.
"""
import os
import re
import sys


def lines_of(path):
    """Lines outside fenced blocks, numbered from 1. A line inside one is empty."""
    fenced = False
    with open(path, encoding="utf-8") as page:
        for number, line in enumerate(page, 1):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            yield number, "" if fence or fenced else line.rstrip("\n")


def cells(row):
    """GitHub ends a cell at every | without a backslash, also between backticks."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def tables(path):
    """A table is a row, a line of dashes, and rows of as many cells."""
    above = []  # the rows of the table at hand
    for number, line in [*lines_of(path), (0, "")]:
        if len(above) == 1 and not re.fullmatch(r"\|(:?-+:?\|)+", line.replace(" ", "")):
            yield above[0][0], "a row without a head: " + above[0][1]
        if not line.startswith("|"):
            above = []
            continue
        above.append((number, line))
        if cells(line) != cells(above[0][1]):
            yield number, f"{cells(line)} cells in a table of {cells(above[0][1])}: {line}"


def code(path):
    """Four blanks make code behind an empty line only. In a list they go on with the item."""
    before, listed = "", False
    for number, line in lines_of(path):
        if line and not line.startswith(" "):
            listed = bool(re.match(r"([-*]|\d+\.) ", line))
        if line.startswith("    ") and before and not before.startswith("    ") and not listed:
            yield number, "no empty line before code: " + line.strip()
        before = line


def slugs(path):
    """GitHub's anchors of a file's headings."""
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
