"""Presets of the accuracy study, and the paper's claims about them.

Used by the modules that run the presets and by the reports."""
import math
import re
import struct

from .common import ROOT, StudyError

FOUR = [1234, 1235, 1236, 1237]


FP8_RECIPES = ["tensorwise", "delayed", "blockwise"]


def fp8_presets(name, preset):
    """Returns an entry of PRESETS per FP8 recipe, with the communication formats of `preset`."""
    return {f"{name}{recipe}": (preset, ["--fp8-format", "hybrid", "--fp8-recipe", recipe], FOUR[:1])
            for recipe in FP8_RECIPES}


# Two pipeline stages that exchange 8 bits per value.
STAGES = ["--pipeline-model-parallel-size", "2", "--quantized-activations"]


TWO_BITS = ["--gradient-quantization-bits-inter", "2"]  # between nodes
FEEDBACK = ["--error-feedback"]
MUON = [f"@{ROOT}/configs/muon.args"]


def outer(rate, momentum):
    return ["--outer-lr", rate, "--outer-momentum", momentum]


def gradient_groups(size):
    return ["--gq-group-size-intra", str(size), "--gq-group-size-inter", str(size)]


# {name: (PRESET of scripts/train_*.sh, additional flags, default seeds)}. The first preset is the
# reference of all comparisons.
PRESETS = {
    "baseline": ("baseline", [], FOUR),
    "baseline-bf16": ("baseline-bf16", [], FOUR[:1]),
    "qw-g32": ("qw", ["--wq-group-size", "32"], FOUR[:1]),
    "qw-g128": ("qw", ["--wq-group-size", "128"], FOUR[:1]),
    "qw-g2048": ("qw", [], FOUR[:1]),
    "qwd": ("qwd", [], FOUR[:1]),
    "ulq": ("ulq", [], FOUR[:1]),
    "tlq": ("tlq", [], FOUR[:1]),
    "tlq-hs-g64": ("tlq-hs", gradient_groups(64), FOUR[:1]),
    "tlq-hs": ("tlq-hs", [], FOUR[:1]),
    "tlq-hs-g512": ("tlq-hs", gradient_groups(512), FOUR[:1]),
    "sdp4bit": ("sdp4bit", [], FOUR),
    "sdp4bit-nearest": ("sdp4bit", ["--wq-rounding", "nearest"], FOUR[:1]),
    "zeropp": ("zeropp", [], FOUR[:1]),
    "eden": ("eden", [], FOUR[:1]),
    "eden3": ("eden3", [], FOUR[:1]),
    "eden2-ef": ("eden2-ef", [], FOUR[:1]),
    "lossless": ("lossless", [], FOUR[:1]),
    "eden-lossless": ("eden-lossless", [], FOUR),
    "local": ("local", [], FOUR),
    "local-0.7-0.9": ("local", outer("0.7", "0.9"), FOUR[:1]),  # DiLoCo's
    "qwd-nearest": ("qwd", ["--wq-rounding", "nearest"], FOUR[:1]),
    "eden2": ("eden3", TWO_BITS, FOUR[:1]),
    "activations8": ("baseline", STAGES, FOUR[:1]),
    "activations4": ("baseline", [*STAGES, "--activation-quantization-bits-forward", "4",
                                  "--activation-quantization-bits-backward", "4"], FOUR[:1]),
    "activations4-nearest": ("baseline", [*STAGES, "--activation-quantization-bits-forward", "4",
                                          "--activation-quantization-bits-backward", "4",
                                          "--aq-rounding", "nearest"], FOUR[:1]),
    # Twice 64 pads the vocabulary like the base run's 128.
    "tensor8": ("baseline", ["--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64",
                             "--quantized-tensor-parallel"], FOUR[:1]),
    **fp8_presets("fp8-", "baseline"),
    **fp8_presets("sdp4bit-fp8-", "sdp4bit"),
    "local-eden2": ("local", TWO_BITS, FOUR[:1]),
    "local-eden2-ef": ("local", TWO_BITS + FEEDBACK, FOUR[:1]),
    "local-1-0.7": ("local", outer("1", "0.7"), FOUR[:1]),
    "muon": ("muon", [], FOUR[:1]),
    "muon-local": ("local", MUON, FOUR[:1]),  # MuLoCo
    "muon-local-eden2": ("local", MUON + TWO_BITS, FOUR[:1]),
    "muon-local-eden2-ef": ("local", MUON + TWO_BITS + FEEDBACK, FOUR[:1]),
    "muon-local-1-0.7": ("local", MUON + outer("1", "0.7"), FOUR[:1]),
    "muon-local-0.7-0.9": ("local", MUON + outer("0.7", "0.9"), FOUR[:1]),
}
SETS = {
    "all": list(PRESETS),
    "main": ["baseline", "qwd", "tlq-hs", "sdp4bit"],
    "beyond": ["baseline", "sdp4bit", "eden", "eden3", "eden2", "eden2-ef", "lossless", "eden-lossless",
               "local"],
    "ablation": ["qw-g32", "qw-g128", "qw-g2048", "qwd", "tlq-hs-g64", "tlq-hs", "tlq-hs-g512"],
    "paper": ["baseline", "sdp4bit", "qwd", "tlq-hs", "tlq", "ulq", "qw-g2048", "qw-g128", "qw-g32",
              "tlq-hs-g64", "tlq-hs-g512"],
    "fp8": ["baseline", *fp8_presets("fp8-", "")],
    "layouts": ["baseline", "activations8", "activations4", "tensor8"],
    "sdp4bit-fp8": ["baseline", "sdp4bit", *fp8_presets("sdp4bit-fp8-", "")],
    "optimizers": ["baseline", "muon"],
    "diloco": ["local", "local-1-0.7", "local-0.7-0.9", "local-eden2", "local-eden2-ef"],
    "muloco": ["muon-local", "muon-local-1-0.7", "muon-local-0.7-0.9", "muon-local-eden2",
               "muon-local-eden2-ef"],
}
# FP8 presets and the presets with bf16 linear layers that they must equal.
FP8_EQUAL = [*((preset, "baseline") for preset in fp8_presets("fp8-", "")),
             *((preset, "sdp4bit") for preset in fp8_presets("sdp4bit-fp8-", ""))]
