"""Tables of a report, and checks of the paper's claims. Called by the modules *_report.py."""
import statistics
import textwrap

from .presets import FP8_EQUAL, PAPER_EQUAL, PAPER_ORDER, trains_alone
from .noise import MARGIN, as_good, base_of, baseline_gaps, error_mean, gaps, lost, mean_of, classify
from tables import cell  # dev/, whose path common adds


def corpus(runs):
    """Returns a sentence that names the corpus. The shard may have another file name in some runs, but
    its fingerprint is among the settings, which are equal in all of them."""
    first, *others = (f"`{name}`" for name in sorted({str(r.get("data", "unknown")) for r in runs}))
    named = f" (in some runs named {', '.join(others)})" if others else ""
    return f"Corpus: {first}{named}."


def outcome_cell(results, noise, preset, values):
    """Returns the text of the column "outcome" for a preset."""
    if lost(results, preset):
        return "diverged"
    if preset == "baseline":
        return ""
    if not values:
        return "no baseline with its seed"
    return classify(statistics.fmean(values), noise.half_width(values))


def table(results, noise):
    rows = ["| preset | seeds | validation loss | gap to the baseline | 95 % | gap % | outcome "
            "| gradient error | replica error | MB/step between nodes | tokens/s |", "|---" * 11 + "|"]
    for preset, seeds in results.items():
        values = baseline_gaps(results, preset)
        mean = statistics.fmean(values) if values else None
        percent = 100 * mean / base_of(results, preset) if values else None
        sent = mean_of(seeds, "inter_node_bytes")
        part = preset != "baseline" and len(values) < len(seeds)
        cells = [
            preset, f"{len(values)} of {len(seeds)}" if part else str(len(seeds)),
            cell(mean_of(seeds, "valid_loss"), ".5f"), cell(mean, "+.5f"),
            cell(noise.half_width(values), ".5f"), cell(percent, "+.3f"),
            outcome_cell(results, noise, preset, values),
            cell(None if trains_alone(preset) else error_mean(seeds, 1), ".4f"),
            cell(error_mean(seeds, 2), ".3f"),
            cell(sent / 1e6 if sent is not None else None, ".3f"),
            cell(mean_of(seeds, "tokens_per_second"), ",.0f")]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


ONE_SEED = "inconclusive with one seed"


def described(noise, values, test, words):
    """Returns words[test(mean, half width)] followed by the mean gap and its interval."""
    mean, half = statistics.fmean(values), noise.half_width(values)
    return f"{words.get(test(mean, half), ONE_SEED)} ({cell(mean, '+.5f')} ± {cell(half, '.5f', '?')})"


def order_of(results, noise, worse, better):
    """Describes whether `worse` is worse than `better` in these runs. Returns "" without common seeds."""
    lost_worse, lost_better = lost(results, worse), lost(results, better)
    if lost_worse and lost_better:
        return "**inconclusive**: runs of both diverged"
    if lost_worse:
        return f"holds ({lost_worse} of {len(results[worse])} runs diverged)"
    if lost_better:
        return f"**does not hold**: {lost_better} of {len(results[better])} runs of {better} diverged"
    values = list(gaps(results, worse, better).values())
    return values and described(noise, values, classify, {
        "worse": "holds", "better": "**does not hold**, the opposite does",
        "inside the noise": "**inconclusive**, inside the noise"})


def equality_of(results, noise, preset, reference="baseline"):
    """Describes whether `preset` costs less than MARGIN compared with `reference` in these runs.

    Returns "" without common seeds."""
    if lost(results, preset):
        return (f"**does not hold**: {lost(results, preset)} of {len(results[preset])} runs diverged, "
                f"compared with {lost(results, reference)} of {len(results[reference])} {reference} runs")
    values = list(gaps(results, preset, reference).values())
    return values and described(noise, values, as_good, {
        "yes": "holds", "no": "**does not hold**", "unknown": "**inconclusive**"})


def ordering(results, noise):
    """Returns a line per claim of the paper that says whether the claim holds in these runs.

    A run that diverged counts as worse than all runs that did not."""
    said = [(f"{worse} is worse than {better}", order_of(results, noise, worse, better))
            for worse, better in PAPER_ORDER if worse in results and better in results]
    said += [(f"{preset} is as good as the baseline, to {MARGIN}", equality_of(results, noise, preset))
             for preset in PAPER_EQUAL if preset in results]
    return [f"- {statement}: {words}" for statement, words in said if words]


def fp8_statements(results, noise):
    """Returns a line per FP8 preset that says whether it is as good as the same preset in bf16."""
    said = [(preset, reference, equality_of(results, noise, preset, reference))
            for preset, reference in FP8_EQUAL if preset in results and reference in results]
    return [f"- {preset} is as good as {'the ' * (reference == 'baseline')}{reference}, to {MARGIN}: {words}"
            for preset, reference, words in said if words]


COLUMNS = 100


def paragraph(*sentences):
    return textwrap.wrap(" ".join(s for s in sentences if s), COLUMNS, break_long_words=False,
                         break_on_hyphens=False)


def single_comparisons(presets):
    """Returns sentences about multiple comparisons. presets: number of presets on the page."""
    return ("The intervals are not corrected for multiple comparisons: for about one preset in twenty, "
            "the true gap lies outside the interval by chance.",
            f"Here {presets} {'preset is' if presets == 1 else 'presets are'} compared.")


def meanings(run):
    """Returns paragraphs that explain a table's columns. run: "the run" or "a fork"."""
    lines = []
    for meaning in (
            f"*gradient error*: ‖reduced − exact‖ / ‖exact‖ over the whole gradient of a step, "
            f"mean over the second half of {run}. "
            "Not defined with --local-steps, because nodes then do not exchange gradients.",
            "*replica error*: distance between the model weights and the fp32 master weights, "
            "relative to the error of rounding the master weights to bf16. 1 means no error beyond bf16.",
            "*tokens/s*: from the log; not a speed measurement, because clock rates were not controlled."):
        lines += ["", *paragraph(meaning)]
    return lines[1:]


def items(*texts):
    """Returns a Markdown list, wrapped like paragraph()."""
    return [line for text in texts if text for line in textwrap.wrap(
        "- " + text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)]
