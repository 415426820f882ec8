"""The trunk's checkpoints: their fingerprints, and where each branch starts. Called by trunk.py and
branches.py.

A branch starts from a copy of a checkpoint that differs in one counter: how many samples were
consumed. It says where in the training data the branch goes on. The copy is a manifest of its own
beside links to the trunk's files.
"""
import contextlib
import ctypes
import hashlib
import os
import re

from .common import StudyError, read_json

LAST_LINE = '"xxh3": "%016x"\n}\n'  # of a manifest: the hash of all before it (llmc/checkpoint/manifest.c)
CONSUMED = rb'("state": \{[^}]*"consumed_train_samples": )(\d+)'


def xxh3(data):
    """The 64-bit XXH3 of these bytes, by the library that the trainer uses."""
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
    """The last saved iteration; 0 without one."""
    names = os.listdir(saves) if os.path.isdir(saves) else []
    return max((int(n[5:]) for n in names if re.fullmatch(r"iter_\d{7}", n)), default=0)


def fingerprint(saves, iteration):
    """Tells the bits of two checkpoints apart: their files' hashes. None without the checkpoint."""
    manifest = os.path.join(folder_of(saves, iteration), "manifest.json")
    if not os.path.exists(manifest):
        return None
    hashes = sorted(entry["xxh3"] for entry in read_json(manifest)["files"])
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def moved_manifest(manifest, consumed):
    """The manifest's bytes with another number of consumed samples, and its hash mended."""
    text = manifest[:-len(LAST_LINE % 0)]
    if manifest != text + (LAST_LINE % xxh3(text)).encode():
        raise StudyError(5, "the trunk's manifest.json is damaged; make the trunk again")
    text, found = re.subn(CONSUMED, rb"\g<1>%d" % consumed, text)
    if found != 1:
        raise StudyError(5, "the trunk's manifest.json is of an unknown form")
    return text + (LAST_LINE % xxh3(text)).encode()


def write_whole(path, content):
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(content)
    os.replace(part, path)


def start_of_branch(saves, iteration, consumed, start):
    """Makes the folder `start`, for --load: the checkpoint, `consumed` samples into the data.

    Where it is there it stays readable: another call's branch may be starting from it."""
    source, target = folder_of(saves, iteration), folder_of(start, iteration)
    os.makedirs(target, exist_ok=True)
    for name in os.listdir(source):
        if name != "manifest.json":
            with contextlib.suppress(FileExistsError):
                os.symlink(os.path.relpath(os.path.join(source, name), target), os.path.join(target, name))
    with open(os.path.join(source, "manifest.json"), "rb") as file:
        write_whole(os.path.join(target, "manifest.json"), moved_manifest(file.read(), consumed))
    write_whole(os.path.join(start, "latest_checkpointed_iteration.txt"), str(iteration).encode())
