"""SVG plots without libraries: axes, lines, legends, and pages of panels.

Used by dev/compare_logs, dev/plot_distributions, dev/experiments/study and dev/bench/comm_table.py.
Legends are to the right of the axes, so that they never cover data.
"""
import collections
import math
from xml.sax.saxutils import escape

# Distinguishable for color-blind readers.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#444444"]
LEFT, RIGHT = 92, 812  # horizontal range of the axes in pixels, for all panels
TOP, BETWEEN, BOTTOM, MARGIN = 64, 34, 58, 28
MOST_POINTS = 1200  # per line; more than the plot has pixels


def round_ticks(low, high, about):
    """Returns `about` round numbers inside [low, high], 1, 2 or 5 times a power of ten apart, and the
    number of decimals that they need."""
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= min((1, 2, 5, 10), key=lambda f: abs((high - low) / (f * step) - about))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


def log_text(value):
    """Formats a number as 0.01, 1 or 2,000, and very small or large ones as 5e-3."""
    exponent = math.floor(math.log10(value) + 1e-9)
    if -2 <= exponent <= 4:
        return f"{value:,.{max(0, -exponent)}f}"
    return f"{value / 10.0 ** exponent:.0f}e{exponent}"


def thinned(points):
    """Returns about MOST_POINTS points: the minimum and maximum of each bucket, which preserves spikes."""
    if len(points) <= MOST_POINTS:
        return points
    size, kept = math.ceil(2 * len(points) / MOST_POINTS), []
    for start in range(0, len(points), size):
        bucket = points[start:start + size]
        order = sorted(range(len(bucket)), key=lambda k: bucket[k][1])
        kept += [bucket[k] for k in sorted({order[0], order[-1]})]
    return kept


def runs_of_finite(points):
    """Splits a list of (x, y) at points where y is NaN or infinite, which become gaps in the line."""
    run = []
    for x, y in points:
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def finite(values):
    return [v for v in values if math.isfinite(v)]


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Scale:
    """One axis: the range of its values, extended at both ends by the fraction `pad`."""

    def __init__(self, low, high, pad, log=False):
        self.log = log
        low, high = self.position(low), self.position(high)
        margin = pad * (high - low)
        if high == low:
            margin = 0.05 * abs(high) or 1.0
        self.low, self.high = low - margin, high + margin

    def position(self, value):
        return math.log10(value) if self.log else value

    def share(self, value):
        """Returns the relative position on the axis, from 0 to 1."""
        return (self.position(value) - self.low) / (self.high - self.low)

    def ticks(self, about, sign=""):
        """Returns [(value, text)]. sign "+": adds a sign to positive numbers."""
        decades = self.high - self.low
        if self.log and decades >= 1:
            factors = (1, 2, 5) if 3 * decades <= 1.3 * about else (1,)
            every = max(1, round(decades / about))
            exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [f * 10.0 ** e for e in exponents if e % every == 0 for f in factors]
            found = [(v, log_text(v)) for v in values if -1e-9 <= self.share(v) <= 1 + 1e-9]
        else:
            ends = (10 ** self.low, 10 ** self.high) if self.log else (self.low, self.high)
            values, decimals = round_ticks(*ends, about)
            found = [(v, f"{v:{sign if abs(v) > 1e-12 else ''},.{decimals}f}") for v in values]
        return [(v, text.replace("-", "\u2212")) for v, text in found]


class Panel:
    """A pair of axes that maps data to SVG coordinates. Ranges are (low, high) of the data."""

    def __init__(self, top, height, x_range, y_range, log_x=False, log_y=False, pad_x=0.0):
        self.top, self.height = top, height
        self.x_scale, self.y_scale = Scale(*x_range, pad_x, log_x), Scale(*y_range, 0.05, log_y)

    def bottom(self):
        return self.top + self.height

    def x(self, value):
        return LEFT + (RIGHT - LEFT) * self.x_scale.share(value)

    def y(self, value):
        return self.top + self.height * (1 - self.y_scale.share(value))

    def axes(self, y_label, x_label, sign=""):
        """Returns grid, ticks and labels. x_label None: no text, because another panel follows below."""
        return self.y_axis(y_label, sign) + self.x_axis(x_label)

    def y_axis(self, label, sign=""):
        out = []
        for v, text in self.y_scale.ticks(max(3, self.height / 55), sign):
            y = self.y(v)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text class="tick" text-anchor="end" x="{LEFT - 9}" y="{y + 4:.1f}">{text}</text>')
        turned = f'transform="translate(20 {self.top + self.height / 2:.1f}) rotate(-90)"'
        out.append(f'<text class="label" text-anchor="middle" {turned}>{escape(label)}</text>')
        return out

    def x_axis(self, label, sign=""):
        bottom = self.bottom()
        out = [f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{bottom}" y2="{bottom}"/>']
        for v, text in self.x_scale.ticks(8, sign):
            x = f"{self.x(v):.1f}"
            out.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
            if label is not None:
                out.append(f'<text class="tick" text-anchor="middle" x="{x}" y="{bottom + 20}">{text}</text>')
        if label is not None:
            at = f'x="{(LEFT + RIGHT) / 2:.1f}" y="{bottom + 44}"'
            out.append(f'<text class="label" text-anchor="middle" {at}>{escape(label)}</text>')
        return out

    def dot(self, x, y, color, radius=3, opacity=1):
        at = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"'
        return f'<circle {at} fill="{color}" fill-opacity="{opacity}"/>'

    def line(self, points, color, css, dash=""):
        """Returns one polyline per segment between gaps; a single point becomes a dot.

        dash: lengths of strokes and gaps. On a logarithmic axis, values that are not positive are gaps."""
        out, dashed = [], f' stroke-dasharray="{dash}"' if dash else ""
        if self.y_scale.log:
            points = [(x, y if y > 0 else math.nan) for x, y in points]
        for run in runs_of_finite(points):
            at = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in thinned(run)]
            if len(at) == 1:
                x, y = at[0].split(",")
                out.append(f'<circle class="{css}" cx="{x}" cy="{y}" r="2" fill="{color}"/>')
            else:
                out.append(f'<polyline class="{css}" stroke="{color}"{dashed} points="{" ".join(at)}"/>')
        return out


