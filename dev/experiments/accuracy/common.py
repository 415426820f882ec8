"""Errors, paths and JSON input shared by all modules of the accuracy study."""
import json
import math
import os
import sys

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, os.path.join(ROOT, "dev"))
# Flags that change only how data is sent, not the results. They are not part of the settings.
TRANSPORT_FLAGS = ["--emulate-nodes"]


class StudyError(Exception):
    def __init__(self, code, what):
        super().__init__(what)
        self.code = code


def is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as reason:
        raise StudyError(5, f"{path}: {reason.strerror}") from None
    except ValueError:
        raise StudyError(5, f"{path} is not a result of this program; remove it") from None


def without_transport(flags):
    return [f for f in flags if f not in TRANSPORT_FLAGS]


def difference(a, b):
    names = sorted(k for k in set(a) | set(b) if a.get(k) != b.get(k))
    return ", ".join(f"{k} {a.get(k)} and {b.get(k)}" for k in names)
