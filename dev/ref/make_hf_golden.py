#!/usr/bin/env python3
"""Makes test/golden/hf: a small GPT2LMHeadModel as Hugging Face's transformers saves it, and the logits
that it computes. test/unit/checkpoint/test_hf.c imports it and compares the trainer's logits.

    pip install torch transformers
    dev/ref/make_hf_golden.py             # takes seconds

logits.golden has the format of make_goldens.py:
    tokens        i32  (B, T)
    logits        f32  (B, T, V), computed in fp32 from the weights in fp32
    error.logits  f32  (2): root mean square and largest difference when weights and sums are in bf16
"""
import pathlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from make_goldens import Writer

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden" / "hf"
B, T, V, C = 2, 12, 50, 24


def disturb(model, generator):
    """Weights larger than a real initialisation, so that attention is not uniform. Biases and LayerNorms
    are off their usual 0 and 1, so that no term is invisible."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        with torch.no_grad():
            if weight.dim() == 2:
                weight.copy_(0.2 * noise)
            else:
                weight.copy_((1 if "ln_" in name and name.endswith("weight") else 0) + 0.1 * noise)


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1234)
    # An MLP that is not four times as wide, and an epsilon that is not the usual one.
    config = GPT2Config(n_layer=2, n_embd=C, n_head=3, n_inner=40, n_positions=T, vocab_size=V,
                        layer_norm_epsilon=1e-3, bos_token_id=V - 1, eos_token_id=V - 1)
    model = GPT2LMHeadModel(config).eval()
    disturb(model, generator)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(FOLDER)
    with torch.no_grad():
        rounded = model.bfloat16()(tokens).logits
    out = Writer()
    out.add("tokens", tokens, "i32")
    out.add("logits", logits)
    out.add_error("logits", rounded, logits)
    out.write(FOLDER / "logits.golden")


if __name__ == "__main__":
    main()
