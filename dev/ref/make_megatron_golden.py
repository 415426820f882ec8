#!/usr/bin/env python3
"""Generates test/golden/megatron: three archives with small checkpoints in Megatron-LM's formats, each
saved by four ranks. test/unit/convert/test_megatron.c and test/e2e/megatron.sh import them.

    pip install torch megatron-core==0.12.2 psutil einops
    dev/ref/make_megatron_golden.py       # a minute, no GPU

dist/    format `torch_dist`, 2 tensor x 2 data parallel ranks: a Llama-like model of megatron-core, saved
         by its dist_checkpointing. The distributed optimizer saves the master weights as contiguous ranges
         ("fully sharded, model space"), which may start and end in the middle of a tensor
legacy/  one file per rank, 2 tensor x 2 pipeline parallel ranks: a GPT-2-like model with the names of
         Megatron-LM's legacy GPT, which SDP4Bit's release uses. As in real checkpoints, its arguments
         contain an enum and a function
flat/    one file per rank, with the names of megatron-core and the norms of Transformer Engine: a Llama-like
         model on 2 tensor x 2 pipeline parallel ranks, each with two virtual stages of one layer

Element e of the tensor that this program calls NAME is ((hash(NAME) + 7 * e) % 251 - 125) / 64, which is
exact in bf16. Master weights are larger by 1/1024.
"""
import argparse
import enum
import functools
import os
import pathlib
import shutil
import tarfile
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden" / "megatron"
FOLDER = pathlib.Path(tempfile.gettempdir()) / "megatron_golden"
T = P = LAYERS = 2
C, HEADS, GROUPS, FFN, V, POSITIONS = 32, 4, 2, 32, 64, 16
ITERATION = 7


def whole(name, *shape):
    """Returns the unsplit fp32 tensor that this program calls `name`."""
    number = functools.reduce(lambda h, c: (h * 31 + ord(c)) % 2**32, name, 0)
    count = torch.Size(shape).numel()
    return (((number + 7 * torch.arange(count)) % 251 - 125) / 64).reshape(shape)


def arguments(**changes):
    common = dict(
        num_layers=LAYERS, hidden_size=C, num_attention_heads=HEADS, ffn_hidden_size=FFN,
        kv_channels=C // HEADS,
        max_position_embeddings=POSITIONS, seq_length=POSITIONS, padded_vocab_size=V, vocab_size=V - 1,
        tokenizer_type="NullTokenizer", vocab_file=None, merge_file=None, norm_epsilon=1e-3,
        tensor_model_parallel_size=T, pipeline_model_parallel_size=P,
        virtual_pipeline_model_parallel_size=None,
        attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.02, params_dtype=torch.bfloat16,
        bf16=True,
        num_experts=None, iteration=ITERATION, consumed_train_samples=56)
    return argparse.Namespace(**{**common, **changes})


# --- torch_dist ----------------------------------------------------------------------------------

