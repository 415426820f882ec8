"""Checkpoints of the base run: fingerprints, and the starting checkpoint of each fork. Called by
base_run.py and forks.py.

A fork loads a copy of a checkpoint with a different number of consumed samples, which determines where in
the training data the fork begins. The copy consists of a modified manifest and symbolic links to the
files of the base run.
"""
import contextlib
import ctypes
import hashlib
import os
import re

from .common import StudyError, read_json

# Last line of a manifest, with the hash of everything before it (llmc/checkpoint/manifest.c).
LAST_LINE = '"xxh3": "%016x"\n}\n'
CONSUMED = rb'("state": \{[^}]*"consumed_train_samples": )(\d+)'


def xxh3(data):
    """Returns the 64-bit XXH3 hash of `data`, computed by the library that the trainer uses."""
    try:
        library = ctypes.CDLL("libxxhash.so.0")
    except OSError as reason:
        raise StudyError(3, f"{reason}; install libxxhash0") from None
    library.XXH3_64bits.restype = ctypes.c_uint64
    library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return library.XXH3_64bits(data, len(data))


def folder_of(saves, iteration):
    return os.path.join(saves, f"iter_{iteration:07d}")


def newest(saves):
    """Returns the last saved iteration, or 0 if there is none."""
    names = os.listdir(saves) if os.path.isdir(saves) else []
    return max((int(n[5:]) for n in names if re.fullmatch(r"iter_\d{7}", n)), default=0)


def fingerprint(saves, iteration):
    """Returns a fingerprint of a checkpoint, computed from its files' hashes; None if it is missing."""
    manifest = os.path.join(folder_of(saves, iteration), "manifest.json")
    if not os.path.exists(manifest):
        return None
    hashes = sorted(entry["xxh3"] for entry in read_json(manifest)["files"])
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def moved_manifest(manifest, consumed):
    """Replaces the number of consumed samples in a manifest and updates its hash."""
    text = manifest[:-len(LAST_LINE % 0)]
    if manifest != text + (LAST_LINE % xxh3(text)).encode():
        raise StudyError(5, "the base run's manifest.json is damaged; run `study base` again")
    text, found = re.subn(CONSUMED, rb"\g<1>%d" % consumed, text)
    if found != 1:
        raise StudyError(5, "the base run's manifest.json has an unknown format")
    return text + (LAST_LINE % xxh3(text)).encode()


def write_whole(path, content):
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(content)
    os.replace(part, path)


def start_of_fork(saves, iteration, consumed, start):
    """Creates the folder `start` for --load: the checkpoint, but with `consumed` consumed samples.

    An existing folder stays readable all the time, because another process's fork may be loading it."""
    source, target = folder_of(saves, iteration), folder_of(start, iteration)
    os.makedirs(target, exist_ok=True)
    for name in os.listdir(source):
        if name != "manifest.json":
            with contextlib.suppress(FileExistsError):
                os.symlink(os.path.relpath(os.path.join(source, name), target), os.path.join(target, name))
    with open(os.path.join(source, "manifest.json"), "rb") as file:
        write_whole(os.path.join(target, "manifest.json"), moved_manifest(file.read(), consumed))
    write_whole(os.path.join(start, "latest_checkpointed_iteration.txt"), str(iteration).encode())
