"""Gaps between runs and their confidence intervals. Called by the reports."""
import math
import statistics

# A preset is as good as the baseline if the 95 % interval of its gap ends below this. In the paper,
# the gaps at 125M are 0.002 for SDP4Bit (as good as the baseline) and 0.011 for TLq (worse).
MARGIN = 0.003
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
         2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086]


def t_975(freedom):
    return T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.5 / freedom


def gaps(results, preset, reference):
    """Returns {seed: validation loss minus the reference's validation loss with the same seed}.

    Runs with the same seed have the same initial weights and read the same data in the same order."""
    ours, theirs = results.get(preset, {}), results.get(reference, {})
    loss = lambda runs, seed: runs.get(seed, {}).get("valid_loss")
    return {s: loss(ours, s) - loss(theirs, s) for s in sorted(ours)
            if loss(ours, s) is not None and loss(theirs, s) is not None}


def baseline_gaps(results, preset):
    """Returns the gaps to the baseline; [] for the baseline itself."""
    return list(gaps(results, preset, "baseline").values()) if preset != "baseline" else []


def own_half_width(values):
    """Returns half of the 95 % interval of the mean gap (Student's t); None for a single gap."""
    if len(values) < 2:
        return None
    return t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


class Noise:
    """Variation of a gap over seeds, for runs from initial weights.

    The standard deviation is pooled over all presets with several seeds. All presets use the same
    baseline run of a seed, so their gaps are correlated, and more presets do not add degrees of
    freedom; the preset with the most seeds determines their number. If no preset has several seeds,
    the standard deviation is sqrt(2) times that for the baseline, as for independent runs."""

    def __init__(self, results):
        all_gaps = [baseline_gaps(results, preset) for preset in results]
        several = [values for values in all_gaps if len(values) > 1]
        losses = [r["valid_loss"] for r in results["baseline"].values() if r["valid_loss"] is not None]
        self.baseline = statistics.stdev(losses) if len(losses) > 1 else None
        self.paired = bool(several)
        self.deviation, self.freedom = None, len(losses) - 1
        if self.paired:
            squares = sum((len(values) - 1) * statistics.variance(values) for values in several)
            self.deviation = math.sqrt(squares / sum(len(values) - 1 for values in several))
            self.freedom = max(map(len, several)) - 1
        elif self.baseline is not None:
            self.deviation = self.baseline * math.sqrt(2)

    def half_width(self, values):
        """Returns half of the 95 % interval of the mean gap; None if no preset has several seeds.

        Uses the pooled standard deviation, or the standard deviation of these gaps if there are at
        least three and it gives a wider interval."""
        own = own_half_width(values) if len(values) > 2 else None
        pooled = None
        if self.deviation is not None and values:
            pooled = t_975(self.freedom) * self.deviation / math.sqrt(len(values))
        return max(own or 0.0, pooled or 0.0) or None


def classify(mean, half):
    """Classifies a gap by its 95 % interval."""
    if half is None:
        return "one seed: inconclusive"
    if mean - half > 0:
        return "worse"
    return "better" if mean + half < 0 else "inside the noise"


def as_good(mean, half):
    """Returns whether a preset costs less than MARGIN: "yes", "no" or "unknown"; None for a single gap.

    "yes" requires the whole interval to be below the margin, not just a gap inside the noise."""
    if half is None:
        return None
    if mean + half < MARGIN:
        return "yes"
    return "no" if mean - half >= MARGIN else "unknown"


def mean_of(seeds, name):
    values = [r[name] for r in seeds.values() if r.get(name) is not None]
    return statistics.fmean(values) if values else None


def error_mean(seeds, column):
    """Returns the mean error over the second half of each run, after the initial drop of the loss."""
    values = [e[column] for r in seeds.values() for e in r["errors"]
              if e[column] is not None and 2 * e[0] > r["settings"]["iterations"]]
    return statistics.fmean(values) if values else None


def lost(results, preset):
    """Returns the number of a preset's runs that diverged."""
    return sum(1 for r in results.get(preset, {}).values() if r["diverged"])


def base_of(results, preset):
    """Returns the baseline's mean loss over the seeds of the preset's gaps."""
    return statistics.fmean(results["baseline"][s]["valid_loss"] for s in gaps(results, preset, "baseline"))
