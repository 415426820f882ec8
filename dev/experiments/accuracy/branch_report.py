"""`study report` of branches: a page of tables and plots. Called by ../study.

Each group of branches that left one point and have one length gets a table. Gaps are paired by data
seed. The reference of a data seed is the mean of the baseline and its twins there.
"""
import os

from .common import StudyError, read_json
from .noise import MARGIN, lost
from .plots import gap_plot, plots
from .scratch_report import write_page
from .statements import meanings, ordering, paragraph, single_comparisons, table
from .twins import BranchNoise, Chance, compared, families, power_table, read_branches


def bit_identical(presets):
    """Whether lossless weights gave the baseline's bits, as they must."""
    pairs = [(s, r["bits"] == presets["baseline"][s]["bits"]) for s, r in presets.get("lossless", {}).items()
             if s in presets.get("baseline", {})]
    if not pairs:
        return []
    wrong = [str(s) for s, same in pairs if not same]
    if wrong:
        return [f"- lossless gives the baseline's bits: **does not hold** for data {', '.join(wrong)}"]
    return [f"- lossless gives the baseline's bits: holds, every loss and gradient norm of {len(pairs)} branches"]


def chance_text(chance, presets):
    if chance.deviation is None:
        return ["**Chance.** No data seed has a twin: what chance does was not measured."]
    most = max(len(losses) for losses in families(presets).values())
    return paragraph(
        f"**Chance.** Up to {most} runs of a data seed differ in one bit of the learning rate alone.",
        f"Their gaps have a standard deviation of {chance.of_gap():.6f} ({chance.freedom} degrees of freedom).",
        "That is the least that chance does to a gap: a preset's rounding disturbs every step.")


def section(group, presets, name):
    """(lines of the page, pictures) of one group."""
    point, length = group
    results = compared(presets)
    chance = Chance(presets)
    noise = BranchNoise()
    some = next(iter(results["baseline"].values()))
    batch, seq = some["settings"]["global_batch_size"], some["seq_length"]
    before = some["settings"].get("trunk_batch_size", batch)
    tokens = lambda samples: f"{samples * seq / 1e6:.{1 if samples * seq >= 1e6 else 2}f} M tokens"
    lines = [f"## From iteration {point} over {length}", ""]
    lines += paragraph(f"The trunk had read {tokens(point * before)}. A branch reads {tokens(length * batch)}.",
                       f"{some['settings']['ranks']} ranks as "
                       f"{some['settings']['ranks'] // some['settings']['ranks_per_node']} nodes.")
    rows = table(results, noise)
    lines += ["", rows[0].replace("seeds", "branches"), *rows[1:], "", *chance_text(chance, presets)]
    said = ordering(results, noise) + bit_identical(presets)
    lines += ["", *said] if said else []
    several = any(len(runs) > lost(results, preset) for preset, runs in results.items() if preset != "baseline")
    title = f"{name}: from iteration {point} over {length}"
    # One preset's gap says as much in its row.
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
    lines = [f"# Accuracy: branches of a {model} run", ""]
    lines += paragraph(
        f"{runs[0]['parameters']:,} parameters, {of_all('device')}, commit {of_all('commit')}.",
        f"Corpus: `{of_all('data')}`. Every preset goes on from the trunk's weights and moments, with the same "
        "data for one data seed, while the learning rate falls to zero.",
        "All are validated on the same samples, the whole validation split.",
        "Gaps are between branches of the same data seed. The baseline of a data seed is the mean of its twins.",
        "A preset's 95 % interval comes from the scatter of its own gaps over data seeds (Student's t, "
        "one degree of freedom less than branches).",
        f"A preset is as good as the baseline where its whole interval lies below +{MARGIN}.",
        *single_comparisons(max(len(compared(presets)) for presets in found.values()) - 1),
        "[The study](../README.md) says what these branches can tell.")
    pictures = {}
    for group, presets in sorted(found.items()):
        if "baseline" not in presets:
            raise StudyError(5, f"no baseline from iteration {group[0]} over {group[1]}; run it first")
        made, drawn = section(group, presets, name)
        lines += ["", *made]
        pictures.update(drawn)
    try:
        rows, plan = power_table(found, MARGIN)
        lines += ["", "## How many branches an interval needs", "", *rows, "", *paragraph(plan)]
    except StudyError:  # no twins
        pass
    lines += ["", *meanings("a branch")]
    return "\n".join(lines) + "\n", pictures


def report(options):
    found = read_branches(options.folders)
    model = next(iter(next(iter(next(iter(found.values())).values())).values()))["settings"]["model"]
    name = f"{model}-branches"
    text, pictures = page(found, name, model)
    write_page(options.out, name, text, pictures)
    print(text)
    print(f"written: {os.path.join(options.out, name)}.md and {len(pictures)} plots")
    return 0


def is_of_branches(folder):
    """Whether the folder holds branches, by its first result."""
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
