"""`study base`: trains the baseline run from which all forks start. Called by ../study.

The base run has a warm-up and then a constant learning rate, and saves a checkpoint at each of its
points. The checkpoints are large and stay under raw/. The small file trunk.json records the settings
of the base run and the fingerprint of each checkpoint. If the checkpoints are lost, `study base`
trains again and must produce bitwise identical ones. While the base run is unfinished, trunk.json has
no points, but its settings prevent a run with other settings from resuming the checkpoints.
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
    """Returns the folder with the results of the forks."""
    return os.path.join(options.results, f"{options.name}-branches")


def raw_folder(options):
    return os.path.join(options.results, "raw", f"{options.name}-branches")


def base_name(options):
    """Returns the name of the base run: --base-run of `study fork`, or --name."""
    return getattr(options, "base_run", None) or options.name


def saves_folder(options):
    return os.path.join(options.results, "raw", f"{base_name(options)}-branches", "trunk.checkpoints")


def description_path(options):
    return os.path.join(options.results, f"{base_name(options)}-branches", "trunk.json")


def read_base_run(options):
    """Returns the contents of trunk.json, or None if the file does not exist."""
    path = description_path(options)
    if not os.path.exists(path):
        return None
    base = read_json(path)
    if not isinstance(base, dict) or not {"settings", "points", "seq_length"} <= set(base):
        raise StudyError(5, f"{path} does not describe a base run; remove it")
    return base


def common_flags(settings, options):
    """Returns the trainer flags that the base run and its forks share."""
    flags = ["--global-batch-size", settings["global_batch_size"], "--micro-batch-size", micro_batch(options),
             "--hidden-dropout", 0, "--attention-dropout", 0, "--seed", settings["seed"],
             "--split", settings["split"], "--full-validation", "--eval-iters", 0, "--eval-seed", 1]
    return flags + (["--deterministic-mode"] if options.device == "gpu" else [])


def settings_of(options):
    return {"model": options.name, "seed": options.seed, "global_batch_size": options.global_batch_size,
            "lr": options.lr, "warmup": options.warmup, "split": options.split, "ranks": options.ranks,
            "data": data_fingerprint(options.data), "flags": without_transport(options.flags)}


def base_run_flags(settings, options, points):
    """Returns flags for a constant learning rate after the warm-up, whose length is set as a fraction."""
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
        raise StudyError(2, f"--points {options.points}: the first point must be at least 1")
    return points


def lost(options, base, points):
    """Returns the points whose checkpoint is missing or differs from its fingerprint in trunk.json."""
    found = {p: fingerprint(saves_folder(options), p) for p in points}
    return [p for p in points if not found[p] or found[p] != base["points"].get(str(p), found[p])]


def check_bits(base, made):
    """Checks that a repeated base run is bitwise identical to the base run of the existing results."""
    for point, bits in made.items():
        known = base["points"].get(point, bits)
        if known != bits:
            raise StudyError(5, f"at iteration {point} the base run differs from trunk.json "
                                f"(hash {bits} instead of {known}); use the same GPU type, libraries, program "
                                f"and --micro-batch-size (recorded: {base['device']}, commit {base['commit']}), "
                                "or choose another --name")


def make(options, settings, points):
    """Trains or resumes the base run. Returns its part of trunk.json."""
    job = Job("base run", "baseline", base_run_flags(settings, options, points),
              os.path.join(raw_folder(options), "trunk"), description_path(options), settings, {})
    with claimed(job.raw) as free:
        if not free:
            raise StudyError(5, "another process is training the base run; wait for it, or stop it")
        code = train(options, job, keep=True)
    if code:
        raise StudyError(1, f"base run: exit code {code}: {output_tail(job.raw)}")
    lines = read_lines(os.path.join(job.raw, "log.jsonl"))
    found = summary(lines, False)
    start = next(r for r in lines if r["kind"] == "start")
    return {"settings": settings, "data": os.path.basename(options.data),
            "points": {str(p): fingerprint(saves_folder(options), p) for p in points},
            "seq_length": start["arguments"]["seq_length"], **{name: found[name] for name in KEPT}}


def train_base_run(options):
    settings, points = settings_of(options), checked_points(options)
    known = read_base_run(options) or {"settings": settings, "points": {}, "seq_length": None}
    if known["settings"] != settings:
        raise StudyError(5, f"{description_path(options)} has other settings "
                            f"({difference(known['settings'], settings)}); choose another --results folder "
                            "or --name, or remove the file and the base run's checkpoints")
    gone = lost(options, known, points)
    if not gone and {str(p) for p in points} <= set(known["points"]):
        print("the base run already has all points; nothing to do", flush=True)
        return 0
    write_records(description_path(options), known)
    if gone and gone[0] <= newest(saves_folder(options)):  # a run resumes only from the newest one
        shutil.rmtree(saves_folder(options))
    made = make(options, settings, points)
    check_bits(known, made["points"])
    of_longer = known if points[-1] <= max(map(int, known["points"]), default=0) else made
    made = {**of_longer, "points": {**known["points"], **made["points"]}}
    write_records(description_path(options), made)
    print(f"base run: {points[-1]} iterations, validation loss {made['valid_loss']:.5f}; "
          f"points {', '.join(made['points'])}", flush=True)
    return 0
