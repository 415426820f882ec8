#!/usr/bin/env python3
"""Draws the README's plot: step times over several networks, with and without SDP4Bit.

    dev/bench/step_time_picture.py dev/bench/results/comm_2gpu.json docs/step_time.svg

Reads results of dev/bench/comm.sh for the 1.3B model with micro-batch 8.
"""
import json
import os
import sys
from xml.sax.saxutils import escape

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from plotting import COLORS, STYLE

MODEL, MICRO_BATCH = "1.3b", 8
NETWORKS = {"10": "10 Gb/s per node", "25": "25 Gb/s", "sockets": "77 Gb/s", "inside": "one node, NVLink"}
PRESETS = {"bf16": ("bf16 gradients", COLORS[0]), "sdp4bit": ("SDP4Bit", COLORS[1])}
WIDTH, BARS_FROM, BARS_TO = 960, 300, 860  # pixels
TOP, BAR, BETWEEN_NETWORKS = 92, 22, 20


def read_steps(path):
    """Returns {(network, preset): ms per step} and the commit of the measurements."""
    with open(path) as file:
        rows = json.load(file)["rows"]
    rows = [r for r in rows if (r["model"], r["micro_batch"]) == (MODEL, MICRO_BATCH)]
    found = {(r["network"], r["arm"]): r for r in rows}
    missing = [f"{n}, {a}" for n in NETWORKS for a in PRESETS if (n, a) not in found]
    if missing:
        sys.exit(f"error: {path} lacks {MODEL} at micro-batch {MICRO_BATCH}: {'; '.join(missing)}")
    commits = {found[n, a]["commit"][:7] for n in NETWORKS for a in PRESETS}
    return {key: row["ms"] for key, row in found.items()}, " and ".join(sorted(commits))


def text(x, y, words, css, anchor="start", color=""):
    fill = f' style="fill: {color}"' if color else ""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(words)}</text>'


def bars(top, network, steps, longest):
    """Draws the two bars of a network, with names, times and speedup."""
    out = [text(20, top + BAR + 4, NETWORKS[network], "title")]
    for k, (preset, (name, color)) in enumerate(PRESETS.items()):
        y, ms = top + k * (BAR + 2), steps[network, preset]
        width = (BARS_TO - BARS_FROM) * ms / longest
        out.append(f'<rect x="{BARS_FROM}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
        out.append(text(BARS_FROM - 10, y + 16, name, "name", "end", color))
        out.append(text(BARS_FROM + width + 8, y + 16, f"{ms:,.0f} ms", "value"))
    times = f"{steps[network, 'bf16'] / ms:.1f} times as fast"
    out.append(text(BARS_FROM + width + 80, y + 16, times, "title"))
    return out


def picture(steps, commit):
    step = 2 * BAR + 2 + BETWEEN_NETWORKS
    height = TOP + len(NETWORKS) * step
    longest = max(steps[n, a] for n in NETWORKS for a in PRESETS)
    title = "Time per training step, by network speed between two nodes"
    subtitle = ("GPT of 1.3 billion parameters, 8 sequences of 2048 tokens per GPU and step. "
                "Two H200 as two nodes of one. The network",
                f"is emulated on one machine (dev/bench/comm.sh --shape 2x1, commit {commit}). "
                "All figures: dev/bench/README.md")
    size = f'width="{WIDTH}" height="{height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}">',
           f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", f'<rect {size} fill="#fff"/>',
           text(20, 28, title, "title")]
    out += [text(20, 50 + 18 * k, line, "subtitle") for k, line in enumerate(subtitle)]
    for k, network in enumerate(NETWORKS):
        out += bars(TOP + k * step, network, steps, longest)
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) != 3:
        print(__doc__, end="", file=sys.stderr)
        return 2
    svg = picture(*read_steps(sys.argv[1]))
    with open(sys.argv[2], "w") as file:
        file.write(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