# Replicates of the baseline, for forks only: offset of the fp32 learning rate in units in the last
# place.
REPLICATES = {"replicate1": 1, "replicate2": -1, "replicate3": 2, "replicate4": -2}
# Order of the presets in the paper's tables, as pairs (worse, better).
PAPER_ORDER = [
    ("qw-g2048", "baseline"), ("qw-g128", "baseline"), ("qw-g2048", "qw-g128"), ("qw-g128", "qw-g32"),
    ("qw-g128", "qwd"), ("qw-g2048", "qwd"),
    ("ulq", "tlq"), ("tlq", "tlq-hs"), ("ulq", "tlq-hs"), ("tlq-hs-g512", "tlq-hs"),
]
PAPER_EQUAL = ["qwd", "tlq-hs", "sdp4bit"]  # according to the paper, as good as the baseline


def trains_alone(preset):
    """Returns true if nodes exchange weights every H steps (--local-steps) instead of gradients."""
    return PRESETS.get(preset, ("",))[0] == "local"


def reference_of(preset):
    """Returns the data-parallel preset that a preset of a sweep is compared with.

    Local steps are compared with the same optimizer, Muon with AdamW. None for the baseline."""
    if preset == "baseline":
        return None
    return "muon" if preset.startswith("muon-") else "baseline"


def moved(learning_rate, units):
    """Returns the fp32 learning rate increased by `units` units in the last place."""
    bits = struct.unpack("<I", struct.pack("<f", learning_rate))[0]
    value = struct.unpack("<f", struct.pack("<I", bits + units))[0]
    return value if math.isfinite(value) else learning_rate


def stored_name(preset):
    """Returns the preset's name in result files, where replicates have their earlier names."""
    return re.sub(r"^replicate(?=\d$)", "twin", preset)


def current_name(name):
    """Converts an earlier name of a preset or set, in a result file or command, to its present name."""
    return re.sub(r"^twin(?=(s|\d)$)", "replicate", name)


def named_presets(text, replicates=False):
    """Returns the presets named by --presets, with sets expanded and without duplicates."""
    known = [*PRESETS, *(REPLICATES if replicates else [])]
    sets = {**SETS, "replicates": ["baseline", *REPLICATES]} if replicates else SETS
    names = []
    for name in map(current_name, text.split(",")):
        for preset in sets.get(name, [name]):
            if preset not in known:
                raise StudyError(2, f"--presets {name}: unknown; sets are {', '.join(sets)}, "
                                    f"presets are {', '.join(known)}")
            if preset not in names:
                names.append(preset)
    return names


def numbers(text, flag):
    """Parses a comma-separated list of integers."""
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise StudyError(2, f"{flag} {text}: must be integers separated by commas") from None
