"""`study report` of a sweep: tables of learning rates and lengths. Called by ../study."""
import os
import statistics

from .noise import classify, mean_of, own_half_width
from .presets import trains_alone
from .scratch_report import write_page
from .statements import corpus, items, paragraph
from .sweep import best_cells, fractions, losses_of, read_sweep, reference_cell
from tables import cell as number  # dev/, whose path common adds

GOAL = 0.77  # fraction of AdamW's steps; see ../README.md


def row(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def heads(*names):
    return [row(*names), "|---" * len(names) + "|"]


def layout_text(layout):
    return f"{layout[0]} x {layout[1]}"


def mean(values):
    return statistics.fmean(values) if values else None


def loss_text(seeds):
    losses = list(losses_of(seeds).values())
    lost = f" ({len(seeds) - len(losses)} diverged)" if len(losses) < len(seeds) else ""
    return number(mean(losses), ".5f") + lost


def run_table(results):
    lines = heads("preset", "nodes x ranks", "iterations", "learning rate", "seeds", "validation loss",
                  "standard deviation", "tokens/s")
    for cell, seeds in results.items():
        losses = list(losses_of(seeds).values())
        deviation = statistics.stdev(losses) if len(losses) > 1 else None
        lines.append(row(cell.preset, layout_text(cell.layout), cell.iterations, f"{cell.lr:g}", len(seeds),
                         loss_text(seeds), number(deviation, ".5f"),
                         number(mean_of(seeds, "tokens_per_second"), ",.0f")))
    return lines


def place_in_grid(rate, rates):
    if len(rates) == 1:
        return "the only one"
    return {min(rates): "the smallest", max(rates): "the largest"}.get(rate, f"one of {len(rates)}")


def best_table(results, best):
    lines = heads("preset", "nodes x ranks", "iterations", "best learning rate", "of those run",
                  "validation loss", "compared with", "seeds", "gap", "95 %", "gap %", "outcome")
    for key, (cell, rates) in best.items():
        reference = reference_cell(best, key)
        ours, theirs = losses_of(results[cell]), losses_of(results[reference]) if reference else {}
        common = sorted(set(ours) & set(theirs))
        gaps = [ours[s] - theirs[s] for s in common]
        half, gap = own_half_width(gaps), mean(gaps)
        said = "diverged" if len(ours) < len(results[cell]) else classify(gap, half) if gaps else ""
        percent = 100 * gap / mean([theirs[s] for s in common]) if gaps else None
        lines.append(row(cell.preset, layout_text(cell.layout), cell.iterations, f"{cell.lr:g}",
                         place_in_grid(cell.lr, rates), loss_text(results[cell]),
                         f"{reference.preset}, lr {reference.lr:g}" if reference else "-", len(gaps),
                         number(gap, "+.5f"), number(half, ".5f"), number(percent, "+.3f"), said))
    return lines


def outcome(middle, half):
    """Compares the fraction of steps with 1 and with the goal."""
    if half is None:
        return "one seed: inconclusive"
    words = lambda below, above: {"better": below, "worse": above}
    steps = words("fewer steps", "more steps").get(classify(middle - 1, half), "inconclusive")
    goal = words("reached", "missed").get(classify(middle - GOAL, half), "inconclusive")
    return f"{steps}; goal {goal}"


def steps_table(results, best):
    lines = heads("preset", "nodes x ranks", "baseline", "fraction of its steps, by seed", "mean", "95 %",
                  f"outcome (goal {GOAL})")
    for preset, layout in dict.fromkeys(key[:2] for key in best if key[0] != "baseline"):
        reference, found = fractions(results, best, preset, layout)
        if trains_alone(preset) or not found:
            continue
        exact = [value for value, kind in found.values() if kind == "="]
        bounded = len(exact) < len(found)
        middle, half = (None, None) if bounded else (mean(exact), own_half_width(exact))
        each = ", ".join(f"{seed}: {kind.strip('=')}{value:.3f}" for seed, (value, kind) in found.items())
        lines.append(row(preset, layout_text(layout), f"{reference.iterations} iterations, lr {reference.lr:g}",
                         each, number(middle, ".3f"), number(half, ".3f"),
                         "outside the lengths run" if bounded else outcome(middle, half)))
    return lines if len(lines) > 2 else []


def explanations(best):
    edges = [f"{cell.preset}, {cell.iterations} iterations" for cell, rates in best.values()
             if len(rates) > 1 and cell.lr in (min(rates), max(rates))]
    local = any(trains_alone(key[0]) for key in best)
    return items(
        "*gap*: validation loss minus the loss of the preset it is compared with, both with their best learning "
        "rate, at equal iterations and seeds. The intervals are Student's t over the gaps, not corrected for "
        "multiple comparisons nor for the choice of learning rates.",
        "Local steps are compared with data-parallel runs of the same optimizer, at equal tokens." * local,
        "*fraction of its steps*: iterations of a complete run with the baseline's final loss at the same seed, "
        "divided by the baseline's iterations. Interpolated linearly between the logarithms of the lengths run; "
        "< and > are bounds outside these lengths.",
        "*tokens/s*: from the log; not a speed measurement, because clock rates were not controlled.",
        f"**The best learning rate is at the edge of those run** ({'; '.join(edges)}), so a better one "
        "may exist." if edges else "")


def page_text(results, best, model):
    runs = [r for seeds in results.values() for r in seeds.values()]
    s = runs[0]["settings"]
    of_all = lambda name: ", ".join(sorted({str(r.get(name, "unknown")) for r in runs}))
    lines = [f"# Learning rates and lengths: {model}, batches of {s['global_batch_size']} sequences", ""]
    lines += paragraph(
        f"{runs[0]['parameters']:,} parameters on {of_all('device')}, commit {of_all('commit')}.",
        f"Flags in addition to the study's own: `{' '.join(s['flags']) or 'none'}`.",
        corpus(runs),
        f"Every run has its own schedule: a warm-up over {100 * s['warmup_fraction']:g} % of its iterations and "
        "a cosine decay to zero.",
        f"All runs are evaluated at their end on the same {s['eval_iterations'] * s['global_batch_size']} "
        "validation samples.",
        "[The study](../README.md#muon-against-adamw) describes the plan. Made by `study sweep`.")
    steps = steps_table(results, best)
    if steps:
        lines += ["", "## Steps to the baseline's loss", "", *steps]
    lines += ["", "## Best learning rates", "", *best_table(results, best), "", "## Runs", "",
              *run_table(results), "", "## Columns", "", *explanations(best)]
    return "\n".join(lines) + "\n"


def report(options):
    results = read_sweep(options.folders)
    best = best_cells(results)
    model = next(r for seeds in results.values() for r in seeds.values())["settings"]["model"]
    write_page(options.out, f"{model}-sweep", page_text(results, best, model), {})
    print("\n".join([*steps_table(results, best), "", *best_table(results, best), "", *run_table(results)]))
    print(f"\nwritten: {os.path.join(options.out, model)}-sweep.md")
    return 0
