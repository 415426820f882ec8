#!/usr/bin/env python3
"""Compares losses and gradients of a small Llama with Hugging Face's LlamaForCausalLM. With
--qk-layernorm, compares with Qwen3ForCausalLM, which also has query and key norms.

Works like layer_gradients.py: transformers in fp32 (the reference), transformers in bf16 and this program
get the same bf16 weights and tokens. For every tensor, the error of this program may be at most twice the
error of transformers in bf16. With --fp8-format, the linears of all layers run in FP8 on both sides
(fp8.py); the reference stays fp32 without FP8.

    python3 dev/ref/llama_gradients.py build/test/gpu/layer_dump [--seq-length 1024] [--rows 2]
        [--qk-layernorm] [--kv-channels SIZE] [--deterministic] [--fp8-format hybrid | e4m3]
        needs PyTorch and transformers

Prints "ok NAME" and "not ok NAME: why" lines and a summary. Exits with 1 if a check failed.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
import transformers

import fp8
import make_goldens as model
from layer_gradients import DEVIATION, compare, read_golden

PARTS = {"input_norm.weight": "input_layernorm.weight",
         "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
         "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
         "self_attention.dense.weight": "self_attn.o_proj.weight",
         "post_attention_norm.weight": "post_attention_layernorm.weight",
         "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight"}


def split(name, value, o):
    """Splits a tensor of this program into the tensors of transformers. Returns [(name, tensor)]."""
    heads, size = o.num_attention_heads // o.num_query_groups, o.kv_channels
    whole = {"embedding.word_embeddings.weight": "model.embed_tokens.weight",
             "output_layer.weight": "lm_head.weight", "encoder.final_norm.weight": "model.norm.weight"}
    if name in whole:
        return [(whole[name], value)]
    _, _, layer, part = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if part in PARTS:
        return [(prefix + PARTS[part], value)]
    if part == "mlp.dense_h_to_4h.weight":
        return list(zip((prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"), value.chunk(2)))
    groups = value.view(o.num_query_groups, heads + 2, size, o.hidden_size)
    parts = groups[:, :heads], groups[:, heads], groups[:, heads + 1]
    return [(f"{prefix}self_attn.{n}_proj.weight", t.reshape(-1, o.hidden_size)) for n, t in zip("qkv", parts)]


def shapes(o):
    C, size = o.hidden_size, o.kv_channels
    result = {"embedding.word_embeddings.weight": (o.vocab_size, C), "output_layer.weight": (o.vocab_size, C)}
    for layer in range(o.num_layers):
        prefix = f"encoder.layers.{layer}."
        result[prefix + "input_norm.weight"] = (C,)
        rows = (o.num_attention_heads + 2 * o.num_query_groups) * size
        result[prefix + "self_attention.query_key_value.weight"] = (rows, C)
        for kind in "qk" if o.qk_layernorm else "":
            result[f"{prefix}self_attention.{kind}_layernorm.weight"] = (size,)
        result[prefix + "self_attention.dense.weight"] = (C, o.num_attention_heads * size)
        result[prefix + "post_attention_norm.weight"] = (C,)
        result[prefix + "mlp.dense_h_to_4h.weight"] = (2 * o.ffn_hidden_size, C)
        result[prefix + "mlp.dense_4h_to_h.weight"] = (C, o.ffn_hidden_size)
    result["encoder.final_norm.weight"] = (C,)
    return result


class Part(torch.nn.Module):
    """One of several linears of the same input, which this program computes as one linear: with one scale
    of the weights and of the gradients. They are called in order; the first computes all."""

    def __init__(self, fused, index, linear):
        super().__init__()
        self.fused, self.index, self.weight = fused, index, linear.weight

    def forward(self, x):
        if self.index == 0:
            weights = [part.weight for part in self.fused["parts"]]
            y = self.fused["linear"](x, torch.cat(weights))
            self.fused["results"] = y.split([len(weight) for weight in weights], dim=-1)
        return self.fused["results"][self.index]


def use_fp8(llama, kind):
    """Replaces the linears of the layers by linears in FP8."""
    for layer in llama.model.layers:
        for module, names in ((layer.self_attn, "q_proj k_proj v_proj"), (layer.self_attn, "o_proj"),
                              (layer.mlp, "gate_proj up_proj"), (layer.mlp, "down_proj")):
            fused = {"linear": fp8.linear(kind)}
            names = names.split()
            fused["parts"] = [Part(fused, i, getattr(module, name)) for i, name in enumerate(names)]
            for name, part in zip(names, fused["parts"]):
                setattr(module, name, part)


def theirs(weights, dtype, inputs, targets, o, fp8_format=None):
    """Returns the losses and {name: gradient} that transformers computes."""
    family = ((transformers.Qwen3Config, transformers.Qwen3ForCausalLM) if o.qk_layernorm else
              (transformers.LlamaConfig, transformers.LlamaForCausalLM))
    config = family[0](
        vocab_size=o.vocab_size, hidden_size=o.hidden_size, intermediate_size=o.ffn_hidden_size,
        num_hidden_layers=o.num_layers, num_attention_heads=o.num_attention_heads,
        num_key_value_heads=o.num_query_groups, head_dim=o.kv_channels,
        max_position_embeddings=o.seq_length, rms_norm_eps=1e-5,
        rope_theta=10000.0, attention_dropout=0.0, tie_word_embeddings=False, use_cache=False)
    llama = family[1](config)
    state = {n: t for name, value in weights.items() for n, t in split(name, value, o)}
    llama.load_state_dict(state, strict=True)
    llama.to(device=inputs.device, dtype=dtype)
    if fp8_format:
        use_fp8(llama, fp8_format)
    logits = llama(input_ids=inputs).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses.mean().backward()
    return losses.detach().cpu(), {n: p.grad.float().cpu() for n, p in llama.named_parameters()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    for flag, default in (("num-layers", 2), ("hidden-size", 512), ("ffn-hidden-size", 1408),
                          ("num-attention-heads", 8), ("num-query-groups", 2), ("seq-length", 1024),
                          ("vocab-size", 4096), ("rows", 2), ("kv-channels", 0)):
        parser.add_argument("--" + flag, type=int, default=default)
    for flag in ("qk-layernorm", "deterministic"):
        parser.add_argument("--" + flag, action="store_true")
    parser.add_argument("--fp8-format", choices=["hybrid", "e4m3"])
    o = parser.parse_args()
    o.kv_channels = o.kv_channels or o.hidden_size // o.num_attention_heads
    generator = torch.Generator().manual_seed(4321)
    weights = {}
    for name, shape in shapes(o).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (DEVIATION * noise if len(shape) == 2 else 1 + 0.1 * noise).bfloat16().float()
    tokens = torch.randint(0, o.vocab_size, (o.rows, o.seq_length + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    with tempfile.TemporaryDirectory() as folder:
        files = os.path.join(folder, "input"), os.path.join(folder, "output")
        out = model.Writer()
        out.add("config", [o.num_layers, o.hidden_size, o.num_attention_heads, o.seq_length, o.vocab_size,
                           o.rows, o.num_query_groups, o.ffn_hidden_size, o.qk_layernorm,
                           o.kv_channels], "i32")
        out.add("tokens", inputs, "i32")
        out.add("targets", targets, "i32")
        for name, value in weights.items():
            out.add("weight." + name, value, "bf16")
        out.write(files[0])
        flags = ["--deterministic"] * o.deterministic + fp8.flags(o.fp8_format)
        subprocess.run([o.program, *files, *flags], check=True)
        ours = read_golden(files[1])

    device = fp8.device(o.fp8_format)
    inputs, targets = inputs.to(device), targets.to(device)
    losses32, gradients32 = theirs(weights, torch.float32, inputs, targets, o)
    losses16, gradients16 = theirs(weights, torch.bfloat16, inputs, targets, o, o.fp8_format)
    rule = "transformers FP8" if o.fp8_format else "transformers bf16"
    good = [compare("losses of the positions", ours["losses"].reshape(-1).float(), losses16, losses32,
                    rule=rule)]
    for name, shape in shapes(o).items():
        for part, tensor in split(name, ours["gradient." + name].view(shape), o):
            in_fp8 = o.fp8_format and part.endswith("_proj.weight")
            good.append(compare("gradient of " + part, tensor.reshape(-1), gradients16[part].reshape(-1),
                                gradients32[part].reshape(-1), rule=rule, at_least=0.5 if in_fp8 else 0.0))
    print(f"llama_gradients: {sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
