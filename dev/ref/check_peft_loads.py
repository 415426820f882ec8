#!/usr/bin/env python3
"""Loads an exported PEFT folder with Hugging Face's peft. Needs torch, transformers and peft.

    check_peft_loads.py MODEL ADAPTERS MERGED
    check_peft_loads.py MODEL ADAPTERS --tokens 116,104,... --loss L --grad-norm G [--tolerance X]

All folders are written by convert_checkpoint. The first form compares the logits of MODEL with
ADAPTERS with the logits of MERGED. The second compares loss and gradient norm of the adapters on a
sequence with the trainer's: labels are the tokens shifted by one, so the sequence has one token
more than the trainer's --seq-length. Matrices that are fused in the trainer (Q, K and V; gate and
up) share one A there, so their gradients of A are added.
"""
import argparse
import math
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gradient_norm(model):
    """Returns the norm of the adapters' gradients, with one A for each fused matrix."""
    sums = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        if "lora_A" in parts:
            parts = [FUSED.get(part, part) for part in parts]
        key = ".".join(parts)
        sums[key] = sums.get(key, 0) + parameter.grad.double()
    return math.sqrt(sum(float((g * g).sum()) for g in sums.values()))


def check_logits(model, merged):
    tokens = torch.randint(0, merged.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = model(tokens).logits, merged(tokens).logits
        with model.disable_adapter():
            plain = model(tokens).logits
    error = float((found - expected).abs().max() / expected.abs().max())
    effect = float((plain - expected).abs().max() / expected.abs().max())
    if error > 1e-5 or effect < 1e-3:
        sys.exit(f"logits differ by {error:.2e} from the merged model's; the adapters change them by {effect:.2e}")
    print(f"logits differ by {error:.2e}, the adapters change them by {effect:.2e}")


def check_gradients(model, options):
    tokens = torch.tensor([[int(t) for t in options.tokens.split(",")]])
    logits = model(tokens[:, :-1]).logits.double()
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
    loss.backward()
    norm = gradient_norm(model)
    wrong = [f"{name} {found:.6f}, the trainer has {wanted:.6f}" for name, found, wanted in
             (("loss", loss.item(), options.loss), ("gradient norm", norm, options.grad_norm))
             if not abs(found - wanted) <= options.tolerance * abs(wanted)]
    if wrong:
        sys.exit("; ".join(wrong))
    print(f"loss {loss.item():.6f} and {options.loss:.6f}, gradient norm {norm:.6f} and {options.grad_norm:.6f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapters")
    parser.add_argument("merged", nargs="?")
    parser.add_argument("--tokens", help="comma-separated ids")
    parser.add_argument("--loss", type=float)
    parser.add_argument("--grad-norm", type=float)
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative (default: %(default)s)")
    options = parser.parse_args()
    model = PeftModel.from_pretrained(load(options.model), options.adapters, is_trainable=True)
    if options.merged:
        check_logits(model, load(options.merged))
    else:
        check_gradients(model, options)


if __name__ == "__main__":
    main()