# Elements to the right of the axes: SVG lines, and their right and bottom edges.
Beside = collections.namedtuple("Beside", "lines right bottom")
# One row of a legend. css: class of its stroke. value: text at the right end.
Entry = collections.namedtuple("Entry", "name color dash css value", defaults=("", "soft", ""))


def text_width(text):
    """Returns an upper estimate of the width in pixels at 13px; the font depends on the browser."""
    return 7.4 * len(text)


def legend(entries, top):
    """Returns a box of entries to the right of the panel that begins at `top`."""
    texts = [e.name + (3 * " " + e.value if e.value else "") for e in entries]
    x, width = RIGHT + 18, 56 + max(map(text_width, texts))
    height = 12 + 21 * len(entries)
    out = [f'<rect class="box" x="{x}" y="{top}" width="{width:.1f}" height="{height}" rx="4"/>']
    for k, e in enumerate(entries):
        y, dashed = top + 17 + 21 * k, f' stroke-dasharray="{e.dash}"' if e.dash else ""
        ends = f'x1="{x + 12}" x2="{x + 36}" y1="{y}" y2="{y}"'
        out.append(f'<line class="{e.css}" stroke="{e.color}"{dashed} {ends}/>')
        out.append(f'<text class="name" x="{x + 44}" y="{y + 4}">{escape(e.name)}</text>')
        if e.value:
            at = f'text-anchor="end" x="{x + width - 10:.1f}" y="{y + 4}"'
            out.append(f'<text class="value" {at}>{escape(e.value)}</text>')
    return Beside(out, x + width, top + height)


STYLE = """text { font-family: Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; }
text { fill: #333; }
.title { font-size: 17px; font-weight: 600; fill: #111; }
.subtitle { font-size: 12.5px; fill: #666; }
.tick { font-size: 12px; fill: #555; }
.label, .name, .value { font-size: 13px; }
.value { font-variant-numeric: tabular-nums; fill: #555; }
.grid { stroke: #e6e6e6; stroke-width: 1; }
.axis { stroke: #888; stroke-width: 1; }
.zero { stroke: #777; stroke-width: 1; stroke-dasharray: 4 3; }
.raw { fill: none; stroke-width: 0.8; stroke-opacity: 0.25; }
.soft { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.soft.first { stroke-width: 4; stroke-opacity: 0.5; }
circle.raw, circle.soft { fill: inherit; }
.box { fill: #fff; stroke: #ddd; }"""


def page(title, subtitle, panels, beside=()):
    """Returns the SVG text. panels: (Panel, lines inside its frame, its axes), from top to bottom.

    beside: elements to the right of the axes."""
    widths = [RIGHT + MARGIN, LEFT + 10 * len(title), LEFT + 7 * len(subtitle)]
    width = max(widths + [b.right + 12 for b in beside])
    height = max([panels[-1][0].bottom() + BOTTOM] + [b.bottom + 12 for b in beside])
    size = f'width="{width:.0f}" height="{height:.0f}"'
    view = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view}>', f"<title>{escape(title)}</title>",
           f"<style>{STYLE}</style>", f'<rect {size} fill="#fff"/>',
           f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
           f'<text class="subtitle" x="{LEFT}" y="48">{escape(subtitle)}</text>']
    for k, (panel, lines, axes) in enumerate(panels):
        frame = f'x="{LEFT}" y="{panel.top}" width="{RIGHT - LEFT}" height="{panel.height}"'
        out.append(f'<clipPath id="panel{k}"><rect {frame}/></clipPath>')
        out += [*axes, f'<g clip-path="url(#panel{k})">', *lines, "</g>"]
    return "\n".join(out + [line for b in beside for line in b.lines] + ["</svg>"]) + "\n"
