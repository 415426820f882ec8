"""`study run` and `study status`: runs from initial weights. Called by ../study."""
import os

from .presets import PRESETS, named_presets, numbers
from .common import StudyError, difference, without_transport
from .trainer import Job, data_fingerprint, micro_batch, read_result, work_through


def settings_of(options):
    """Returns the settings that all compared runs must share."""
    return {"model": options.name, "iterations": options.iterations,
            "global_batch_size": options.global_batch_size, "ranks": options.ranks,
            "ranks_per_node": options.gpus_per_node or options.ranks,
            "eval_iterations": options.eval_iterations, "warmup_fraction": options.warmup_fraction,
            "data": data_fingerprint(options.data), "flags": without_transport(options.flags)}


def trainer_flags(options, preset, seed):
    """Returns the flags that shorten the model config's run.

    The learning rate decays over the shorter length, dropout is off, and the only evaluation is at
    the end, on fixed samples."""
    flags = ["--train-iters", options.iterations, "--lr-decay-iters", options.iterations,
             "--lr-warmup-fraction", options.warmup_fraction,
             "--global-batch-size", options.global_batch_size, "--micro-batch-size", micro_batch(options),
             "--hidden-dropout", 0, "--attention-dropout", 0, "--split", "969,31,0",
             "--eval-interval", 1000000000, "--eval-iters", options.eval_iterations, "--eval-seed", 1,
             "--seed", seed, "--log-interval", max(1, options.iterations // 50)]
    if options.gpus_per_node:
        flags += ["--gpus-per-node", options.gpus_per_node]
    if options.error_interval:
        flags += ["--log-quantization-error-interval", options.error_interval]
    return [str(f) for f in flags] + PRESETS[preset][1] + options.flags


def wanted_runs(options):
    seeds = numbers(options.seeds, "--seeds") if options.seeds else None
    return [(preset, seed)
            for preset in named_presets(options.presets) for seed in (seeds or PRESETS[preset][2])]


def result_path(options, preset, seed):
    return os.path.join(options.results, options.name, f"{preset}.{seed}.json")


def run(options):
    settings = settings_of(options)
    return work_through(options, [Job(
        name=f"{preset} seed {seed}", preset=PRESETS[preset][0], flags=trainer_flags(options, preset, seed),
        raw=os.path.join(options.results, "raw", options.name, f"{preset}.{seed}"),
        path=result_path(options, preset, seed), settings=settings, labels={"arm": preset, "seed": seed},
    ) for preset, seed in wanted_runs(options)])


def status(options):
    settings = None
    for preset, seed in wanted_runs(options):
        path = result_path(options, preset, seed)
        result = read_result(path) if os.path.exists(path) else None
        note = ""
        if result:
            settings = settings or result["settings"]
            note = "diverged" if result["diverged"] else f"{result['valid_loss']:.5f}"
            if result["settings"] != settings:
                note += f"  other settings: {difference(settings, result['settings'])}"
        print(f"{preset:18s} {seed:6d}  {note or 'to do'}")
    return 0


def results_in(folders, varied=()):
    """Yields the results in the folders. Their settings, except those named in `varied`, must be equal."""
    settings, first = None, None
    for folder in folders:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        for path in (os.path.join(folder, n) for n in names if n.endswith(".json")):
            result = read_result(path)
            shared = {k: v for k, v in result["settings"].items() if k not in varied}
            settings, first = settings or shared, first or path
            if shared != settings:
                raise StudyError(5, f"{first} and {path} were made with different settings: "
                                    f"{difference(settings, shared)}")
            yield result


def add_result(seeds, result, name):
    """Adds a result to {seed: result}. The same run may be in two folders, with the same loss."""
    seed = result["seed"]
    if seed in seeds and seeds[seed]["valid_loss"] != result["valid_loss"]:
        raise StudyError(5, f"two results of {name} seed {seed} with different losses; keep one")
    seeds[seed] = result


def read_results(folders):
    """Returns {preset: {seed: result}}, with the presets in the study's order."""
    found = {}
    for result in results_in(folders):
        add_result(found.setdefault(result["arm"], {}), result, result["arm"])
    if "baseline" not in found:
        raise StudyError(5, f"no baseline result in {', '.join(folders)}; run the baseline first")
    order = [*PRESETS, *sorted(set(found) - set(PRESETS))]
    return {preset: found[preset] for preset in order if preset in found}