# Name in this program, and how the tensor is split: by a dimension, "halves", or None (not split).
IN_LAYER = {
    "input_layernorm.weight": ("input_norm.weight", None, (C,)),
    "self_attention.q_layernorm.weight": ("self_attention.q_layernorm.weight", None, (C // HEADS,)),
    "self_attention.k_layernorm.weight": ("self_attention.k_layernorm.weight", None, (C // HEADS,)),
    "self_attention.linear_qkv.weight": ("self_attention.query_key_value.weight", 0,
                                         ((HEADS + 2 * GROUPS) * C // HEADS, C)),
    "self_attention.linear_proj.weight": ("self_attention.dense.weight", 1, (C, C)),
    "pre_mlp_layernorm.weight": ("post_attention_norm.weight", None, (C,)),
    "mlp.linear_fc1.weight": ("mlp.dense_h_to_4h.weight", "halves", (2 * FFN, C)),
    "mlp.linear_fc2.weight": ("mlp.dense_4h_to_h.weight", 1, (C, FFN)),
}
OUTSIDE = {
    "embedding.word_embeddings.weight": ("embedding.word_embeddings.weight", 0, (V, C)),
    "output_layer.weight": ("output_layer.weight", 0, (V, C)),
    "decoder.final_layernorm.weight": ("encoder.final_norm.weight", None, (C,)),
}


def part(tensor, cut, rank):
    if cut is None:
        return tensor
    if cut == "halves":
        return torch.cat([half.chunk(T)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(T, dim=cut)[rank]


def fill(model, rank):
    """Sets the parameters of a rank. Returns {name: master weights}."""
    master_weights = {}
    for name, weight in model.named_parameters():
        if name.startswith("decoder.layers."):
            layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
            ours, cut, shape = IN_LAYER[rest]
            ours = f"encoder.layers.{layer}.{ours}"
        else:
            ours, cut, shape = OUTSIDE[name]
        value = part(whole(ours, *shape), cut, rank)
        assert value.shape == weight.shape, (name, value.shape, weight.shape)
        weight.data.copy_(value)
        master_weights[name] = value + 1 / 1024
    return master_weights


def sharded_master_weights(model_state, master_weights, data_rank):
    """Imitates DistributedOptimizer.sharded_param_state_fs_model_space on two data-parallel ranks that own
    different parts of each parameter."""
    from dataclasses import replace

    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    state = {}
    for name, master in master_weights.items():
        flat, cut = master.flatten(), master.numel() * 2 // 3 - 1
        run = slice(cut, flat.numel()) if data_rank else slice(0, cut)
        sharded = model_state[name]
        changes = dict(key=f"optimizer.state.fp32_param.{sharded.key}", data=flat[run], flattened_range=run)
        if not isinstance(sharded, ShardedTensorFactory):
            changes["dtype"] = torch.float32
        state["master " + name] = replace(sharded, **changes, replica_id=(*sharded.replica_id[:-1], 0))
    return state


def save_dist(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(T * P), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      CUDA_DEVICE_MAX_CONNECTIONS="1")
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    numpy.product = numpy.prod  # removed in numpy 2
    # megatron-core asks for a GPU in some places, but does not use it here.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    parallel_state.initialize_model_parallel(T, 1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=C, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=FFN, tensor_model_parallel_size=T, use_cpu_initialization=True,
        params_dtype=torch.bfloat16, bf16=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        qk_layernorm=True)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=V, max_sequence_length=POSITIONS,
                     share_embeddings_and_output_weights=False, position_embedding_type="rope").bfloat16()
    master_weights = fill(model, parallel_state.get_tensor_model_parallel_rank())
    state = model.sharded_state_dict(prefix="")
    args = arguments(pipeline_model_parallel_size=1, normalization="RMSNorm",
                     position_embedding_type="rope", rotary_base=500000, rotary_percent=1.0, swiglu=True,
                     add_bias_linear=False, group_query_attention=True,
                     num_query_groups=GROUPS, untie_embeddings_and_output_weights=True, qk_layernorm=True,
                     bias_gelu_fusion=False)
    saved = {**state, **sharded_master_weights(model.sharded_state_dict(prefix=""), master_weights,
                                          parallel_state.get_data_parallel_rank()),
             "args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    folder = FOLDER / "dist" / f"iter_{ITERATION:07d}"
    if rank == 0:
        shutil.rmtree(FOLDER / "dist", ignore_errors=True)
        folder.mkdir(parents=True)
        (FOLDER / "dist" / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(saved, folder, sharded_strategy=strategy)


# --- legacy --------------------------------------------------------------------------------------

class ModelType(enum.Enum):
    encoder_or_decoder = 1


LEGACY_LAYER = {
    "input_norm.weight": (None, (C,)), "input_norm.bias": (None, (C,)),
    "self_attention.query_key_value.weight": (0, (3 * C, C)),
    "self_attention.query_key_value.bias": (0, (3 * C,)),
    "self_attention.dense.weight": (1, (C, C)), "self_attention.dense.bias": (None, (C,)),
    "post_attention_norm.weight": (None, (C,)), "post_attention_norm.bias": (None, (C,)),
    "mlp.dense_h_to_4h.weight": (0, (FFN, C)), "mlp.dense_h_to_4h.bias": (0, (FFN,)),
    "mlp.dense_4h_to_h.weight": (1, (C, FFN)), "mlp.dense_4h_to_h.bias": (None, (C,)),
}


class Buffer:
    """Allocates parameters as views of a single buffer, like Megatron-LM's distributed optimizer."""
    def __init__(self):
        self.buffer, self.used = torch.zeros(16384, dtype=torch.bfloat16), 0

    def put(self, name, cut, shape, rank):
        value = part(whole(name, *shape), cut, rank)
        view = self.buffer[self.used:self.used + value.numel()].view(value.shape)
        self.used += value.numel()
        return view.copy_(value)


def save_legacy():
    shutil.rmtree(FOLDER / "legacy", ignore_errors=True)
    args = arguments(bias_gelu_fusion=True, add_position_embedding=True,
                     model_type=ModelType.encoder_or_decoder,
                     activation=torch.nn.functional.gelu, world_size=8, data_path=["1.0", "text_document"])
    words = "embedding.word_embeddings.weight"
    for stage in range(P):
        for rank in range(T):
            buffer, encoder = Buffer(), {}
            model = {"language_model": {"encoder": encoder}}
            if stage == 0:
                model["language_model"]["embedding"] = {
                    "word_embeddings": {"weight": buffer.put(words, 0, (V, C), rank)},
                    "position_embeddings": {"weight": buffer.put("embedding.position_embeddings.weight", None,
                                                                 (POSITIONS, C), rank)}}
            for layer in range(LAYERS // P):
                for name, (cut, shape) in LEGACY_LAYER.items():
                    whole_name = f"encoder.layers.{layer + stage * LAYERS // P}.{name}"
                    encoder[f"layers.{layer}.{name}"] = buffer.put(whole_name, cut, shape, rank)
                encoder[f"layers.{layer}.self_attention.core_attention._extra_state"] = None
            if stage == P - 1:
                for name in ("final_norm.weight", "final_norm.bias"):
                    encoder[name] = buffer.put(f"encoder.{name}", None, (C,), rank)
                model["word_embeddings_for_head"] = {"weight": buffer.put(words, 0, (V, C), rank)}
            buffer.buffer.untyped_storage().resize_(2 * buffer.used)
            folder = FOLDER / "legacy" / f"iter_{ITERATION:07d}" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": ITERATION, "model": model,
                        "optimizer": {"optimizer": {"param_groups": [{"lr": 1e-4, "step": ITERATION}]}},
                        "rng_state": [{"cpu": torch.arange(16, dtype=torch.uint8),
                                       "python": (3, (1, 2), None)}]},
                       folder / "model_optim_rng.pt")
    (FOLDER / "legacy" / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


TE_NAMES = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}


def save_flat():
    shutil.rmtree(FOLDER / "flat", ignore_errors=True)
    chunks = 2
    args = arguments(num_layers=chunks * P, virtual_pipeline_model_parallel_size=chunks,
                     normalization="RMSNorm",
                     use_rotary_position_embeddings=True, swiglu=True, add_bias_linear=False,
                     group_query_attention=True, num_query_groups=GROUPS, qk_layernorm=True,
                     untie_embeddings_and_output_weights=True, bias_gelu_fusion=False)
    for stage in range(P):
        for rank in range(T):
            saved = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
            for chunk in range(chunks):
                layer, model = chunk * P + stage, {}
                for name, (ours, cut, shape) in IN_LAYER.items():
                    value = part(whole(f"encoder.layers.{layer}.{ours}", *shape), cut, rank)
                    model["decoder.layers.0." + TE_NAMES.get(name, name)] = value.bfloat16()
                model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
                first, last = layer == 0, layer == chunks * P - 1
                for name, (ours, cut, shape) in OUTSIDE.items():
                    if first if name.startswith("embedding") else last:
                        model[name] = part(whole(ours, *shape), cut, rank).bfloat16()
                saved[f"model{chunk}"] = model
            folder = FOLDER / "flat" / f"iter_{ITERATION:07d}" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save(saved, folder / "model_optim_rng.pt")


def pack(name):
    def plain(entry):
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tarfile.open(GOLDEN / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(FOLDER / name, name, filter=plain)


if __name__ == "__main__":
    save_legacy()
    save_flat()
    multiprocessing.spawn(save_dist, args=(29533,), nprocs=T * P)
    for name in ("dist", "legacy", "flat"):
        pack(name)
    shutil.rmtree(FOLDER)
