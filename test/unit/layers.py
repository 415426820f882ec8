#!/usr/bin/env python3
"""Checks the layers of llmc/ and sdp4bit/: a directory uses only itself and lower directories.

    test/unit/layers.py includes      a file includes only headers of its own and of lower directories
    test/unit/layers.py cycles        no module includes itself through others
    test/unit/layers.py calls BUILD   objects call only functions of their own and of lower directories
                                     (read from BUILD/obj with nm)
Prints one line per violation. Exit code 1 if there are any.
"""
import os
import re
import subprocess
import sys

# Lowest first. The headers directly in llmc/ are the interface to the hardware; device.h
# depends only on llmc/base/base.h. The backends implement them and may use every layer below
# llmc/state.
LAYERS = ["llmc/base", "llmc/ops.h", "llmc/ranks", "llmc/comm.h", "llmc/groups", "llmc/data", "sdp4bit",
          "llmc/config", "llmc/log", "llmc/state", "llmc/model", "llmc/checkpoint", "llmc/plan", "llmc/run"]
BACKENDS = ("llmc/cpu", "llmc/cuda")


def layer(path):
    """Returns the index of a file's layer, or None."""
    if path == "llmc/device.h":
        return 0
    if path == "llmc/ops_fp8.h":
        return LAYERS.index("llmc/ops.h")
    if path.startswith(BACKENDS):
        return LAYERS.index("llmc/state")
    for i, name in enumerate(LAYERS):
        if path == name or path.startswith(name + "/"):
            return i
    return None


def sources():
    found = [os.path.join(folder, name) for top in ("llmc", "sdp4bit") for folder, _, names in os.walk(top)
             for name in names if re.search(r"\.(c|h|cu|cuh|cpp)$", name)]
    if len(found) < 100:
        sys.exit(f"only {len(found)} sources found")
    return sorted(found)


def included(path):
    with open(path, encoding="utf-8") as file:
        return re.findall(r'^#include "([^"]+)"', file.read(), re.M)


def check_includes():
    for path in sources():
        own = layer(path)
        if own is None:
            yield f"{path} is in no layer"
            continue
        for header in included(path):
            device_code = header.startswith(BACKENDS) and re.search(r"(_cpu\.c|\.cu|\.cuh)$", path)
            at = 0 if device_code else layer(header)
            if at is None or at > own:
                yield f"{path} includes {header} of a higher layer"


def module(path):
    """Returns a file's module: a header and the sources of the same name."""
    return re.sub(r"\.(c|h|cu|cuh|cpp)$", "", path)


def check_cycles():
    graph, done = {}, set()
    for path in sources():
        uses = {module(header) for header in included(path)} - {module(path)}
        graph.setdefault(module(path), set()).update(uses)

    def visit(name, trail):
        if name in trail:
            yield " -> ".join(trail[trail.index(name):] + [name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                yield from visit(other, trail + [name])
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, [])


def symbols(build):
    """Yields (source file, defined?, symbol) for every global symbol of the host library."""
    objects = [path[:-2] + ".o" for path in (os.path.join(build, "obj", source) for source in sources())
               if path.endswith(".c") and os.path.exists(path[:-2] + ".o")]
    if len(objects) < 80:
        sys.exit(f"only {len(objects)} objects in {build}/obj; run make")
    text = subprocess.run(["nm", "-A", *objects], stdout=subprocess.PIPE, check=True, text=True).stdout
    for line in text.splitlines():
        place, _, rest = line.partition(":")
        kind, name = rest.split()[-2:]
        source = os.path.relpath(place, os.path.join(build, "obj"))[:-2] + ".c"
        if kind == "U" or kind in "TDBRVW":
            yield source, kind != "U", name


def check_calls(build):
    found = list(symbols(build))
    home = {name: source for source, defined, name in found
            if defined and not source.startswith(BACKENDS) and not source.endswith("_cpu.c")}
    for source, defined, name in found:
        if not defined and name in home and layer(home[name]) > layer(source):
            yield f"{source} uses {name} of {home[name]}"


def main():
    checks = {"includes": check_includes, "cycles": check_cycles, "calls": lambda: check_calls(sys.argv[2])}
    lines = sorted(set(checks[sys.argv[1]]()))
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


sys.exit(main())
