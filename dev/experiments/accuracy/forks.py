"""`study fork`: trains from a point of the base run, once per preset and data seed, while the learning
rate decays to zero. Called by ../study.

A fork starts with the weights and Adam moments of the base run. Presets with the same data seed read
the same samples. Each data seed has its own range of samples, after the samples of the base run, so no
sample repeats within a fork. Replicates are baseline forks whose learning rate differs by one or two
units in the last place.
"""
import array
import hashlib
import os
import struct

from .presets import PRESETS, REPLICATES, moved, named_presets, numbers, stored_name
from .checkpoints import fingerprint, start_of_fork
from .common import StudyError, without_transport
from .trainer import Job, data_fingerprint, work_through
from .base_run import common_flags, description_path, folder, raw_folder, read_base_run, saves_folder

TAIL = 0.1  # the validation loss is the mean of the evaluations in this last part of a fork


def samples_of_epoch(prefix, split, seq_length):
    """Returns the number of training samples in one epoch, or slightly fewer."""
    try:
        with open(prefix + ".idx", "rb") as file:
            magic, _, _, sequences, _ = struct.unpack("<9sQBQQ", file.read(34))
            if magic != b"MMIDIDX\0\0":
                raise StudyError(5, f"{prefix}.idx is not the index of a token shard")
            lengths = array.array("i", file.read(4 * sequences))
    except OSError as reason:
        raise StudyError(5, f"{reason.filename}: {reason.strerror}") from None
    weights = [float(w) for w in split.split(",")]
    of_training = int(sequences * weights[0] / sum(weights)) - 1
    return (sum(lengths[:max(0, of_training)]) - 1) // seq_length


def first_sample(base, options, seed):
    """Returns the index of the first sample of a data seed."""
    reserved = options.reserve * base["settings"]["global_batch_size"]
    return reserved + seed * options.length * options.global_batch_size


def check_data(base, options, seeds):
    last = first_sample(base, options, max(seeds) + 1)
    there = samples_of_epoch(options.data, base["settings"]["split"], base["seq_length"])
    if last > there:
        raise StudyError(5, f"data seed {max(seeds)} would end at sample {last}, but an epoch has {there}, "
                            "so data would repeat; use fewer or shorter forks, or a larger corpus")


def settings_of(options, base):
    """Returns the settings that all compared forks must share."""
    before = base["settings"]["global_batch_size"]
    settings = {"model": options.name, "trunk": base["points"][str(options.point)], "point": options.point,
                "iterations": options.length, "reserve": options.reserve,
                "global_batch_size": options.global_batch_size, "lr": base["settings"]["lr"],
                "ranks": options.ranks, "ranks_per_node": options.gpus_per_node or options.ranks,
                "evaluations": options.evaluations, "data": base["settings"]["data"],
                "flags": without_transport(base["settings"]["flags"] + options.flags)}
    return settings if before == options.global_batch_size else {**settings, "trunk_batch_size": before}


def schedule_flags(options, base, learning_rate):
    """Returns flags for a linear decay from the base run's learning rate to zero.

    The trainer's schedule counts samples, but its flags count iterations with the fork's batch size."""
    end = options.point + options.length
    before = options.point * base["settings"]["global_batch_size"]
    decayed = before // options.global_batch_size + options.length
    every = options.length // options.evaluations
    due = end % every == 0 and options.evaluations > 1
    return ["--train-iters", end, "--override-opt_param-scheduler", "--lr", repr(learning_rate),
            "--min-lr", 0, "--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear",
            "--lr-decay-iters", decayed, "--lr-wsd-decay-iters", options.length, "--lr-warmup-fraction", 0,
            "--eval-interval", every if due else end + 1]


def fork_flags(options, base, preset, start):
    learning_rate = moved(base["settings"]["lr"], REPLICATES.get(preset, 0))
    settings = {**base["settings"], "global_batch_size": options.global_batch_size}
    flags = [*common_flags(settings, options), *schedule_flags(options, base, learning_rate),
             "--load", os.path.abspath(start), "--exit-on-missing-checkpoint",
             "--log-interval", max(1, options.length // 20)]
    if options.gpus_per_node:
        flags += ["--gpus-per-node", options.gpus_per_node]
    if options.error_interval:
        flags += ["--log-quantization-error-interval", options.error_interval]
    presets = PRESETS["baseline" if preset in REPLICATES else preset]
    return flags + presets[1] + base["settings"]["flags"] + options.flags


def jobs(options, base, seeds):
    settings, found = settings_of(options, base), []
    for seed in seeds:
        start = os.path.join(raw_folder(options), f"start.p{options.point}.l{options.length}.d{seed}")
        start_of_fork(saves_folder(options), options.point, first_sample(base, options, seed), start)
        for preset in named_presets(options.presets, replicates=True):
            name = f"{stored_name(preset)}.p{options.point}.l{options.length}.d{seed}"
            found.append(Job(
                name=f"{preset} from {options.point} over {options.length}, data {seed}",
                preset=PRESETS["baseline" if preset in REPLICATES else preset][0],
                flags=fork_flags(options, base, preset, start),
                raw=os.path.join(raw_folder(options), name),
                path=os.path.join(folder(options), name + ".json"), settings=settings,
                labels={"arm": stored_name(preset), "seed": seed, "seq_length": base["seq_length"]}))
    return found


def fork_fields(options, lines):
    """Returns the fields that only forks have. Iterations count from the start of the fork."""
    start = options.point
    valid = {r["iteration"] - start: r["loss"] for r in lines
             if r["kind"] == "valid" and r["split"] == "valid"}
    last = [loss for at, loss in valid.items() if at > (1 - TAIL) * options.length and loss is not None]
    exact = [(r["loss"], r.get("grad_norm")) for r in lines if r["kind"] == "train"] + list(valid.values())
    errors = [r for r in lines if r["kind"] == "quantization_error"]
    return {"valid_loss": sum(last) / len(last) if last else None,
            "evaluations": [[at, loss] for at, loss in sorted(valid.items())],
            "bits": hashlib.sha256(repr(exact).encode()).hexdigest()[:16],
            "errors": [[r["iteration"] - start, r.get("gradient_error"), r.get("replica_error")]
                       for r in errors]}


def check(options, base):
    if not base or not base["points"]:
        raise StudyError(5, f"there is no base run in {description_path(options)}; run `study base` first")
    if str(options.point) not in base["points"]:
        raise StudyError(2, f"--point {options.point}: the base run's points are {', '.join(base['points'])}")
    if options.point * base["settings"]["global_batch_size"] % options.global_batch_size:
        raise StudyError(2, f"--global-batch-size {options.global_batch_size} does not divide the samples "
                            f"that the base run has read at iteration {options.point}")
    if data_fingerprint(options.data) != base["settings"]["data"]:
        raise StudyError(5, f"{options.data} is not the corpus that the base run used")
    if fingerprint(saves_folder(options), options.point) != base["points"][str(options.point)]:
        raise StudyError(5, f"the checkpoint of iteration {options.point} in {saves_folder(options)} is "
                            "missing or belongs to a different base run; run `study base` again")


def train_forks(options):
    base = read_base_run(options)
    if base:
        options.global_batch_size = options.global_batch_size or base["settings"]["global_batch_size"]
    check(options, base)
    seeds = numbers(options.seeds, "--seeds")
    options.reserve = options.reserve or max(map(int, base["points"]))
    check_data(base, options, seeds)
    return work_through(options, jobs(options, base, seeds), lambda lines: fork_fields(options, lines))
