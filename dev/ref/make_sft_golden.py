#!/usr/bin/env python3
"""Generates test/golden/sft for test/e2e/sft.sh: token ids and loss masks of conversations, and the loss
and gradient norm that PyTorch computes for two of make_hf_golden.py's models.

    pip install torch transformers
    dev/ref/make_sft_golden.py

rendered.jsonl   one conversation per line, as --chat rendered reads it. Numbers of tokens with loss
                 differ, so that averages per sequence or micro-batch have other values
expected.json    {model: {"loss", "grad_norm"}}: mean over all tokens with loss, as TRL's SFTTrainer
                 computes it, in fp32. Each conversation is a sequence of its own, without packing
"""
import json
import pathlib
import random

import torch
from transformers import AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
MODELS = ("hf", "hf_mistral")
CONVERSATIONS, LONGEST, V = 14, 12, 50


def conversation(rng):
    """Returns ids and masks of one to three turns: a prompt, then an answer with loss."""
    ids, mask = [], []
    for _ in range(rng.randint(1, 3)):
        prompt, answer = rng.randint(1, 3), rng.choice((1, 1, 2, 6))
        if len(ids) + prompt + answer > LONGEST:
            break
        ids += [rng.randrange(V) for _ in range(prompt + answer)]
        mask += [0] * prompt + [1] * answer
    return {"input_ids": ids, "assistant_masks": mask}


def expected(model, lines):
    total, counted = 0.0, 0
    for line in lines:
        ids, mask = torch.tensor(line["input_ids"]), torch.tensor(line["assistant_masks"])[1:]
        logits = model(ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total = total + (losses * mask).sum()
        counted += int(mask.sum())
    (total / counted).backward()
    norm = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()) ** 0.5
    return {"loss": float(total / counted), "grad_norm": norm}


def main():
    torch.set_num_threads(1)
    rng = random.Random(5)
    lines = [conversation(rng) for _ in range(CONVERSATIONS)]
    folder = GOLDEN / "sft"
    folder.mkdir(exist_ok=True)
    (folder / "rendered.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {name: AutoModelForCausalLM.from_pretrained(GOLDEN / name).eval() for name in MODELS}
    values = {name: expected(model, lines) for name, model in models.items()}
    (folder / "expected.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
