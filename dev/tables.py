"""Prints tables, and reads and writes the JSON files of dev/experiments/study and dev/bench.

JSON files have one record per line, so that diffs are readable.
"""
import contextlib
import json
import math
import os


def cell(value, form, missing="-"):
    """Formats a number; returns `missing` for None, NaN and infinity."""
    return missing if value is None or not math.isfinite(value) else format(value, form)


def print_columns(columns, rows):
    """Prints a table. columns: (name, width, function from row to text); negative widths align left."""
    print(" ".join("%*s" % (width, name) for name, width, _ in columns))
    for row in rows:
        print(" ".join("%*s" % (width, text(row)) for _, width, text in columns))


def number_column(name, width, form, value):
    """Returns a column of numbers: value(row), or the row's entry with that name."""
    get = value if callable(value) else lambda row: row.get(value)
    return name, width, lambda row: cell(get(row), form)


def json_lines(path):
    """Returns the objects of a JSON lines file; [] if the file does not exist.

    Ignores empty lines and lines truncated by a killed run."""
    found = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
    return found


def leaf(value):
    return json.dumps(value, separators=(",", ":"))


def holds_records(value):
    """Returns true for a list of objects, or an object that contains such a list."""
    if isinstance(value, list):
        return any(isinstance(element, dict) for element in value)
    return isinstance(value, dict) and any(map(holds_records, value.values()))


def records_text(value, indent=""):
    """Returns JSON text with one line per object of a list, and per key of objects that contain lists."""
    if indent and not holds_records(value):
        return leaf(value)
    deeper = indent + "  "
    if isinstance(value, list):
        parts, ends = [leaf(element) for element in value], "[]"
    else:
        parts, ends = [f"{json.dumps(k)}: {records_text(v, deeper)}" for k, v in value.items()], "{}"
    return ends[0] + "\n" + ",\n".join(deeper + part for part in parts) + "\n" + indent + ends[1]


def write_records(path, content):
    """Writes the file atomically, because a run may be killed at any time."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(records_text(content) + "\n")
    os.replace(path + ".part", path)
