"""`study sweep`: runs from initial weights with several learning rates and lengths. Called by ../study.

Every run has a complete schedule: a warm-up, then a cosine decay to zero at its own last iteration.
Runs of a sweep may differ in learning rate, length and layout (nodes x ranks); the other settings must
be equal.
"""
import argparse
import math
import os
from collections import namedtuple

from .presets import PRESETS, named_presets, numbers, reference_of
from .common import StudyError
from .scratch import add_result, results_in, settings_of, trainer_flags
from .trainer import Job, work_through

VARIED = ("lr", "iterations", "ranks", "ranks_per_node")
# A line of the report's tables. layout: (nodes, ranks per node).
Cell = namedtuple("Cell", "preset layout iterations lr")


def folder(options):
    return os.path.join(options.results, f"{options.name}-sweep")


def holds_sweep(path):
    return os.path.basename(os.path.normpath(path)).endswith("-sweep")


def learning_rates(text):
    try:
        rates = [float(rate) for rate in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError
        return rates
    except ValueError:
        raise StudyError(2, f"--lrs {text}: must be positive numbers separated by commas") from None


def cell_of(preset, settings):
    per_node = settings["ranks_per_node"]
    return Cell(preset, (settings["ranks"] // per_node, per_node), settings["iterations"], settings["lr"])


def name_of(cell):
    return f"{cell.preset}.{cell.layout[0]}x{cell.layout[1]}.lr{cell.lr:g}.i{cell.iterations}"


def job(options, preset, settings, seed):
    name = f"{name_of(cell_of(preset, settings))}.{seed}"
    one = argparse.Namespace(**{**vars(options), "iterations": settings["iterations"]})
    return Job(name=name, preset=PRESETS[preset][0],
               flags=[*trainer_flags(one, preset, seed), "--lr", repr(settings["lr"]), "--min-lr", "0"],
               raw=os.path.join(options.results, "raw", f"{options.name}-sweep", name),
               path=os.path.join(folder(options), name + ".json"), settings=settings,
               labels={"arm": preset, "seed": seed})


def train_sweep(options):
    lengths, rates = numbers(options.iterations, "--iterations"), learning_rates(options.lrs)
    seeds = numbers(options.seeds, "--seeds")
    if min(lengths) < 1:
        raise StudyError(2, f"--iterations {options.iterations}: must be positive")
    settings = settings_of(options)
    return work_through(options, [
        job(options, preset, {**settings, "iterations": length, "lr": rate}, seed)
        for preset in named_presets(options.presets) for length in lengths for rate in rates
        for seed in seeds])


def read_sweep(folders):
    """Returns {cell: {seed: result}}, sorted like the report's tables."""
    found = {}
    for result in results_in(folders, VARIED):
        cell = cell_of(result["arm"], result["settings"])
        add_result(found.setdefault(cell, {}), result, name_of(cell))
    if not any(cell.preset == "baseline" for cell in found):
        raise StudyError(5, f"no baseline result in {', '.join(folders)}; run the baseline first")
    order = list(PRESETS)
    place = lambda cell: order.index(cell.preset) if cell.preset in order else len(order)
    return {cell: found[cell] for cell in sorted(found, key=lambda c: (place(c), *c))}


def best_cells(results):
    """Returns {(preset, layout, iterations): (cell with the lowest loss, number of learning rates)}.

    Losses are compared over the seeds that all learning rates have."""
    rates = {}
    for cell in results:
        rates.setdefault(cell[:3], []).append(cell)
    best = {}
    for key, cells in rates.items():
        common = set.intersection(*(set(results[c]) for c in cells))
        best[key] = min(cells, key=lambda c: total_loss(results[c], common)), [c.lr for c in cells]
    return best


def total_loss(seeds, common):
    losses = [seeds[s]["valid_loss"] for s in common or seeds]
    return math.inf if None in losses else sum(losses) / len(losses)


def reference_cell(best, key):
    """Returns the best cell of the reference with the same number of iterations, if possible of the same
    layout. None if there is none."""
    preset, layout, iterations = key
    found = [k for k in best if k[0] == reference_of(preset) and k[2] == iterations]
    return best[min(found, key=lambda k: (k[1] != layout, k[1]))][0] if found else None


def losses_of(seeds):
    return {s: r["valid_loss"] for s, r in seeds.items() if r["valid_loss"] is not None}


def crossing(curve, target):
    """Returns the number of iterations after which a curve [(iterations, loss)] reaches the target.

    Interpolates linearly between the logarithms of the iterations. Returns (iterations, "=") or a bound:
    (first, "<") if no shorter run ended above the target, (last, ">") if no run reaches it. The loss of
    a run that diverged is infinite."""
    before = None
    for iterations, loss in sorted(curve):
        if loss <= target:
            if before is None or before[1] == math.inf:
                return iterations, "<" if loss < target else "="
            part = (before[1] - target) / (before[1] - loss)
            return math.exp(math.log(before[0]) * (1 - part) + math.log(iterations) * part), "="
        before = iterations, loss
    return before[0], ">"


def fractions(results, best, preset, layout):
    """Returns (reference cell, {seed: (fraction, "=", "<" or ">")}): the part of the baseline's longest
    run after which a complete run of the preset reaches the same final loss. (None, {}) without one."""
    lengths = [key[2] for key in best if key[0] == "baseline"]
    reference = reference_cell(best, (preset, layout, max(lengths)))
    if reference is None or reference.preset != "baseline":
        return None, {}
    cells = [best[key][0] for key in best if key[:2] == (preset, layout)]
    targets, found = losses_of(results[reference]), {}
    for seed, target in targets.items():
        curve = [(c.iterations, losses_of(results[c]).get(seed, math.inf))
                 for c in cells if seed in results[c]]
        if curve:
            at, kind = crossing(curve, target)
            found[seed] = at / reference.iterations, kind
    return reference, found
