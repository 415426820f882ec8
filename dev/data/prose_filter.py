#!/usr/bin/env python3
"""Extracts English prose from unpacked documentation as JSON lines for preprocess_data. Called by
prose.sh.

    prose_filter.py FOLDER >corpus.jsonl

FOLDER has one subdirectory per package. Reads HTML, plain text, Perl's POD and dictionaries of dictd
(.dict.dz), including gzip-compressed files. Keeps paragraphs of English sentences and drops duplicates
across the whole corpus, such as licenses and navigation. Skips files with only a few sentences and
splits the others into documents of about 16 kB. Sorts the documents by hash, so that all parts of the
corpus have the same mix. Reports the size of each package on stderr.
"""
import gzip
import hashlib
import html.parser
import json
import multiprocessing
import os
import re
import sys

DOCUMENT = 16000  # characters
LEAST_OF_FILE = 400
FEWEST_WORDS = 8
# The most frequent English words. They are rare in other languages, code and tables.
FREQUENT = frozenset("""
the of and to a in is that it for as with be on or are by this an from not have you which if can at
was but has will all when one they use he his we may i""".split())
LEAST_FREQUENT = 0.2   # share of the words
LEAST_LETTERS = 0.90   # share of letters, blanks and punctuation
FOREIGN = re.compile(r"(^|[/._-])(?!en[-_./])([a-z]{2}(?:[-_][A-Z]{2})?)\.html(\.gz)?$")
SOURCE_OF_ENTRY = re.compile(r"\s*\[(1913 Webster|Webster 1913 Suppl\.|PJC|WordNet[^]]*|"
                             r"[A-Z][\w. ]{1,30}Dict[^]]*)\]")
TEXTS = (".txt", ".pod", ".text", ".info")
HTMLS = (".html", ".htm", ".xhtml", ".page")


