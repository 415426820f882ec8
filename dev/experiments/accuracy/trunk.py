"""`study trunk`: the baseline run that all branches leave. Called by ../study.

It has a warm-up and then a constant learning rate. It is saved at its points. The checkpoints are
large and stay under raw/. trunk.json is small: it says what the trunk is, and the fingerprint of
each point. Where the checkpoints are lost, the trunk is made again and must come out with the same
bits. An interrupted trunk has a trunk.json without points, so that none of other settings goes on
from its checkpoints.
"""
import math
import os
import shutil

from .presets import numbers
from .checkpoints import fingerprint, newest
from .common import StudyError, difference, read_json, without_transport
from .trainer import Job, claimed, data_fingerprint, micro_batch, output_tail, read_lines, summary, train
from tables import write_records  # dev/, whose path common adds

KEPT = ("commit", "device", "libraries", "micro_batch_size", "parameters", "train_loss", "tokens_per_second",
        "valid_loss")


def folder(options):
    """Of the results of branches."""
    return os.path.join(options.results, f"{options.name}-branches")


def raw_folder(options):
    return os.path.join(options.results, "raw", f"{options.name}-branches")


def saves_folder(options):
    return os.path.join(raw_folder(options), "trunk.checkpoints")


def description_path(options):
    return os.path.join(folder(options), "trunk.json")


def read_trunk(options):
    """trunk.json; None where there is none."""
    path = description_path(options)
    if not os.path.exists(path):
        return None
    trunk = read_json(path)
    if not isinstance(trunk, dict) or not {"settings", "points", "seq_length"} <= set(trunk):
        raise StudyError(5, f"{path} is no trunk of this program; remove it")
    return trunk


def common_flags(settings, options):
    """What trunk and branches share."""
    flags = ["--global-batch-size", settings["global_batch_size"], "--micro-batch-size", micro_batch(options),
             "--hidden-dropout", 0, "--attention-dropout", 0, "--seed", settings["seed"],
             "--split", settings["split"], "--full-validation", "--eval-iters", 0, "--eval-seed", 1]
    return flags + (["--deterministic-mode"] if options.device == "gpu" else [])


def settings_of(options):
    return {"model": options.name, "seed": options.seed, "global_batch_size": options.global_batch_size,
            "lr": options.lr, "warmup": options.warmup, "split": options.split, "ranks": options.ranks,
            "data": data_fingerprint(options.data), "flags": without_transport(options.flags)}


def trunk_flags(settings, options, points):
    """A constant rate after the warm-up. Its length is told as a fraction, as the card does."""
    saves = os.path.abspath(saves_folder(options))
    flags = [*common_flags(settings, options), "--train-iters", points[-1],
             "--lr", settings["lr"], "--lr-decay-style", "constant",
             "--lr-decay-iters", 100 * settings["warmup"], "--lr-warmup-fraction", 0.01,
             "--eval-interval", points[-1] + 1, "--log-interval", max(1, points[-1] // 50),
             "--save", saves, "--load", saves, "--save-interval", math.gcd(*points)]
    return flags + options.flags


def checked_points(options):
    points = sorted(set(numbers(options.points, "--points")))
    if points[0] < 1:
        raise StudyError(2, f"--points {options.points}: a trunk is saved after its first iteration or later")
    return points


def lost(options, trunk, points):
    """Those whose checkpoint is not there, or is not the one that trunk.json tells of."""
    found = {p: fingerprint(saves_folder(options), p) for p in points}
    return [p for p in points if not found[p] or found[p] != trunk["points"].get(str(p), found[p])]


def check_bits(trunk, made):
    """That a trunk made again is the one that the results are of."""
    for point, bits in made.items():
        known = trunk["points"].get(point, bits)
        if known != bits:
            raise StudyError(5, f"at iteration {point} the trunk has other bits than the one of trunk.json "
                                f"({bits} and {known}); it wants the same kind of GPU, libraries, program and "
                                f"--micro-batch-size, then {trunk['device']}, commit {trunk['commit']}; or "
                                "another --name")


def make(options, settings, points):
    """Trains the trunk, or goes on with it. Its part of trunk.json."""
    job = Job("trunk", "baseline", trunk_flags(settings, options, points),
              os.path.join(raw_folder(options), "trunk"), description_path(options), settings, {})
    with claimed(job.raw) as free:
        if not free:
            raise StudyError(5, "another call makes the trunk")
        code = train(options, job, goes_on=True)
    if code:
        raise StudyError(1, f"trunk: exit code {code}: {output_tail(job.raw)}")
    lines = read_lines(os.path.join(job.raw, "log.jsonl"))
    found = summary(lines, False)
    start = next(r for r in lines if r["kind"] == "start")
    return {"settings": settings, "data": os.path.basename(options.data),
            "points": {str(p): fingerprint(saves_folder(options), p) for p in points},
            "seq_length": start["arguments"]["seq_length"], **{name: found[name] for name in KEPT}}


def trunk(options):
    settings, points = settings_of(options), checked_points(options)
    known = read_trunk(options) or {"settings": settings, "points": {}, "seq_length": None}
    if known["settings"] != settings:
        raise StudyError(5, f"{description_path(options)} is of other settings "
                            f"({difference(known['settings'], settings)}); choose another --results folder "
                            "or --name, or remove the file and the trunk's checkpoints")
    gone = lost(options, known, points)
    if not gone and {str(p) for p in points} <= set(known["points"]):
        print("the trunk is there", flush=True)
        return 0
    write_records(description_path(options), known)
    if gone and gone[0] <= newest(saves_folder(options)):  # a run cannot go back to it
        shutil.rmtree(saves_folder(options))
    made = make(options, settings, points)
    check_bits(known, made["points"])
    of_longer = known if points[-1] <= max(map(int, known["points"]), default=0) else made
    made = {**of_longer, "points": {**known["points"], **made["points"]}}
    write_records(description_path(options), made)
    print(f"trunk: {points[-1]} iterations, validation loss {made['valid_loss']:.5f}; "
          f"points {', '.join(made['points'])}", flush=True)
    return 0
