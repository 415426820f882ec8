"""What chance does to branches, measured by twins; `study power`. Called by ../study and
branch_report.py.

Twins of the baseline differ in one bit of the learning rate. Their losses differ by what chance
makes of it. The same happens between the baseline and an arm, whatever the arm costs. So the twins'
scatter says how many branches an interval needs.
"""
import math
import os
import statistics

from .arms import TWINS
from .common import StudyError
from .noise import Noise, baseline_gaps, t_975
from .trainer import read_result

FAMILY = ["baseline", *TWINS]
MOST_BRANCHES = 200


def read_branches(folders):
    """(point, length) -> arm -> data seed -> result."""
    found, alike = {}, {}
    for folder in folders:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        for path in (os.path.join(folder, n) for n in names if n.endswith(".json") and n != "trunk.json"):
            result = read_result(path)
            settings = result["settings"]
            if "point" not in settings:
                raise StudyError(5, f"{path} is the result of no branch; give folders of branches alone")
            group = (settings["point"], settings["iterations"])
            first = alike.setdefault(group, (path, settings))
            if first[1] != settings:
                raise StudyError(5, f"{first[0]} and {path} were made with different settings")
            runs = found.setdefault(group, {}).setdefault(result["arm"], {})
            if runs.setdefault(result["seed"], result)["valid_loss"] != result["valid_loss"]:
                raise StudyError(5, f"two results of {os.path.basename(path)} with different losses; keep one")
    if not found:
        raise StudyError(5, f"no branch in {', '.join(folders)}")
    return found


def families(arms):
    """For each data seed the losses of the baseline and its twins."""
    by_seed = {}
    for arm in FAMILY:
        for seed, result in arms.get(arm, {}).items():
            if result["valid_loss"] is not None:
                by_seed.setdefault(seed, []).append(result["valid_loss"])
    return by_seed


class Chance:
    """How far chance drives twins apart: the deviation of one run, pooled over the data seeds."""

    def __init__(self, arms):
        squares, self.freedom = 0.0, 0
        for losses in families(arms).values():
            if len(losses) > 1:
                squares += sum((v - statistics.fmean(losses)) ** 2 for v in losses)
                self.freedom += len(losses) - 1
        self.deviation = math.sqrt(squares / self.freedom) if self.freedom else None

    def of_gap(self):
        """Of the difference between two runs."""
        return self.deviation * math.sqrt(2)

    def upper(self):
        """90 % one-sided limit of of_gap(): few twins may happen to lie close together."""
        return self.of_gap() * math.sqrt(self.freedom / chi_squared_10(self.freedom))


def chi_squared_10(freedom):
    """The 10 % quantile of chi squared: by Wilson and Hilferty from three degrees on."""
    if freedom < 3:
        return (0.01579, 0.21072)[freedom - 1]
    part = 2 / (9 * freedom)
    return freedom * (1 - part - 1.28155 * math.sqrt(part)) ** 3


def compared(arms):
    """The arms beside a baseline that is the mean of the family, for the scratch runs' reports."""
    mean = {seed: statistics.fmean(losses) for seed, losses in families(arms).items()}
    made = {"baseline": {s: {**r, "valid_loss": mean.get(s)} for s, r in arms.get("baseline", {}).items()}}
    made.update({arm: runs for arm, runs in arms.items() if arm not in FAMILY})
    return made


class BranchNoise(Noise):
    """The deviation of gaps: pooled over the arms' gaps between data seeds, and over the twins."""

    def __init__(self, results, chance):
        super().__init__(results)
        squares = self.deviation ** 2 * self.freedom if self.paired else 0.0
        freedom = (self.freedom if self.paired else 0) + chance.freedom
        if chance.freedom:
            squares += chance.of_gap() ** 2 * chance.freedom
        self.freedom, self.paired = freedom, freedom > 0
        self.deviation = math.sqrt(squares / freedom) if freedom else None


def branches_needed(deviation, half_width):
    """The fewest branches whose mean gap has an interval of at most ± half_width.

    The interval comes from as many gaps with this deviation."""
    for n in range(2, MOST_BRANCHES + 1):
        if t_975(n - 1) * deviation / math.sqrt(n) <= half_width:
            return n
    return None


def power_row(group, arms, half_width):
    chance, noise = Chance(arms), Noise(compared(arms))
    seconds = [r["seconds"] for runs in arms.values() for r in runs.values() if r.get("seconds")]
    each = statistics.median(seconds) if seconds else None
    if chance.deviation is None:
        return None
    gaps = sum(len(baseline_gaps(compared(arms), arm)) for arm in arms if arm not in FAMILY)
    deviation = max(chance.of_gap(), noise.deviation if noise.paired else 0.0)
    return {"point": group[0], "length": group[1], "twins": chance.of_gap(), "freedom": chance.freedom,
            "upper": chance.upper(), "arms": noise.deviation if noise.paired else None, "gaps": gaps,
            "needed": branches_needed(deviation, half_width),
            "safe": branches_needed(max(chance.upper(), deviation), half_width), "seconds": each}


def power_table(found, half_width):
    """Lines of a Markdown table, and the cheapest plan in words."""
    rows = [power_row(group, arms, half_width) for group, arms in sorted(found.items())]
    rows = [r for r in rows if r]
    if not rows:
        raise StudyError(5, "no data seed has a baseline and a twin: run `study branch --arms twins` first")
    number = lambda value, form: "-" if value is None else format(value, form)
    lines = ["| point | length | twins' gap deviation | degrees | 90 % limit | arms' gap deviation "
             f"| branches for ±{half_width} | to be safe | seconds a branch |", "|---" * 9 + "|"]
    for r in rows:
        lines.append(f"| {r['point']} | {r['length']} | {r['twins']:.5f} | {r['freedom']} | {r['upper']:.5f} "
                     f"| {number(r['arms'], '.5f')} | {number(r['needed'], 'd')} | {number(r['safe'], 'd')} "
                     f"| {number(r['seconds'], '.0f')} |")
    able = [r for r in rows if r["needed"] and r["seconds"]]
    if not able:
        return lines, f"No plan here reaches ±{half_width} with {MOST_BRANCHES} branches."
    best = min(able, key=lambda r: r["needed"] * r["seconds"])
    return lines, (f"Cheapest: {best['needed']} branches per arm of {best['length']} iterations from iteration "
                   f"{best['point']}, {best['needed'] * best['seconds']:.0f} s per arm.")


def power(options):
    lines, plan = power_table(read_branches(options.folders), options.half_width)
    print("\n".join([*lines, "", plan]))
    return 0
