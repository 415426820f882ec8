"""Starts runs of the trainer and reads their logs and results. Called by scratch.py, base_run.py and
forks.py."""
import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import namedtuple

from .common import ROOT, StudyError, difference, is_number, read_json, without_transport
from .presets import current_name
from tables import write_records  # dev/, whose path common adds


# A run:
#   name      name in messages
#   preset    PRESET of scripts/train_*.sh
#   flags     trainer flags
#   raw       folder of the log
#   path      result file
#   settings  settings, which must be equal in all results that are compared
#   labels    additional fields of the result
Job = namedtuple("Job", "name preset flags raw path settings labels")


def data_fingerprint(prefix):
    """Returns a hash of the sizes and the first MiB of the files of a token shard."""
    digest = hashlib.sha256()
    try:
        for suffix in (".idx", ".bin"):
            size = os.path.getsize(prefix + suffix)
            digest.update(str(size).encode())
            with open(prefix + suffix, "rb") as file:
                digest.update(file.read(1 << 20))
    except OSError as reason:
        told = f"{reason.filename}: {reason.strerror}; --data must be the prefix of a token shard"
        raise StudyError(5, told) from None
    return digest.hexdigest()[:16]


def micro_batch(options):
    share = max(1, options.global_batch_size // options.ranks)
    return options.micro_batch_size or max(n for n in range(1, 17) if share % n == 0)


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def thinned(values, most=1000):
    """Reduces the values to at most `most` means over blocks of equal size."""
    size = max(1, math.ceil(len(values) / most))
    means = [round(statistics.fmean(values[i:i + size]), 5) for i in range(0, len(values), size)]
    return {"every": size, "mean": means}


def median_of(intervals, name):
    values = [r["timing"][name] for r in intervals[1:] or intervals if r["timing"].get(name) is not None]
    return statistics.median(values) if values else None


def mean_bytes(intervals, name):
    """Returns the mean per step over the whole run, because with --local-steps some steps send nothing."""
    steps = sum(r["iterations"] for r in intervals)
    return sum(r[name] * r["iterations"] for r in intervals) / steps if steps else None


def summary(lines, diverged):
    """Summarizes a log for the result. A resumed run may have logged some iterations twice."""
    start = next(r for r in lines if r["kind"] == "start")
    losses = {r["iteration"]: r["loss"] for r in lines if r["kind"] == "train"}
    losses = [loss for _, loss in sorted(losses.items()) if loss is not None]
    valid = [r["loss"] for r in lines if r["kind"] == "valid" and r["split"] == "valid"]
    intervals = [r for r in lines if r["kind"] == "interval"]
    errors = [r for r in lines if r["kind"] == "quantization_error"]
    return {
        # Not part of the settings, because the results do not depend on it.
        "micro_batch_size": start["arguments"]["micro_batch_size"],
        "commit": start["commit"], "device": start["device"], "libraries": start["libraries"],
        "nodes": start["nodes"], "parameters": start["parameters"], "diverged": diverged,
        "valid_loss": valid[-1] if valid else None, "train_loss": thinned(losses),
        "tokens_per_second": median_of(intervals, "tokens_per_second"),
        "exposed_comm_ms": median_of(intervals, "exposed_comm_ms"),
        "inter_node_bytes": mean_bytes(intervals, "inter_node_bytes"),
        "intra_node_bytes": mean_bytes(intervals, "intra_node_bytes"),
        "errors": [[r["iteration"], r.get("gradient_error"), r.get("replica_error")] for r in errors],
    }


def train(options, job, keep=False):
    """Runs the trainer and returns its exit code. Its log and output are in the folder job.raw.

    keep: don't clear the folder first, so that a resumed run appends to its log."""
    if not keep:
        shutil.rmtree(job.raw, ignore_errors=True)
    os.makedirs(job.raw, exist_ok=True)
    environment = dict(os.environ, PRESET=job.preset, DATA_PATH=os.path.abspath(options.data),
                       LOG_DIR=os.path.abspath(job.raw), DEVICE=options.device, RANKS=str(options.ranks))
    for name in ("SPEED", "CHECKPOINT_PATH", "DRY_RUN"):
        environment.pop(name, None)
    command = [os.path.join(ROOT, "scripts", f"train_{options.model}.sh"), *map(str, job.flags)]
    with open(os.path.join(job.raw, "output"), "wb") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:  # Ctrl-C, SIGTERM: let the script stop its ranks
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise


@contextlib.contextmanager
def claimed(raw):
    """Locks a run. Yields False if another process, possibly on another machine, holds the lock."""
    os.makedirs(os.path.dirname(raw), exist_ok=True)
    with open(raw + ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def output_tail(raw):
    with open(os.path.join(raw, "output"), encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "no output")


def read_result(path):
    result = read_json(path)
    try:
        for name in ("arm", "seed", "settings", "diverged", "valid_loss", "train_loss", "commit", "device",
                     "parameters", "errors"):
            result[name]
        result["arm"] = current_name(result["arm"])
        result["settings"]["flags"] = without_transport(result["settings"].get("flags", []))
        if not result["diverged"] and not is_number(result["valid_loss"]):
            raise ValueError
        return result
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StudyError(5, f"{path} is not a result of this program; remove it") from None


def finished(job):
    """Returns true if the job has a result. Raises StudyError if that result has other settings."""
    if not os.path.exists(job.path):
        return False
    found = read_result(job.path)["settings"]
    if found != job.settings:
        raise StudyError(5, f"{job.path} was made with other settings ({difference(found, job.settings)}); "
                            "choose another --results folder")
    return True


def run_once(options, job, more=lambda lines: {}):
    """Executes a run and writes its result. Returns its exit code, or 0 if the run diverged (exit code 4).

    A failed run has no result. more(log): returns additional fields of the result."""
    with claimed(job.raw) as free:
        if not free or finished(job):
            print(f"{job.name}: another process is running it", flush=True)
            return 0
        began = time.monotonic()
        code = train(options, job)
        seconds = time.monotonic() - began
        lines = read_lines(os.path.join(job.raw, "log.jsonl")) if code in (0, 4) else []
        found = summary(lines, code == 4) if lines else {}
        if code == 0 and not is_number(found.get("valid_loss")):
            code = "0, but no validation loss"
        if code not in (0, 4):
            told = f"{job.name}: exit code {code}: {output_tail(job.raw)}"
            print(told, file=sys.stderr, flush=True)
            return code
        result = {**job.labels, "settings": job.settings, "data": os.path.basename(options.data),
                  "seconds": round(seconds, 1), **found, **more(lines)}
        write_records(job.path, result)
        told = "diverged" if code == 4 else f"validation loss {found['valid_loss']:.5f}"
        print(f"{job.name}: {told}, {seconds:.0f} s", flush=True)
        return 0


def work_through(options, wanted, more=lambda lines: {}):
    """Executes the runs without a result that fit into --minutes. Returns the exit code of the study."""
    started, longest, failed = time.monotonic(), 0.0, 0
    todo = [job for job in wanted if not finished(job)]
    print(f"{options.name}: {len(wanted) - len(todo)} of {len(wanted)} runs are done, {len(todo)} to do",
          flush=True)
    for done, job in enumerate(todo):
        spent = time.monotonic() - started
        if options.minutes and done and spent + 1.1 * longest > 60 * options.minutes:
            print(f"{len(todo) - done} runs are left for the next call: time limit reached", flush=True)
            break
        began = time.monotonic()
        code = run_once(options, job, more)
        failed += code != 0
        if code in (2, 3):  # usage, environment
            print(f"stopped: exit code {code} will most likely repeat; "
                  f"{len(todo) - done - 1} of {len(todo)} runs were not started", file=sys.stderr, flush=True)
            break
        longest = max(longest, time.monotonic() - began)
    return 1 if failed else 0
