"""What chance does to branches; `study power`. Called by ../study and branch_report.py.

Twins of the baseline differ in one bit of the learning rate. Their losses differ by what chance
makes of it. It is the least that chance does to a gap: a preset's rounding disturbs every step, and
one bit takes many steps to grow as large. So how many branches a preset needs, its own gaps say.
"""
import math
import os
import statistics

from .presets import PRESETS, PAPER_EQUAL, TWINS
from .common import StudyError, difference
from .noise import baseline_gaps, own_half_width, t_975
from .trainer import read_result

FAMILY = ["baseline", *TWINS]
MOST_BRANCHES = 200


def read_branches(folders):
    """(point, length) -> preset -> data seed -> result. All are of one trunk's model and corpus."""
    found, alike, trunks = {}, {}, {}
    for folder in folders:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        for path in (os.path.join(folder, n) for n in names if n.endswith(".json") and n != "trunk.json"):
            result = read_result(path)
            settings = result["settings"]
            if "point" not in settings:
                raise StudyError(5, f"{path} is the result of no branch; give folders of branches alone")
            for name in ("model", "data"):
                first = trunks.setdefault(name, (path, settings.get(name)))
                if first[1] != settings.get(name):
                    raise StudyError(5, f"{first[0]} and {path} differ in their {name}; give each its own report")
            group = (settings["point"], settings["iterations"])
            first = alike.setdefault(group, (path, settings))
            if first[1] != settings:
                raise StudyError(5, f"{first[0]} and {path} were made with different settings: "
                                    f"{difference(first[1], settings)}")
            runs = found.setdefault(group, {}).setdefault(result["arm"], {})
            if runs.setdefault(result["seed"], result)["valid_loss"] != result["valid_loss"]:
                raise StudyError(5, f"two results of {os.path.basename(path)} with different losses; keep one")
    if not found:
        raise StudyError(5, f"no branch in {', '.join(folders)}")
    return found


def families(presets):
    """For each data seed the losses of the baseline and its twins."""
    by_seed = {}
    for preset in FAMILY:
        for seed, result in presets.get(preset, {}).items():
            if result["valid_loss"] is not None:
                by_seed.setdefault(seed, []).append(result["valid_loss"])
    return by_seed


class Chance:
    """How far chance drives twins apart: the deviation of one run, pooled over the data seeds."""

    def __init__(self, presets):
        squares, self.freedom = 0.0, 0
        for losses in families(presets).values():
            if len(losses) > 1:
                squares += sum((v - statistics.fmean(losses)) ** 2 for v in losses)
                self.freedom += len(losses) - 1
        self.deviation = math.sqrt(squares / self.freedom) if self.freedom else None

    def of_gap(self):
        """Of the difference between two runs."""
        return self.deviation * math.sqrt(2)


def upper_limit(deviation, freedom):
    """90 % one-sided limit of a measured deviation: few gaps may happen to lie close together."""
    return deviation * math.sqrt(freedom / chi_squared_10(freedom))


def chi_squared_10(freedom):
    """The 10 % quantile of chi squared: by Wilson and Hilferty from three degrees on."""
    if freedom < 3:
        return (0.01579, 0.21072)[freedom - 1]
    part = 2 / (9 * freedom)
    return freedom * (1 - part - 1.28155 * math.sqrt(part)) ** 3


def compared(presets):
    """The presets, in the study's order, beside a baseline that is the mean of the family."""
    mean = {seed: statistics.fmean(losses) for seed, losses in families(presets).items()}
    made = {"baseline": {s: {**r, "valid_loss": mean.get(s)} for s, r in presets.get("baseline", {}).items()}}
    order = [*PRESETS, *sorted(set(presets) - set(PRESETS))]
    made.update({preset: presets[preset] for preset in order if preset in presets and preset not in FAMILY})
    return made


class BranchNoise:
    """A preset's interval comes from its own gaps.

    Nothing is pooled. Twins scatter less than presets, coarse presets more than fine ones, and lossless
    weights not at all."""

    half_width = staticmethod(own_half_width)


def branches_needed(deviation, half_width):
    """The fewest branches whose mean gap has an interval of at most ± half_width.

    The interval comes from as many gaps with this deviation."""
    for n in range(2, MOST_BRANCHES + 1):
        if t_975(n - 1) * deviation / math.sqrt(n) <= half_width:
            return n
    return None


def power_row(group, who, deviation, freedom, half_width):
    upper = upper_limit(deviation, freedom)
    return {"point": group[0], "length": group[1], "who": who, "deviation": deviation, "freedom": freedom,
            "upper": upper, "needed": branches_needed(deviation, half_width),
            "safe": branches_needed(upper, half_width)}


def power_rows(group, presets, half_width):
    """What each preset with several branches needs. The twins' row is what none can need less than."""
    chance, results, rows = Chance(presets), compared(presets), []
    if chance.deviation is not None:
        rows.append(power_row(group, "twins", chance.of_gap(), chance.freedom, half_width))
    for preset in results:
        values = baseline_gaps(results, preset)
        if len(values) > 1:
            rows.append(power_row(group, preset, statistics.stdev(values), len(values) - 1, half_width))
    return rows


def plan_of(group, presets, rows):
    """(seconds per preset, the plan in words) for the presets that the paper calls as good as the
    baseline; of the twins where none of them has several branches. None where nothing suffices."""
    seconds = [r["seconds"] for runs in presets.values() for r in runs.values() if r.get("seconds")]
    asked = [r for r in rows if r["who"] in PAPER_EQUAL] or [r for r in rows if r["who"] == "twins"]
    if not seconds or not asked or any(r["safe"] is None for r in asked):
        return None
    most = max(r["safe"] for r in asked)
    cost = most * statistics.median(seconds)
    names = ", ".join(r["who"] for r in asked)
    least = " at least" if names == "twins" else ""
    return cost, (f"{most}{least} branches per preset of {group[1]} iterations from iteration {group[0]}, "
                  f"to be safe (by {names}): {cost:.0f} s per preset.")


def power_table(found, half_width):
    """Lines of a Markdown table, and the cheapest plan in words."""
    by_group = {group: power_rows(group, presets, half_width) for group, presets in sorted(found.items())}
    if not any(by_group.values()):
        raise StudyError(5, "no data seed has a baseline and a twin, and no preset has two branches: run "
                            "`study branch --presets twins` first")
    number = lambda value: f"over {MOST_BRANCHES}" if value is None else str(value)
    lines = ["| point | length | gaps of | standard deviation | degrees | 90 % limit "
             f"| branches for ±{half_width} | to be safe |", "|---" * 8 + "|"]
    for r in sum(by_group.values(), []):
        lines.append(f"| {r['point']} | {r['length']} | {r['who']} | {r['deviation']:.6f} | {r['freedom']} "
                     f"| {r['upper']:.6f} | {number(r['needed'])} | {number(r['safe'])} |")
    plans = [p for p in (plan_of(group, found[group], rows) for group, rows in by_group.items()) if p]
    if not plans:
        return lines, f"No plan here reaches ±{half_width} with {MOST_BRANCHES} branches."
    return lines, "Cheapest: " + min(plans)[1]


def power(options):
    lines, plan = power_table(read_branches(options.folders), options.half_width)
    print("\n".join([*lines, "", plan]))
    return 0