class Page(html.parser.HTMLParser):
    """Collects the paragraphs of an HTML page, without code, scripts, tables and navigation."""
    SKIPPED = {"script", "style", "pre", "nav", "table", "head", "select", "footer", "svg", "math"}
    INLINE = {"a", "b", "i", "em", "strong", "code", "tt", "span", "kbd", "var", "samp", "q", "cite", "abbr",
              "acronym", "sub", "sup", "small", "u", "dfn", "font", "mark", "link", "app", "gui", "key",
              "file", "cmd", "img", "wbr", "br"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.found, self.skipping = [], [], []

    def flush(self):
        self.found.append(" ".join("".join(self.parts).split()))
        self.parts = []

    def handle_starttag(self, tag, attributes):
        if tag in self.SKIPPED:
            self.skipping.append(tag)
        if tag not in self.INLINE:
            self.flush()
        elif tag == "br":
            self.parts.append(" ")

    def handle_startendtag(self, tag, attributes):
        self.parts.append(" ")

    def handle_endtag(self, tag):
        if tag in self.skipping:  # also ends inner elements whose end tag is missing
            while self.skipping.pop() != tag:
                pass
        if tag not in self.INLINE:
            self.flush()

    def handle_data(self, data):
        if not self.skipping:
            self.parts.append(data)


def paragraphs_of_page(text):
    page = Page()
    page.feed(text)
    page.close()
    page.flush()
    return page.found


def paragraphs_of_text(text):
    """Splits text at empty lines and removes formatting codes of POD."""
    text = re.sub(r"\b[BCEFILSXZ]<+\s*([^<>|]*?)(?:\|[^<>]*)?\s*>+", r"\1", text)
    return [" ".join(p.split()) for p in re.split(r"\n[ \t]*\n|\n(?=%\n)", text)]


def paragraphs_of_dictionary(text):
    """Splits a dictionary into entries (a line and the indented lines after it), without sources."""
    text = SOURCE_OF_ENTRY.sub("", text)
    return [" ".join(p.split()) for p in re.split(r"\n(?=\S)", text)]


def is_prose(paragraph):
    """Returns true for a paragraph of English sentences."""
    words = re.findall(r"[A-Za-z']+", paragraph)
    if len(words) < FEWEST_WORDS or not re.search(r"[.:;!?]", paragraph):
        return False
    plain = sum(c.isalpha() or c in " .,;:'\"!?()-" for c in paragraph)
    if plain < LEAST_LETTERS * len(paragraph):
        return False
    return sum(w.lower() in FREQUENT for w in words) >= LEAST_FREQUENT * len(words)


def wanted(path):
    """Returns the reader of a file type, or None to skip the file.

    Skips _sources, which has the sources of HTML pages."""
    if "/_sources/" in path:
        return None
    name = path[:-3] if path.endswith(".gz") else path
    if name.endswith((".dict.dz", ".dict")):
        return paragraphs_of_dictionary
    if name.endswith(HTMLS):
        foreign = FOREIGN.search(path) and "/C/" not in path
        return None if foreign or other_language(path) else paragraphs_of_page
    if name.endswith(TEXTS) or "/games/fortunes/" in path and "." not in os.path.basename(path):
        return None if other_language(path) else paragraphs_of_text
    return None


def other_language(path):
    """Returns true if a directory in the path is named after a language other than English."""
    names = path.split("/")[:-1]
    return any(re.fullmatch(r"[a-z]{2}([-_][A-Z]{2}|[-_]Han[st])?|[a-z]{2}-[a-z]{2}", n) and not
               n.startswith("en") for n in names[names.index("share") + 1 if "share" in names else 0:]
               if n not in ("go", "os", "ui", "db", "vm", "io"))


def read(path):
    opener = gzip.open if path.endswith((".gz", ".dz")) else open
    try:
        with opener(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except (OSError, EOFError) as reason:
        print(f"{path}: {reason}: skipped", file=sys.stderr)
        return ""


def prose_of(file):
    """Returns the paragraphs of prose in a file."""
    how = wanted(os.path.relpath(file[1], file[0]))
    return [p for p in how(read(file[1])) if is_prose(p)] if how else []


def new_of(paragraphs, seen):
    """Returns the paragraphs that are new to the corpus, ignoring numbers and punctuation.

    Returns [] if they have too little text."""
    found = {}
    for paragraph in paragraphs:
        key = hashlib.md5(re.sub(r"[^a-z]+", "", paragraph.lower()).encode()).digest()
        if key not in seen:
            found.setdefault(key, paragraph)
    if sum(map(len, found.values())) < LEAST_OF_FILE:
        return []
    seen.update(found)
    return list(found.values())


def documents_of(paragraphs):
    """Joins paragraphs to texts of about DOCUMENT characters."""
    held, size = [], 0
    for paragraph in paragraphs:
        held.append(paragraph)
        size += len(paragraph)
        if size >= DOCUMENT:
            yield "\n\n".join(held) + "\n"
            held, size = [], 0
    if held:
        yield "\n\n".join(held) + "\n"


def files_of(folder):
    """Lists files, except links, in a deterministic order."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                yield path


def corpus(folder):
    """Returns [(hash, text)] and the number of characters per package."""
    seen, found, given = set(), [], {}
    files = [(folder, path) for path in files_of(folder)]
    with multiprocessing.Pool() as pool:
        for (_, path), paragraphs in zip(files, pool.imap(prose_of, files, chunksize=16)):
            package = os.path.relpath(path, folder).split("/")[0]
            for text in documents_of(new_of(paragraphs, seen)):
                found.append((hashlib.md5(text.encode()).hexdigest(), text))
                given[package] = given.get(package, 0) + len(text)
    return sorted(found), given


def main():
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        print("usage: prose_filter.py FOLDER >corpus.jsonl", file=sys.stderr)
        return 2
    found, given = corpus(sys.argv[1])
    for package, size in given.items():
        print(f"{package:28s} {size / 1e6:8.2f} MB", file=sys.stderr)
    for _, text in found:
        print(json.dumps({"text": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
