"""Plots of the accuracy study. Called by scratch_report.py and fork_report.py."""
import statistics

from .presets import PRESETS
from .noise import baseline_gaps, lost
import plotting  # dev/, whose path common adds
from plotting import COLORS, LEFT, RIGHT, TOP, Entry, Panel


def style(preset):
    """Returns the preset's color and dash pattern, which are the same in all plots."""
    k = list(PRESETS).index(preset) if preset in PRESETS else len(PRESETS)
    return COLORS[k % len(COLORS)], ("", "7 4", "2 4")[k // len(COLORS) % 3]


def gap_rows(results, noise):
    """Returns [(name, color, mean gap or None, half of its 95 % interval or 0, gaps)]."""
    rows = []
    for preset in results:
        values, diverged = baseline_gaps(results, preset), lost(results, preset)
        if preset != "baseline" and (values or diverged):
            name = f"{preset} ({diverged} diverged)" if diverged else preset
            mean = statistics.fmean(values) if values else None
            rows.append((name, style(preset)[0], mean, (values and noise.half_width(values)) or 0.0, values))
    return rows


def gap_plot(results, noise, title):
    """Draws one row per preset: gaps, their mean and its 95 % interval. Returns None for a single gap."""
    rows = gap_rows(results, noise)
    if sum(len(values) for *_, values in rows) < 2:
        return None
    ends = [m + side * h for _, _, m, h, _ in rows if m is not None for side in (-1, 1)]
    ends += [0.0] + [v for *_, values in rows for v in values]
    panel = Panel(TOP, 30 * len(rows), (min(ends), max(ends)), (0.4, len(rows) - 0.4), pad_x=0.02)
    zero = f"{panel.x(0):.1f}"
    axes = panel.x_axis("difference in validation loss from the baseline with the same seed", sign="+")
    names = []
    lines = [f'<line class="zero" x1="{zero}" x2="{zero}" y1="{TOP}" y2="{panel.bottom()}"/>']
    for k, (name, color, mean, half, values) in enumerate(rows):
        at = len(rows) - k - 0.5
        y = panel.y(at)
        axes.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        names.append(f'<text class="name" x="{RIGHT + 12}" y="{y + 4:.1f}">{name}</text>')
        if mean is not None:
            lines += panel.line([(mean - half, at), (mean + half, at)], color, "soft") if half else []
            lines += [panel.dot(v, at, color, 2.5, 0.5) for v in values]
            lines.append(panel.dot(mean, at, color, 4.5))
    right = RIGHT + 12 + max(plotting.text_width(name) for name, *_ in rows)
    told = "large dot: mean over seeds; small dots: seeds"
    if any(half for *_, half, _ in rows):
        told += "; bar: 95 %"
    return plotting.page(title, told, [(panel, lines, axes)], [plotting.Beside(names, right, panel.bottom())])


def curve_points(result, reference, smooth=25):
    """Returns (iteration, loss minus the reference's loss) pairs, as moving averages."""
    ours, theirs = result["train_loss"], reference["train_loss"]
    pairs = [a - b for a, b in zip(ours["mean"], theirs["mean"])]
    half = max(1, smooth // (2 * ours["every"]))
    return [((i + 1) * ours["every"], statistics.fmean(pairs[max(0, i - half):i + half + 1]))
            for i in range(len(pairs))]


def line_plot(curves, y_label, title, subtitle, log=False):
    """Draws curves, a list of (preset, points), with a linear or logarithmic y axis.

    The limits of a linear axis ignore the first tenth of the run; a logarithmic axis covers all
    points. Returns None if there are no points or all have the same value."""
    drawn = lambda y: y is not None and (y > 0 or not log)
    curves = [(preset, [(x, y) for x, y in points if drawn(y)]) for preset, points in curves]
    curves = [(preset, points) for preset, points in curves if points]
    if len({y for _, points in curves for _, y in points}) < 2:
        return None
    begin, reach = (end(x for _, points in curves for x, _ in points) for end in (min, max))
    shown = [y for _, points in curves for x, y in points if log or 10 * x > reach]
    limits = (min(shown), max(shown)) if log else [plotting.quantile(shown, q) for q in (0.005, 0.995)]
    panel = Panel(TOP, 420, (begin if 20 * begin > reach else 0.0, reach), limits, log_y=log)
    entries = [Entry(preset, *style(preset)) for preset, _ in curves]
    lines = []
    for e, (_, points) in zip(entries, curves):
        lines += panel.line(points, e.color, e.css, e.dash)
    axes = panel.axes(y_label, "iteration", sign="" if log else "+")
    return plotting.page(title, subtitle, [(panel, lines, axes)], [plotting.legend(entries, TOP)])


def plots(results, noise, model):
    """Returns {name: SVG text}."""
    seed = min(results["baseline"])
    one = {preset: seeds[seed] for preset, seeds in results.items() if seed in seeds}
    errors = lambda column: [(preset, [(e[0], e[column]) for e in r["errors"]]) for preset, r in one.items()]
    losses = [(preset, curve_points(r, one["baseline"])) for preset, r in one.items() if preset != "baseline"]
    made = {
        "gaps": gap_plot(results, noise, f"{model}: cost of each preset in validation loss"),
        "training": line_plot(losses, "loss minus the baseline's",
                              f"{model}: training loss minus the baseline's",
                              f"seed {seed}, mean of 25 iterations; the first tenth may exceed the frame"),
        "gradient_error": line_plot(errors(1), "relative error",
                                    f"{model}: error of the reduced gradient relative to the exact reduction",
                                    f"seed {seed}; ‖reduced − exact‖ / ‖exact‖", log=True),
        "replica_error": line_plot(errors(2), "ratio",
                                   f"{model}: error of the model weights relative to bf16 rounding",
                                   f"seed {seed}", log=True),
    }
    return {name: text for name, text in made.items() if text}
