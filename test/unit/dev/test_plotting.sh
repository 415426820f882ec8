#!/usr/bin/env bash
# Plots (dev/plotting.py) and JSON files of measurements (dev/tables.py): ticks, validity of all
# plots in the repository, and plots and pages that match the committed results.
set -u
cd "$(dirname "$0")/../../.." || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench:dev python3 - "$folder" <<'END'
import glob, json, os, re, subprocess, sys
import xml.etree.ElementTree as ET
import comm_table, plotting, tables

folder, failures = sys.argv[1], 0


def same(name, got, wanted):
    global failures
    print("ok " + name if got == wanted else f"not ok {name}: {got} instead of {wanted}")
    failures += got != wanted


# --- ticks ---
texts = lambda *scale, about=8, **more: [t for _, t in plotting.Scale(*scale, 0.0, **more).ticks(about)]
same("powers of ten", texts(2e-7, 3.0, log=True),
     ["1e−6", "1e−5", "1e−4", "1e−3", "0.01", "0.1", "1"])
same("every second power", texts(2e-9, 3.0, log=True, about=5), ["1e−8", "1e−6", "1e−4", "0.01", "1"])
same("less than three decades", texts(8.0, 2500.0, log=True),
     ["10", "20", "50", "100", "200", "500", "1,000", "2,000"])
same("less than one decade", texts(0.12, 0.16, log=True, about=4), ["0.12", "0.13", "0.14", "0.15", "0.16"])
same("a linear axis", texts(-1.0, 1.0, about=4), ["−1.0", "−0.5", "0.0", "0.5", "1.0"])
log = plotting.Panel(0, 100, (1.0, 100.0), (1e-4, 1.0), log_x=True, log_y=True)
middle = (plotting.LEFT + plotting.RIGHT) / 2
same("positions on a logarithmic axis", (log.x(10.0), round(log.y(1e-2), 9)), (middle, 50.0))
holed = log.line([(1, 1), (2, 0.1), (3, 0.0), (4, 1), (5, 1)], "#000", "soft")
same("no logarithm of zero", len(holed), 2)


# --- plots ---
def numbers(text):
    return [float(n) for n in re.findall(r"-?[\d.]+", text)]


def drawn_points(group):
    """Pixels of the data inside a panel."""
    for shape in group:
        if shape.tag.endswith("polyline"):
            flat = numbers(shape.get("points"))
            yield from zip(flat[::2], flat[1::2])
        elif shape.tag.endswith("circle"):
            yield float(shape.get("cx")), float(shape.get("cy"))
        elif shape.get("class") == "zero":  # an axis may reach from the data to zero
            x1, x2, y1, y2 = (float(shape.get(k)) for k in ("x1", "x2", "y1", "y2"))
            yield (x1 + x2) / 2, (y1 + y2) / 2


def faults(path):
    """What is wrong with a picture."""
    root, found = ET.parse(path).getroot(), []
    tag = lambda name: [e for e in root.iter() if e.tag.endswith("}" + name)]
    frames = [{k: float(r.get(k)) for k in ("x", "y", "width", "height")} for c in tag("clipPath") for r in c]
    place = lambda r: [float(r.get(k)) for k in ("x", "y", "width", "height")]
    boxes = [place(r) for r in tag("rect") if r.get("class") == "box"]
    width, height = numbers(root.get("viewBox"))[2:]
    for x, y, w, h in boxes:
        if x < max(f["x"] + f["width"] for f in frames) or x + w > width or y + h > height:
            found.append("the legend covers the axes or leaves the page")
    for frame, group in zip(frames, (g for g in tag("g"))):
        right, bottom = frame["x"] + frame["width"], frame["y"] + frame["height"]
        inside = [(x, y) for x, y in drawn_points(group)
                  if frame["x"] <= x <= right and frame["y"] <= y <= bottom]
        for values, low, high, what in (([x for x, _ in inside], frame["x"], right, "x"),
                                        ([y for _, y in inside], frame["y"], bottom, "y")):
            if max(min(values) - low, high - max(values)) > max(20, 0.06 * (high - low)):
                found.append(f"the {what} axis runs past the data")
    if any("log10" in "".join(t.itertext()) for t in tag("text")):
        found.append("an axis shows logarithms instead of values")
    return found


pictures = sorted(glob.glob("dev/*/results/*.svg"))
same("the repository has plots", len(pictures) >= 12, True)
for path in pictures:
    same("picture " + path, faults(path), [])
subtitle = lambda path: next(t.text for t in ET.parse(path).getroot().iter() if t.get("class") == "subtitle")
content_of = lambda path: open(path).read()
for name in ("2gpu", "4gpu"):
    path = f"dev/bench/results/comm_{name}"
    comm_table.plot(json.load(open(path + ".json"))["rows"], os.path.join(folder, "comm.svg"))
    path += ".svg"
    same(f"{path} matches the committed results", content_of(folder + "/comm.svg") == content_of(path), True)
    missing = [word for word in ("emulated", "loopback", "25 Gb/s", "10 Gb/s") if word not in subtitle(path)]
    same(f"{path} names the network", missing, [])
results = "dev/experiments/results"
for model in ("125m", "350m"):
    report = ["dev/experiments/study", "report", f"{results}/{model}", "--out", folder]
    subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
    made = sorted(os.path.basename(p) for p in glob.glob(f"{folder}/{model}*"))
    same(f"files of the study's page {model}", made, sorted(f"{model}{end}" for end in
         (".md", "_gaps.svg", "_gradient_error.svg", "_replica_error.svg", "_training.svg")))
    for name in made:
        same(f"{name} matches the committed results",
             content_of(f"{folder}/{name}") == content_of(f"{results}/{name}"), True)
    prose = [line for line in open(f"{results}/{model}.md") if not line.startswith("|")]
    same(f"lines of {model}.md", max(map(len, prose)) <= 101, True)

# --- JSON files ---
record = {"a": 1, "b": [1, 2], "c": [{"d": 1e-9}]}
parts = {"k": {"rows": [record]}, "n": {"a": 1}}
content = {"what": "x", "limits": [1, 2], "rows": [record, record], "parts": parts}
path = os.path.join(folder, "new", "made.json")
tables.write_records(path, content)
text = open(path).read()
same("written content is read back", json.loads(text), content)
same("no temporary file is left", os.listdir(os.path.dirname(path)), ["made.json"])
same("a record is one line", text.count("\n    " + tables.leaf(record)), 2)
same("a nested record is one line", text.count("\n        " + tables.leaf(record)), 1)
for path in sorted(glob.glob("dev/bench/results/*.json") + glob.glob("dev/experiments/results/*/*.json")):
    text = open(path).read()
    lone = re.findall(r"^\s*-?[\d.]+(?:e[-+]?\d+)?,?$", text, re.M)
    same("no line has a single number in " + path, lone, [])
    if not path.endswith(("/codec.json", "/node_hop_4gpu.json")):  # a different format
        same("format of " + path, text == tables.records_text(json.loads(text)) + "\n", True)
raise SystemExit(failures > 0)
END
