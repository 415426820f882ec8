"""`study report` of forks: a page of tables and plots. Called by ../study.

Forks with the same starting point and length form a group; the page has one table per group. A fork's
gap is its loss minus the mean loss of the baseline and its replicates with the same data seed.
"""
import os

from .common import StudyError, read_json
from .noise import MARGIN, lost
from .plots import gap_plot, plots
from .scratch_report import write_page
from .statements import (corpus, fp8_statements, items, meanings, ordering, paragraph, single_comparisons,
                         table)
from .replicates import ForkNoise, Chance, compared, families, power_table, read_forks


def bit_identical(presets):
    """Reports whether forks with lossless weights are bitwise identical to the baseline, as they must be."""
    pairs = [(s, r["bits"] == presets["baseline"][s]["bits"]) for s, r in presets.get("lossless", {}).items()
             if s in presets.get("baseline", {})]
    if not pairs:
        return []
    wrong = [str(s) for s, same in pairs if not same]
    if wrong:
        return ["- lossless is bitwise identical to the baseline: **does not hold** for data "
                + ", ".join(wrong)]
    return [f"- lossless is bitwise identical to the baseline: holds, every loss and gradient norm in "
            f"{len(pairs)} {'fork' if len(pairs) == 1 else 'forks'}"]


def chance_text(chance, presets):
    if chance.deviation is None:
        return ["**Random variation** was not measured, because no data seed has a replicate."]
    most = max(len(losses) for losses in families(presets).values())
    return paragraph(
        f"**Random variation.** Up to {most} runs per data seed differ only in the last bits of the "
        "learning rate.",
        f"Their gaps have a standard deviation of {chance.of_gap():.6f} ({chance.freedom} "
        f"{'degree' if chance.freedom == 1 else 'degrees'} of freedom).",
        "This is a lower bound for the random variation of a gap, because a preset's rounding perturbs "
        "every step.")


def section(group, presets, name):
    """Returns (lines of the page, plots) for one group."""
    point, length = group
    results = compared(presets)
    chance = Chance(presets)
    noise = ForkNoise()
    some = next(iter(results["baseline"].values()))
    batch, seq = some["settings"]["global_batch_size"], some["seq_length"]
    before = some["settings"].get("trunk_batch_size", batch)
    tokens = lambda samples: f"{samples * seq / 1e6:.{1 if samples * seq >= 1e6 else 2}f} M tokens"
    lines = [f"## From iteration {point}, {length} iterations", ""]
    lines += paragraph(f"The base run had read {tokens(point * before)}.",
                       f"A fork reads {tokens(length * batch)}.",
                       f"{some['settings']['ranks']} ranks as "
                       f"{some['settings']['ranks'] // some['settings']['ranks_per_node']} nodes.")
    rows = table(results, noise)
    lines += ["", rows[0].replace("seeds", "forks"), *rows[1:], "", *chance_text(chance, presets)]
    said = ordering(results, noise) + fp8_statements(results, noise) + bit_identical(presets)
    lines += ["", *said] if said else []
    several = any(len(runs) > lost(results, preset)
                  for preset, runs in results.items() if preset != "baseline")
    title = f"{name}: from iteration {point}, {length} iterations"
    # A single preset needs no plot; its gap is in the table.
    pictures = {"gaps": gap_plot(results, noise, title)} if several and len(results) > 2 else {}
    for kind, made in plots(results, noise, title).items():
        if kind.endswith("_error"):
            pictures[kind] = made
    pictures = {f"p{point}_l{length}_{kind}": text for kind, text in pictures.items() if text}
    lines += [""] + [f"![{kind}]({name}_{kind}.svg)" for kind in pictures] if pictures else []
    return lines, pictures


def page(found, name, model):
    runs = [r for presets in found.values() for seeds in presets.values() for r in seeds.values()]
    of_all = lambda key: ", ".join(sorted({r[key] for r in runs}))
    lines = [f"# Accuracy of forks: {model}", ""]
    lines += paragraph(
        f"{runs[0]['parameters']:,} parameters, {of_all('device')}, commit {of_all('commit')}.",
        corpus(runs),
        "[The study](../README.md) explains what these forks can show.")
    lines += ["", *items(
        "Every preset starts from the weights and Adam moments of the base run and trains while the "
        "learning rate decays to zero. Presets with the same data seed read the same data.",
        "The gap of a fork is its loss minus the mean loss of the baseline and its replicates with the same "
        "data seed. Losses are computed on the whole validation split.",
        "A preset's 95 % interval is a Student's t interval over its own gaps, one per data seed.",
        f"A preset is as good as the baseline if its whole interval is below +{MARGIN}.",
        " ".join(single_comparisons(max(len(compared(presets)) for presets in found.values()) - 1)))]
    pictures = {}
    for group, presets in sorted(found.items()):
        if "baseline" not in presets:
            raise StudyError(5, f"no baseline from iteration {group[0]}, {group[1]} iterations; run it first")
        made, drawn = section(group, presets, name)
        lines += ["", *made]
        pictures.update(drawn)
    try:
        rows, plan = power_table(found, MARGIN)
        lines += ["", "## Number of forks needed for an interval", "",
                  f"Forks per preset for a 95 % interval of ±{MARGIN}, by the standard deviation of the gaps",
                  "and by its upper 90 % limit:", "", *rows, "", *paragraph(plan)]
    except StudyError:  # no replicates
        pass
    lines += ["", *meanings("a fork")]
    return "\n".join(lines) + "\n", pictures


def report(options):
    found = read_forks(options.folders)
    model = next(iter(next(iter(next(iter(found.values())).values())).values()))["settings"]["model"]
    name = f"{model}-branches"
    text, pictures = page(found, name, model)
    write_page(options.out, name, text, pictures)
    print(text)
    print(f"written: {os.path.join(options.out, name)}.md and {len(pictures)} plots")
    return 0


def holds_forks(folder):
    """Returns true if the folder's first result is a fork."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [n for n in names if n.endswith(".json")]
    if "trunk.json" in names:
        return True
    if not names:
        return False
    try:
        return "point" in read_json(os.path.join(folder, names[0]))["settings"]
    except (KeyError, TypeError, StudyError):
        return False
