"""Printed tables, JSON lines and JSON files of dev/experiments/study and dev/bench.

A JSON file has one record a line, so that a change of one record shows as one line.
"""
import contextlib
import json
import math
import os


def cell(value, form, missing="-"):
    """The number in this format; `missing` for None and for what is not finite."""
    return missing if value is None or not math.isfinite(value) else format(value, form)


def print_columns(columns, rows):
    """columns: (name, width, text of a row); a negative width puts the column to the left."""
    print(" ".join("%*s" % (width, name) for name, width, _ in columns))
    for row in rows:
        print(" ".join("%*s" % (width, text(row)) for _, width, text in columns))


def number_column(name, width, form, value):
    """A column of numbers: value(row), or the row's entry of that name."""
    get = value if callable(value) else lambda row: row.get(value)
    return name, width, lambda row: cell(get(row), form)


def json_lines(path):
    """The objects of a JSON lines file; [] without the file.

    A line that is empty, or cut short when a run was ended, is left out."""
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
    """A list of objects, or an object with such a list somewhere in its values."""
    if isinstance(value, list):
        return any(isinstance(element, dict) for element in value)
    return isinstance(value, dict) and any(map(holds_records, value.values()))


def records_text(value, indent=""):
    """JSON text: each object of a list on a line, and each key of what holds such lists."""
    if indent and not holds_records(value):
        return leaf(value)
    deeper = indent + "  "
    if isinstance(value, list):
        parts, ends = [leaf(element) for element in value], "[]"
    else:
        parts, ends = [f"{json.dumps(k)}: {records_text(v, deeper)}" for k, v in value.items()], "{}"
    return ends[0] + "\n" + ",\n".join(deeper + part for part in parts) + "\n" + indent + ends[1]


def write_records(path, content):
    """Writes the object whole or not at all: a run may be ended at any time."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(records_text(content) + "\n")
    os.replace(path + ".part", path)
