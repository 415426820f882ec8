#!/usr/bin/env python3
"""Generates test/golden/hf, hf_llama, hf_mistral, hf_qwen2 and hf_qwen3: small models saved by Hugging Face's
transformers, and their logits. test/unit/convert/test_hf.c imports the models and compares the trainer's
logits.

    pip install torch transformers
    dev/ref/make_hf_golden.py             # takes seconds
    dev/ref/make_hf_golden.py hf_qwen2    # only this folder

logits.golden has the format of make_goldens.py:
    tokens        i32  (B, T)
    logits        f32  (B, T, V), computed in fp32 from fp32 weights
    error.logits  f32  (2): root mean square and largest error of the logits computed in bf16
"""
import pathlib
import sys

import torch
import transformers
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM)

from make_goldens import Writer

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
B, T, V = 2, 12, 50


def disturb(model, generator):
    """Sets weights that are larger than usual, so that attention is not uniform. Biases and norm weights
    are random, so that every term has an effect."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        with torch.no_grad():
            if weight.dim() == 2:
                weight.copy_(0.2 * noise)
            else:
                gain = ("ln_" in name or "norm" in name) and name.endswith("weight")
                weight.copy_((1 if gain else 0) + 0.1 * noise)


def models():
    """Yields (folder, model) pairs. The models have unusual MLP sizes, epsilons and rotary bases, and two
    queries per key. Llama has biases and an untied output layer. Mistral has a window of 5 tokens.
    Qwen2 has YaRN, with a range that contains
    all columns of a head. Qwen3 has a hidden size that is smaller than heads x head size."""
    ends = {"vocab_size": V, "bos_token_id": V - 1, "eos_token_id": V - 1}
    yield "hf", GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, n_inner=40, n_positions=T,
                                           layer_norm_epsilon=1e-3, **ends))
    llama = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=40, max_position_embeddings=T, rms_norm_eps=1e-3, **ends,
                 rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    # transformers 4.46 reads these keys, and so do newer versions.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": T, "beta_fast": 0.9,
            "beta_slow": 0.05}
    older = {k: v for k, v in llama.items() if k != "rope_parameters"} | {"rope_theta": 500.0}
    yield "hf_qwen2", Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, rope_scaling=yarn, **older))
    yield "hf_mistral", MistralForCausalLM(MistralConfig(sliding_window=5, **older))
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 51):
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM
    yield "hf_llama", LlamaForCausalLM(LlamaConfig(attention_bias=True, mlp_bias=True, **llama))
    yield "hf_qwen3", Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=True, **llama))


def make(folder, model):
    generator = torch.Generator().manual_seed(1234)
    model.eval()
    disturb(model, generator)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(folder)
    with torch.no_grad():
        rounded = model.bfloat16()(tokens).logits
    out = Writer()
    out.add("tokens", tokens, "i32")
    out.add("logits", logits)
    out.add_error("logits", rounded, logits)
    out.write(folder / "logits.golden")


def main():
    torch.set_num_threads(1)
    for name, model in models():
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(GOLDEN / name, model)


if __name__ == "__main__":
    main()
