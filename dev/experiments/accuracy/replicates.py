"""Random variation between forks, and `study power`. Called by ../study and fork_report.py.

Replicates are baseline forks whose learning rate differs in the last bits. The spread of their losses
is a lower bound for the random variation of a gap: a preset's rounding perturbs every step, whereas
the effect of a one-bit difference needs many steps to grow. The number of forks that a preset needs is
therefore computed from the spread of its own gaps.
"""
import math
import os
import statistics

from .presets import PRESETS, PAPER_EQUAL, REPLICATES
from .common import StudyError, difference
from .noise import baseline_gaps, own_half_width, t_975
from .trainer import read_result

FAMILY = ["baseline", *REPLICATES]
MOST_FORKS = 200


def read_forks(folders):
    """Returns {(point, length): {preset: {data seed: result}}}. Checks that model and corpus agree."""
    found, comparable, base_runs = {}, {}, {}
    for folder in folders:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        for path in (os.path.join(folder, n) for n in names if n.endswith(".json") and n != "trunk.json"):
            result = read_result(path)
            settings = result["settings"]
            if "point" not in settings:
                raise StudyError(5, f"{path} is not the result of a fork; "
                                    "pass folders that contain only forks")
            for name in ("model", "data"):
                first = base_runs.setdefault(name, (path, settings.get(name)))
                if first[1] != settings.get(name):
                    raise StudyError(5, f"{first[0]} and {path} differ in their {name}; "
                                        "make a separate report for each")
            group = (settings["point"], settings["iterations"])
            first = comparable.setdefault(group, (path, settings))
            if first[1] != settings:
                raise StudyError(5, f"{first[0]} and {path} were made with different settings: "
                                    f"{difference(first[1], settings)}")
            runs = found.setdefault(group, {}).setdefault(result["arm"], {})
            if runs.setdefault(result["seed"], result)["valid_loss"] != result["valid_loss"]:
                raise StudyError(5, f"two results of {os.path.basename(path)} with different "
                                    "losses; keep one")
    if not found:
        raise StudyError(5, f"no fork in {', '.join(folders)}")
    return found


def families(presets):
    """Returns the losses of the baseline and its replicates by data seed."""
    by_seed = {}
    for preset in FAMILY:
        for seed, result in presets.get(preset, {}).items():
            if result["valid_loss"] is not None:
                by_seed.setdefault(seed, []).append(result["valid_loss"])
    return by_seed


class Chance:
    """Random variation of replicates: standard deviation of a run's loss, pooled over data seeds."""

    def __init__(self, presets):
        squares, self.freedom = 0.0, 0
        for losses in families(presets).values():
            if len(losses) > 1:
                squares += sum((v - statistics.fmean(losses)) ** 2 for v in losses)
                self.freedom += len(losses) - 1
        self.deviation = math.sqrt(squares / self.freedom) if self.freedom else None

    def of_gap(self):
        """Returns the standard deviation of the difference between two runs."""
        return self.deviation * math.sqrt(2)


def upper_limit(deviation, freedom):
    """Returns the one-sided 90 % confidence limit of a standard deviation estimated from a few gaps."""
    return deviation * math.sqrt(freedom / chi_squared_10(freedom))


def chi_squared_10(freedom):
    """Returns the 10 % quantile of chi squared; Wilson-Hilferty approximation for 3 degrees and more."""
    if freedom < 3:
        return (0.01579, 0.21072)[freedom - 1]
    part = 2 / (9 * freedom)
    return freedom * (1 - part - 1.28155 * math.sqrt(part)) ** 3


def compared(presets):
    """Returns the presets in the study's order. Averages the baseline's loss with its replicates' losses."""
    mean = {seed: statistics.fmean(losses) for seed, losses in families(presets).items()}
    made = {"baseline": {s: {**r, "valid_loss": mean.get(s)} for s, r in presets.get("baseline", {}).items()}}
    order = [*PRESETS, *sorted(set(presets) - set(PRESETS))]
    made.update({preset: presets[preset] for preset in order if preset in presets and preset not in FAMILY})
    return made


