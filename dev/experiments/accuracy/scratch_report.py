"""`study report` of runs from initial weights: a page of tables and plots. Called by ../study."""
import os

from .common import StudyError
from .noise import Noise, baseline_gaps
from .plots import plots
from .scratch import read_results
from .statements import COLUMNS, fp8_statements, meanings, ordering, paragraph, single_comparisons, table


def made_by(results, model):
    """Returns the command of these runs, with --micro-batch-size if it is the same in all runs."""
    s = next(iter(results["baseline"].values()))["settings"]
    sizes = {r.get("micro_batch_size") for seeds in results.values() for r in seeds.values()}
    size = sizes.pop() if len(sizes) == 1 else None
    words = ["    dev/experiments/study run", "--data PREFIX", f"--model {model}",
             f"--iterations {s['iterations']}", f"--global-batch-size {s['global_batch_size']}",
             f"--micro-batch-size {size}" if size else "", f"--ranks {s['ranks']}",
             f"--gpus-per-node {s['ranks_per_node']}", f"-- {' '.join(s['flags'])}" if s["flags"] else ""]
    lines = [words[0]]
    for word in filter(None, words[1:]):
        if len(lines[-1]) + len(word) > COLUMNS - 3:
            lines[-1] += " \\"
            lines.append("       ")
        lines[-1] += " " + word
    return lines


def noise_text(results, noise):
    if noise.baseline is None:
        return ["**Noise.** No preset has several seeds, so no gap can be distinguished from random "
                "variation."]
    origin = "It is the baseline's standard deviation times √2, because no other preset has several seeds"
    if noise.paired:
        origin = "It is estimated from gaps at equal seeds, over all presets with several seeds"
    return paragraph(
        f"**Noise.** The baseline's validation loss has a standard deviation of {noise.baseline:.5f}",
        f"over {len(results['baseline'])} seeds, which differ in initial weights and in the order of the data.",
        f"A gap's own standard deviation is {noise.deviation:.5f}, with {noise.freedom} degrees of freedom.",
        f"{origin}, and gives the 95 % intervals.",
        "A preset with three or more seeds uses its own spread if that is larger.")


def page_text(results, noise, model, pictures):
    some = next(iter(results["baseline"].values()))
    s, runs = some["settings"], [r for seeds in results.values() for r in seeds.values()]
    of_all = lambda name: ", ".join(sorted({r[name] for r in runs}))
    samples = s.get("eval_iterations", 0) * s["global_batch_size"]
    lines = [f"# Accuracy: {model}, {s['iterations']} iterations of {s['global_batch_size']} sequences", ""]
    lines += paragraph(
        f"{some['parameters']:,} parameters, {s['ranks']} ranks as",
        f"{s['ranks'] // s['ranks_per_node']} nodes x {s['ranks_per_node']} on {of_all('device')},",
        f"commit {of_all('commit')}.",
        f"Flags in addition to the study's own: `{' '.join(s['flags']) or 'none'}`.",
        f"Corpus: `{some.get('data', 'unknown')}`.",
        f"All runs are evaluated on the same {samples} validation samples.",
        "[The study](../README.md) describes the corpus and explains what these runs can show. Command:")
    lines += ["", *made_by(results, model), "", *table(results, noise), "", *noise_text(results, noise), ""]
    alone = sum(len(baseline_gaps(results, preset)) == 1 for preset in results)
    lines += paragraph(
        *single_comparisons(len(results) - 1),
        "Presets with one seed share one reference, the baseline run with that seed, "
        "so their gaps are not independent of each other." if alone > 1 else "")
    lines += ["", *meanings("the run")]
    order = ordering(results, noise)
    if order:
        lines += ["", "## The paper's claims in these runs", "", *order]
    fp8 = fp8_statements(results, noise)
    if fp8:
        lines += ["", "## FP8 in these runs", "", *fp8]
    lines += ["", "## Plots", ""] + [f"![{name}]({model}_{name}.svg)" for name in pictures]
    return "\n".join(lines) + "\n"


def write_page(out, name, text, pictures):
    """Writes NAME.md and its plots, NAME_KIND.svg, to the folder `out`."""
    files = {f"{name}_{kind}.svg": picture for kind, picture in pictures.items()}
    files[f"{name}.md"] = text
    try:
        os.makedirs(out, exist_ok=True)
        for path, content in files.items():
            with open(os.path.join(out, path), "w", encoding="utf-8") as file:
                file.write(content)
    except OSError as reason:
        raise StudyError(5, f"{reason.filename}: {reason.strerror}; choose another --out") from None


def report(options):
    results = read_results(options.folders)
    noise = Noise(results)
    model = next(iter(results["baseline"].values()))["settings"]["model"]
    pictures = plots(results, noise, model)
    write_page(options.out, model, page_text(results, noise, model, pictures), pictures)
    print("\n".join(table(results, noise) + [""] + ordering(results, noise) + fp8_statements(results, noise)))
    print(f"\nwritten: {os.path.join(options.out, model)}.md and {len(pictures)} plots")
    return 0
