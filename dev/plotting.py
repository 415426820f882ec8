"""SVG plots without libraries: axes, lines, a page of panels. Used by dev/compare_logs, dev/plot_distributions and dev/experiments/study."""
import math
from xml.sax.saxutils import escape

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#444444"]  # told apart by colour-blind readers too
WIDTH, LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 960, 92, 28, 64, 34, 58
MOST_POINTS = 1200  # per line: more than the plot has pixels


def ticks(low, high, about):
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], and the decimals they need."""
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= min((1, 2, 5, 10), key=lambda f: abs((high - low) / (f * step) - about))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


def thinned(points):
    """At most about MOST_POINTS points, each bucket's least and greatest kept, so that spikes stay."""
    if len(points) <= MOST_POINTS:
        return points
    size, kept = math.ceil(2 * len(points) / MOST_POINTS), []
    for start in range(0, len(points), size):
        bucket = points[start:start + size]
        ends = {min(range(len(bucket)), key=lambda k: bucket[k][1]), max(range(len(bucket)), key=lambda k: bucket[k][1])}
        kept += [bucket[k] for k in sorted(ends)]
    return kept


def runs_of_finite(points):
    """Cuts a list of (x, y) where y is NaN or infinite: a line has a hole there."""
    run = []
    for x, y in points:
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Panel:
    """One pair of axes: data coordinates to SVG."""

    def __init__(self, top, height, x_range, y_range):
        self.top, self.height, self.x_range = top, height, x_range
        low, high = y_range
        pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self.y_range = (low - pad, high + pad)

    def x(self, value):
        low, high = self.x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(self, value):
        low, high = self.y_range
        return self.top + self.height * (high - value) / (high - low)

    def axes(self, y_label, x_label, sign=""):
        """Grid, ticks and labels; x labels only for the lowest panel (x_label not None)."""
        bottom, right, out = self.top + self.height, WIDTH - RIGHT, []
        values, decimals = ticks(*self.y_range, about=max(3, self.height / 55))
        for v in values:
            y = f"{self.y(v):.1f}"
            text = f"{v:{sign if abs(v) > 1e-12 else ''}.{decimals}f}".replace("-", "\u2212")
            out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            out.append(f'<text class="tick" text-anchor="end" x="{LEFT - 9}" y="{float(y) + 4:.1f}">{text}</text>')
        values, decimals = ticks(*self.x_range, about=8)
        for v in values:
            x = f"{self.x(v):.1f}"
            out.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
            if x_label is not None:
                out.append(f'<text class="tick" text-anchor="middle" x="{x}" y="{bottom + 20}">{v:,.{decimals}f}</text>')
        out.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = self.top + self.height / 2
        out.append(f'<text class="label" text-anchor="middle" transform="translate(20 {middle:.1f}) rotate(-90)">{escape(y_label)}</text>')
        if x_label is not None:
            out.append(f'<text class="label" text-anchor="middle" x="{(LEFT + right) / 2:.1f}" y="{bottom + 44}">{escape(x_label)}</text>')
        return out

    def line(self, points, colour, css, dash=""):
        """One polyline per stretch without holes; a lone point becomes a dot. dash: lengths of strokes and gaps."""
        out, dashed = [], f' stroke-dasharray="{dash}"' if dash else ""
        for run in runs_of_finite(points):
            at = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in thinned(run)]
            if len(at) == 1:
                x, y = at[0].split(",")
                out.append(f'<circle class="{css}" cx="{x}" cy="{y}" r="2" fill="{colour}"/>')
            else:
                out.append(f'<polyline class="{css}" stroke="{colour}"{dashed} points="{" ".join(at)}"/>')
        return out


def finite(values):
    return [v for v in values if math.isfinite(v)]


STYLE = """text { font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; fill: #333; }
.title { font-size: 17px; font-weight: 600; fill: #111; } .subtitle { font-size: 12.5px; fill: #666; }
.tick { font-size: 12px; fill: #555; } .label { font-size: 13px; } .name, .value { font-size: 13px; }
.value { font-variant-numeric: tabular-nums; fill: #555; }
.grid { stroke: #e6e6e6; stroke-width: 1; } .axis { stroke: #888; stroke-width: 1; } .zero { stroke: #777; stroke-width: 1; stroke-dasharray: 4 3; }
.raw { fill: none; stroke-width: 0.8; stroke-opacity: 0.25; } .soft { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.soft.first { stroke-width: 4; stroke-opacity: 0.5; }
circle.raw, circle.soft { fill: inherit; } .box { fill: #fff; fill-opacity: 0.9; stroke: #ddd; }"""


def page(title, subtitle, panels, over=()):
    """The SVG text. panels: (Panel, lines inside its frame, its axes), from top to bottom; over: what lies on all of them."""
    height = panels[-1][0].top + panels[-1][0].height + BOTTOM
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}">',
           f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
           f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>', f'<text class="subtitle" x="{LEFT}" y="48">{escape(subtitle)}</text>']
    for k, (panel, lines, axes) in enumerate(panels):
        out.append(f'<clipPath id="panel{k}"><rect x="{LEFT}" y="{panel.top}" width="{WIDTH - LEFT - RIGHT}" height="{panel.height}"/></clipPath>')
        out += list(axes) + [f'<g clip-path="url(#panel{k})">'] + list(lines) + ["</g>"]
    return "\n".join(out + list(over) + ["</svg>"]) + "\n"


def key(entries, top):
    """A box of (name, colour, dash) at the top right of a panel that begins at `top`."""
    width = 60 + 7.4 * max(len(name) for name, _, _ in entries)
    x, y = WIDTH - RIGHT - width - 10, top + 10
    out = [f'<rect class="box" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{12 + 21 * len(entries)}" rx="4"/>']
    for k, (name, colour, dash) in enumerate(entries):
        line_y, dashed = y + 17 + 21 * k, f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<line class="soft" stroke="{colour}"{dashed} x1="{x + 12:.1f}" x2="{x + 36:.1f}" y1="{line_y}" y2="{line_y}"/>')
        out.append(f'<text class="name" x="{x + 44:.1f}" y="{line_y + 4}">{escape(name)}</text>')
    return out