class ForkNoise:
    """Confidence intervals from a preset's own gaps.

    Gaps are not pooled over presets, because their spread differs: it is large for coarse
    quantization, small for replicates, and zero for lossless weights."""

    half_width = staticmethod(own_half_width)


def forks_needed(deviation, half_width):
    """Returns the smallest number of forks whose mean gap has a 95 % interval within ± half_width.

    deviation: standard deviation of one gap. Returns None if MOST_FORKS are not enough."""
    for n in range(2, MOST_FORKS + 1):
        if t_975(n - 1) * deviation / math.sqrt(n) <= half_width:
            return n
    return None


def power_row(group, who, deviation, freedom, half_width):
    upper = upper_limit(deviation, freedom)
    return {"point": group[0], "length": group[1], "who": who, "deviation": deviation, "freedom": freedom,
            "upper": upper, "needed": forks_needed(deviation, half_width),
            "safe": forks_needed(upper, half_width)}


def power_rows(group, presets, half_width):
    """Returns a row per preset with several forks. The row of the replicates is a lower bound for all."""
    chance, results, rows = Chance(presets), compared(presets), []
    if chance.deviation is not None:
        rows.append(power_row(group, "replicates", chance.of_gap(), chance.freedom, half_width))
    for preset in results:
        values = baseline_gaps(results, preset)
        if len(values) > 1:
            rows.append(power_row(group, preset, statistics.stdev(values), len(values) - 1, half_width))
    return rows


def plan_of(group, presets, rows):
    """Returns (seconds per preset, description) of the forks needed; None if there is no such plan.

    Considers the presets that the paper calls as good as the baseline, or the replicates if none of
    those presets has several forks."""
    seconds = [r["seconds"] for runs in presets.values() for r in runs.values() if r.get("seconds")]
    asked = [r for r in rows if r["who"] in PAPER_EQUAL] or [r for r in rows if r["who"] == "replicates"]
    if not seconds or not asked or any(r["safe"] is None for r in asked):
        return None
    most = max(r["safe"] for r in asked)
    cost = most * statistics.median(seconds)
    names = ", ".join(r["who"] for r in asked)
    least = "at least " if names == "replicates" else ""
    return cost, (f"{least}{most} forks per preset of {group[1]} iterations from iteration {group[0]}, "
                  f"{cost:.0f} s per preset. This follows from the upper 90 % limit of {names}.")


def power_table(found, half_width):
    """Returns the lines of a Markdown table, and the cheapest plan in words."""
    by_group = {group: power_rows(group, presets, half_width) for group, presets in sorted(found.items())}
    if not any(by_group.values()):
        raise StudyError(5, "no data seed has a baseline and a replicate, and no preset has two forks: run "
                            "`study fork --presets replicates` first")
    number = lambda value: f"over {MOST_FORKS}" if value is None else str(value)
    lines = ["| point | length | gaps of | standard deviation | degrees of freedom | upper 90 % limit "
             f"| forks for ±{half_width} | at the upper limit |", "|---" * 8 + "|"]
    for r in sum(by_group.values(), []):
        lines.append(f"| {r['point']} | {r['length']} | {r['who']} | {r['deviation']:.6f} | {r['freedom']} "
                     f"| {r['upper']:.6f} | {number(r['needed'])} | {number(r['safe'])} |")
    plans = [p for p in (plan_of(group, found[group], rows) for group, rows in by_group.items()) if p]
    planned = (*PAPER_EQUAL, "replicates")
    if not any(r["who"] in planned for group_rows in by_group.values() for r in group_rows):
        return lines, "No plan was made, because it needs replicates or forks of the paper's presets."
    if not plans:
        return lines, f"No plan reaches ±{half_width} with {MOST_FORKS} forks."
    return lines, "Cheapest plan: " + min(plans)[1]


def power(options):
    lines, plan = power_table(read_forks(options.folders), options.half_width)
    print("\n".join([*lines, "", plan]))
    return 0
