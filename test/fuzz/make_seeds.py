#!/usr/bin/env python3
"""Writes the seed corpus of the fuzz targets to FOLDER/<target>/<number>: small valid inputs and common
invalid ones. The output is the same on every machine.

usage: test/fuzz/make_seeds.py FOLDER          (called by test/fuzz/run.sh, in the root of the repository)
"""
import io
import json
import os
import pickle
import struct
import sys
import types
import zipfile

SEPARATOR = b"\xff"  # between the two parts of an input (fuzz.h)


def shard(lengths, boundaries, dtype=8, version=1, modes=False, data=None, magic=b"MMIDIDX\0\0", count=None):
    size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}.get(dtype, 2)
    pointers, at = [], 0
    for length in lengths:
        pointers.append(at)
        at += length * size
    index = magic + struct.pack("<QBQQ", version, dtype, len(lengths) if count is None else count,
                                len(boundaries))
    index += struct.pack("<%di" % len(lengths), *lengths) + struct.pack("<%dq" % len(pointers), *pointers)
    index += struct.pack("<%dq" % len(boundaries), *boundaries) + (bytes(len(lengths)) if modes else b"")
    return index + b"\xff" * 7 + b"\xfe" + (bytes(i % 50 for i in range(at)) if data is None else data)


def shards():
    yield shard([5, 3, 9], [0, 1, 2, 3])
    yield shard([5, 0, 9, 1], [0, 1, 3, 4], dtype=4)
    yield shard([40], [0, 1], dtype=5)
    yield shard([7, 7, 7, 7], [0, 0, 2, 2, 4], dtype=1, modes=True)
    yield shard([2, 2], [0, 2], dtype=3)
    yield shard([3, 2], [0, 2], dtype=2)
    yield shard([], [0])
    yield shard([1, 1, 1, 1, 1, 1, 1, 1], [0, 8])
    yield shard([5, -1, 9], [0, 3], data=bytes(26))
    yield shard([0x7FFFFFFF], [0, 1], data=b"")
    yield shard([5, 3], [0, 2], count=0x1555555555555555)
    yield shard([5, 3], [1, 2])
    yield shard([5, 3], [0, 2], version=2)
    yield shard([5, 3], [0, 2], dtype=6)
    yield b"MMIDIDX\0\0"


def tensors(entries, metadata=None):
    header, at = ({"__metadata__": metadata} if metadata is not None else {}), 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return json.dumps(header).encode(), bytes(at)


def manifest(**changes):
    first = [[0, k, 0, 6] for k in range(3)] + [[0, 3, 0, 6], [1, 3, 0, 4]]
    slices = [first, [[1, k, 0, 4] for k in range(3)]]
    whole = {
        "format": "sdp4bit.c checkpoint", "version": 1, "program": "sdp4bit.c 0.1.0", "commit": "0",
        "libraries": "", "world_size": 2, "weight_dtype": "BF16",
        "state": {"iteration": 100, "consumed_train_samples": 800, "consumed_valid_samples": 0,
                  "scheduler_samples": 800, "adam_steps": 100,
                  "beta1_power": "0x1.9p-16", "beta2_power": "0x1.ep-1", "skipped_iterations": 0,
                  "nan_iterations": 0, "flops_so_far": "0x1p+40"},
        "arguments": {"num_layers": 2},
        "tensors": [{"name": "wte", "shape": [2, 3]}, {"name": "bias", "shape": [4]}],
        "kinds": ["master", "exp_avg", "exp_avg_sq", "weight"],
        "files": [{"folder": "mp_rank_00", "name": "shard_%05d_of_00002.safetensors" % i, "bytes": 1000,
                   "xxh3": "0123456789abcdef", "slices": slices[i]}
                  for i in range(2)],
    }
    whole.update(changes)
    return json.dumps(whole)[:-1].encode() + b",\n"


def manifests():
    tiny = {"folder": "mp_rank_00", "name": "a", "bytes": 16, "xxh3": "0123456789abcdef"}
    yield manifest()
    yield manifest(version=2)
    yield manifest(version=4)
    yield manifest(version=3, kinds=["weight", "residual"],
                   files=[dict(tiny, slices=[[0, 1, 0, 4, 0], [0, 1, 0, 2, 0, 1, 1], [0, 1, 0, 2, 1, 1, 1]])])
    yield manifest(files=[dict(tiny, slices=[[0, 0, 0, 2, 0, 1], [0, 0, 0, 2, 1, 2], [0, 0, 2, 4, 1, 2]])])
    yield manifest(files=[dict(tiny, slices=[[0, 0, 0, 2, 0, 2], [0, 0, 0, 2, 1, 2]])])
    yield manifest(weight_dtype="F32", files=[])
    yield manifest(tensors=[{"name": "wte", "shape": [1 << 30, 1 << 30]}])
    yield manifest(tensors=[{"name": "wte", "shape": [1, 2, 3]}])
    yield manifest(tensors=[{"name": "wte", "shape": [2]}, {"name": "wte", "shape": [2]}])
    yield manifest(files=[dict(tiny, folder="..", slices=[])])
    yield manifest(files=[dict(tiny, name="a/../../b", slices=[])])
    yield manifest(files=[dict(tiny, slices=[[0, 0, 0, 3], [0, 0, 2, 4]])])
    yield manifest(files=[dict(tiny, slices=[[0, 0, 0, 6]])])
    yield manifest(files=[dict(tiny, slices={"0": [0, 0, 0, 1]})])
    yield manifest(state={})
    yield b"{" * 1200


def hf_header_of(shapes, dtype="F32", width=4, **changes):
    """Header of a safetensors file with these shapes; `changes` replaces entries of tensors."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = width * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header.update(changes)
    return json.dumps(header).encode()


def hf_header(prefix="", **changes):
    """Header of the weights of a small GPT-2."""
    shapes = {"wte.weight": [8, 8], "wpe.weight": [4, 8]}
    layer = {"ln_1": [8], "attn.c_attn": [8, 24], "attn.c_proj": [8, 8], "ln_2": [8], "mlp.c_fc": [8, 8],
             "mlp.c_proj": [8, 8]}
    for name, shape in layer.items():
        shapes["h.0." + name + ".weight"], shapes["h.0." + name + ".bias"] = shape, shape[-1:]
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = [8]
    return hf_header_of({prefix + name: shape for name, shape in shapes.items()}, **changes)


def llama_header(tied=False, **changes):
    """Header of the weights of a small Llama: two heads of size 8 with a shared key and value."""
    shapes = {"model.embed_tokens.weight": [8, 16], "model.norm.weight": [16]}
    layer = {"input_layernorm": [16], "self_attn.q_proj": [16, 16], "self_attn.k_proj": [8, 16],
             "self_attn.v_proj": [8, 16], "self_attn.o_proj": [16, 16], "post_attention_layernorm": [16],
             "mlp.gate_proj": [8, 16], "mlp.up_proj": [8, 16], "mlp.down_proj": [16, 8]}
    for name, shape in layer.items():
        shapes["model.layers.0." + name + ".weight"] = shape
    if not tied:
        shapes["lm_head.weight"] = [8, 16]
    return hf_header_of(shapes, **changes)


def llama_folders():
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
              "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 4, "vocab_size": 8,
              "rms_norm_eps": 1e-5, "eos_token_id": [7, 6], "head_dim": 8, "attention_bias": False,
              "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    def folder(header, **changes):
        return json.dumps(dict(config, **changes)).encode() + SEPARATOR + header
    weights = {name: "l.safetensors" for name in json.loads(llama_header()) if name != "__metadata__"}
    yield folder(llama_header())
    yield folder(llama_header(dtype="BF16", width=2))
    yield folder(llama_header(tied=True), tie_word_embeddings=True)
    yield folder(llama_header(), tie_word_embeddings=True)
    yield folder(llama_header(), num_key_value_heads=2)
    yield folder(llama_header(), num_key_value_heads=3)
    yield folder(llama_header(), attention_bias=True, mlp_bias=True)
    yield folder(llama_header(), rope_parameters=None, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    yield folder(llama_header(), rope_theta=1e4, rope_parameters=[])
    yield folder(llama_header(), model_type="mistral", sliding_window=None)
    yield folder(llama_header(), model_type="mistral", sliding_window=4096)
    yield folder(b"I" + json.dumps({"weight_map": weights}).encode())


def hf_folders():
    config = {"model_type": "gpt2", "activation_function": "gelu_new", "n_layer": 1, "n_embd": 8, "n_head": 1,
              "n_inner": 8, "n_positions": 4, "vocab_size": 8, "layer_norm_epsilon": 1e-5, "eos_token_id": 7}
    tied = {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}
    text = json.dumps(config).encode() + SEPARATOR
    weights = {name: "a.safetensors" for name in json.loads(hf_header()) if name != "__metadata__"}
    yield text + hf_header()
    yield text + hf_header(prefix="transformer.", dtype="BF16", width=2)
    yield text + hf_header(dtype="F16", width=2)
    yield text + hf_header(**{"lm_head.weight": tied, "h.0.attn.bias": tied})
    yield text + hf_header(**{"lm_head.weight": dict(tied, shape=[64])})
    yield text + hf_header(**{"wte.weight": dict(tied, data_offsets=[1 << 52, (1 << 52) + 256])})
    yield text + hf_header(**{"h.0.extra": tied})
    yield text + b"R" + struct.pack("<Q", 1 << 63) + b"{}"
    yield text + b"R" + struct.pack("<Q", 2) + b"{}"
    yield text + b"I" + json.dumps({"weight_map": weights}).encode()
    yield text + b"I" + json.dumps({"weight_map": dict(weights, wte="../../a.safetensors")}).encode()
    yield text + b"I" + json.dumps({"weight_map": {"wte.weight": "b.safetensors"}}).encode()
    yield json.dumps(dict(config, n_layer=10000, vocab_size=1 << 30)).encode() + SEPARATOR + hf_header()
    yield json.dumps(dict(config, n_embd=1 << 20, n_inner=None)).encode() + SEPARATOR + hf_header()
    yield json.dumps(dict(config, activation_function="relu")).encode() + SEPARATOR + hf_header()
    yield b"{}" + SEPARATOR
    yield from llama_folders()


def arguments():
    same = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 4,
            "max_position_embeddings": 32, "padded_vocab_size": 384,
            "lr": 0.001, "min_lr": 0.0, "lr_decay_style": "linear", "schedule_warmup_samples": 0.0,
            "schedule_decay_samples": 20, "start_weight_decay": 0.01,
            "weight_decay_incr_style": "constant", "seed": 1234, "seq_length": 32, "split": "969, 30, 1",
            "tokenizer_type": "Byte"}
    yield json.dumps(same).encode()
    yield json.dumps(dict(same, lr=1e308, lr_decay_style="cosine", schedule_decay_samples=2**53)).encode()
    yield json.dumps(dict(same, num_layers="2", split="x" * 500)).encode()
    yield b"[]"
    yield b"{}"


def json_lines():
    yield b'{"text": "plain"}'
    yield b'{"meta": {"a": [1, -2.5e+3, true, null, NaN, -Infinity]}, "text": "a\\n\\u00e9\\ud83d\\ude00\\ud800", "text": "last"}'
    yield b'{"te\\u0078t": "\xc3\xa9\xff\xfe"}'
    yield b"[" * 1001
    yield b'{"a":' + b'[{"b":' * 400
    yield b'{"text": 5}'
    yield b'{"text": "\\ud800\\u12"}'
    yield b'{"": "x", "\xc3\xa9": "\\/\\b\\f\\r\\t\\"\\\\"}'


def chats():
    turns = b'{"role": "user", "content": " a\\n"}, {"role": "assistant", "content": "\xc3\xa9 b\\u00a0"}'
    system = b'{"role": "system", "content": ""}'
    for template in b"\0\1\2\3":
        yield bytes([template]) + b'{"messages": [' + turns + b"]}"
        yield bytes([template]) + b'{"messages": [' + b", ".join([system, turns, system, turns]) + b"]}"
    yield b'\0{"messages": [{"role": "tool", "content": "x", "tool_calls": null}]}'
    yield b'\1{"messages": [{"role": "assistant", "content": "</think>"}], "tools": 1}'
    yield b'\0{"input_ids": [65, 256, 0], "assistant_masks": [0, 1, 1]}'
    yield b'\0{"input_ids": [257, -1, 1e99], "assistant_masks": [2]}'


def tasks():
    choices = b'{"task": "a", "context": "Q:", "choices": ["x", "yz"], "gold": 1}\n'
    yield choices + b'\n{"task": "b", "context": "c \\n", "continuation": " d", "id": [1, {}]}\r\n'
    yield choices + b'{"task": "a", "context": "", "choices": ["\xc3\xa9\\u2003"], "gold": 0, "delimiter": ""}'
    yield b'{"task": "a", "context": "0123456789abcdefghi", "continuation": "jk"}\n' + choices
    yield b'{"task": "a", "context": "c", "continuation": "0123456789abcdefg"}'
    yield b'{"task": "a", "context": " \\t", "continuation": "x"}'
    yield choices + b'{"task": "a", "context": "c\\u0000", "choices": [""], "gold": 2}'
    yield b'{"text": " ab  cd\\u2003"}\n{"text": "word"}\n{"text": "one two three four five", "task": "t"}'
    yield b" \n = = Title = = \n \n It 's ( a @-@ b ) , \" c \" . 30 \xc2\xb0 N \n"
    yield b"[" * 1001
    yield b'{"task": 1, "context": "\\ud800", "choices": {}, "gold": 1e99}'


def corpora():
    yield b'{"text": "one"}\n{"text": "two"}\n'
    yield b'{"text": "one"}\r\n\r\n{"text": "no newline at the end"}'
    for magic in (b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd\x00", b"\xfd7zXZ\x00", b"BZh9"):
        yield magic + b"data"
    yield b""
    yield b"/etc/hostname\n\n-\nno such file\n/\n"


def vocabularies():
    yield b"M#version: 0.2\nt h\nth e\n\xc4\xa0 the\n"
    yield b"Mt h\r\nth e"
    yield b"M\nt h\n"
    yield b"Mt  h\nt\nt h e\n"
    yield b'V,"aa":260,"aaaa":261,"\\u0120t":262' + SEPARATOR + b"#version\na a\naa aa\n\xc4\xa0 t\n"
    yield b'V,"a b":260' + SEPARATOR
    yield b'V,"x":7' + SEPARATOR
    yield b'V,"xx":1e9' + SEPARATOR
    yield b'V,"xx":260.5' + SEPARATOR
    yield b'{"a":0}' + SEPARATOR + b"a a\n"
    yield b"[]" + SEPARATOR
    yield b"{" + SEPARATOR


def tokenizer_jsons():
    """Members to insert into a valid file (S) or its model (M), and complete files, each with a
    tokenizer_config.json (fuzz_tokenizer_json.c)."""
    split = {"type": "Split", "pattern": {"Regex": "(?i:'s|'re)|\\p{L}+|[^\\s\\p{N}]+[\\r\\n]*|\\s+(?!\\S)"},
             "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False}
    template = {"type": "TemplateProcessing", "special_tokens": {"b": {"ids": [258, 7]}},
                "single": [{"SpecialToken": {"id": "b"}}, {"Sequence": {"id": "A"}},
                           {"SpecialToken": {"id": "b"}}]}

    def added(*tokens):
        whole = [dict({"special": False, "normalized": True}, **token) for token in tokens]
        return {"added_tokens": whole + [{"id": 258 + len(tokens), "content": "</s>", "special": True}]}

    vocab = {"<unk>": 0, "\u2581": 1, "t": 2, "h": 3, "th": 4, "\u2581th": 5, "</s>": 6}
    vocab.update({"<0x%02X>" % b: 7 + b for b in range(250)})
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    prepends = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    spelling = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    for parts in ({"pre_tokenizer": metaspace}, {"normalizer": prepends}):
        yield json.dumps(dict({"decoder": spelling, "added_tokens": [
            {"id": 6, "content": "</s>", "special": True, "normalized": True}], "model": {
                "type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "vocab": vocab,
                "merges": ["t h", ["\u2581", "th"]]}}, **parts)).encode() + b"\xff"

    def members(first, value):
        return first + json.dumps(value)[1:-1].encode() + b","
    yield members(b"S", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}})
    yield members(b"S", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False}, dict(split, pattern={"String": "a."}), byte_level]}})
    yield members(b"S", {"normalizer": {"type": "NFC"}, "post_processor": template,
                         "decoder": {"type": "ByteLevel"}})
    yield members(b"S", added({"id": 258, "content": "the", "lstrip": True},
                              {"id": 259, "content": "e\u0301", "rstrip": True}))
    yield members(b"S", added({"id": 258, "content": " "}, {"id": 259, "content": " t", "normalized": False}))
    yield members(b"S", {"added_tokens": [{"id": 65, "content": "b"}]})
    yield members(b"S", {"added_tokens": [{"id": 1 << 40, "content": "b"}]})
    yield members(b"S", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Sequence"}] * 9}})
    yield members(b"M", {"ignore_merges": True, "dropout": None, "byte_fallback": False, "type": "BPE"})
    yield members(b"M", {"merges": ["t h", "h e", ["t", "he"], "th e"]})
    yield members(b"M", {"type": "Unigram"})
    yield b"S" + SEPARATOR + b'{"eos_token": {"content": "the"}}'
    yield b"S" + SEPARATOR + b'{"eos_token": "none"}'
    yield b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    yield b"{" * 1200


def data_args():
    yield b"0.3 a 0.7 b/c\n"
    yield b" a\t\nb "
    yield b'{"train": ["1", "a", 0.5, "b"], "valid": "c d", "test": null}'
    yield b'{"train": [], "valid": {}, "test": "\\u0000"}'
    yield b'{"train": ["a b"], "valid": "", "test": ""}'


def options():
    model = b"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    length = b"--lr 1e-3 --train-iters 10 --mock-data --tokenizer-type Byte --use-distributed-optimizer "
    model_config = "configs/gpt_125m.args"
    yield model + length
    yield model + length + b"--quantized-weights --quantized-gradients --hadamard-transform --gq-group-size-intra 96 --gradient-alltoall-pipeline 7\n"
    yield open(model_config, "rb").read() + b"\n--plan --plan-world-size 64 --gpus-per-node 8 --tokenizer-type Byte"
    yield model + b"--plan --hidden-size=1048576 --num-attention-heads=1 --seq-length 16777216 --max-position-embeddings 16777216 --micro-batch-size 1048576"
    yield model + b"--lr 1 --train-samples 1000000000000000 --rampup-batch-size 8 8 1000 --global-batch-size 64 --mock-data"
    yield model + length + b"--split 1,2,3 --eval-iters 1000000000000000 --train-iters 1000000000000000"
    yield model + length + b"--plan-world-size 16 --plan --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel"
    yield model + length + b"--plan --plan-world-size 8 --tensor-model-parallel-size=65536 --num-layers 10000 --pipeline-model-parallel-size=10000"
    yield b"# comment\n--lr '1e-3' \"quo\\\"ted\" joined\\\nline \xef\xbb\xbf --data-path 0.3 a 0.7 b\r\n"
    yield b"@args"
    yield b"@args @args @args @nothing"
    yield b"@/dev/zero"
    yield b"--quantized-weights"
    yield b"'unclosed"
    yield b"--num-layers=99999999999999999999 --fp8-x --moe-y=1 --"
    yield b"--help --version"


def texts():
    yield b"It's the 3rd   test, isn't it?\n\n\tYes\r\n I'll've don't "
    yield "naïve café Straße 中文，汉字。数字１２３ ½ ² é² \u3000\u00a0\u2003x\u0085".encode()
    yield b"\xf0\x9f\x98\x80\xf0\x9f\x98 \xed\xa0\x80 \xc0\x80 \xf5\xff\xfe a\x80b"
    yield b"12 999 1000 -1 99999999999999999999 7"
    yield b" " * 60 + b"a" * 100 + b"1" * 60 + b"." * 60
    yield "é²".encode() * 40
    yield bytes(range(256))


def progress():
    line = "2024-01-02 03:04:05\tJob ID: \t# GPUs: 4\tStarting job\n"
    saved = ("2024-01-02 03:14:05\tJob ID: 7\t# GPUs: 4\tSaved checkpoint\tIteration: 10\tJob throughput: 1.0 TFLOP/s/GPU\t"
             "Cumulative throughput: 1.0 TFLOP/s/GPU\tFloating-point operations: 1.00e+15\tTokens (in billions): 0.10\n")
    yield (line + saved + line.replace("4\tS", "8\tS") + line).encode()
    yield saved.replace("1.00e+15", "nan").encode()
    yield b"9999-99-99 99:99:99\t# GPUs: 99999999999999999999\tStarting job"
    yield b"\0\n2024"


def lossless():
    """Payloads for fuzz_lossless.c: uncoded weights, arbitrary decoder states, entries with invalid
    offsets, and weights to encode."""
    def message(choice, n, end, words, payload, tail=0, right=1, scale=120):
        header = struct.pack("<4I", 32 + len(payload), n, tail, 0)
        entry = struct.pack("<IHBB", end, words, scale, 0) + bytes(8)
        return bytes([choice, 0, right]) + header + bytes(2 * tail) + entry + payload
    raw = struct.pack("<160H", *range(160))
    states = struct.pack("<32I", *[0x10000 + 997 * i for i in range(32)])
    yield message(3, 160, 160, 160, raw, right=0)
    yield message(3, 160, 160, 160, raw)
    yield message(3, 160, 64, 64, states)
    yield message(2, 96, 64, 64, struct.pack("<32I", *[0x10000] * 32))
    yield message(2, 96, 72, 70, bytes(16) + states)
    yield message(3, 160, 168, 160, raw)
    yield message(3, 160, 8, 64, states)
    yield message(3, 160, 0xFFFFFFF8, 64, states)
    yield message(9, 160, 160, 160, raw, tail=8)
    yield message(4, 1024, 512, 512, bytes(range(256)) * 4)
    # Weights that the encoder can code. The last 24 are far from the old ones and need escapes.
    near = [0x3C00 + i % 256 + (i % 7 == 0) for i in range(1000)] + [0x4000 + 99 * i for i in range(24)]
    yield message(4, 1024, 1024, 1024, struct.pack("<1024H", *near))
    for scale in 120, 140:
        last_slots = [(0x40 + 997 * i) << 10 | 0x3FF for i in range(32)]
        yield message(3, 160, 64, 64, struct.pack("<32I", *last_slots), scale=scale)
    yield bytes(3) + bytes(16)


# --- pickles, as torch.save and torch's distributed checkpoints write them ---

class Stored:
    """Is pickled by torch.save as a persistent id."""


class Recipe:
    """Is pickled as a call of module.name with these arguments."""
    def __init__(self, name, *args, state=None):
        self.name, self.args, self.state = name, args, state


def name_class(dotted):
    module, name = dotted.rsplit(".", 1)
    parts = module.split(".")
    for i in range(len(parts)):  # pickle imports all parent modules
        parent = ".".join(parts[:i + 1])
        known = sys.modules.setdefault(parent, types.ModuleType(parent))
    if not hasattr(known, name):
        setattr(known, name, type(name, (), {"__module__": module, "__init__": lambda self, *args: None}))
    return getattr(known, name)


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", name_class("torch.FloatStorage"), "0", "cpu", 16) if value is Stored else None

    def reducer_override(self, value):
        if not isinstance(value, Recipe):
            return NotImplemented
        return (name_class(value.name), value.args) + ((value.state,) if value.state else ())


def pickled(value, protocol):
    out = io.BytesIO()
    Pickler(out, protocol).dump(value)
    return out.getvalue()


def tensor(first=0, sizes=(2, 4), strides=(4, 1)):
    return Recipe("torch._utils._rebuild_tensor_v2", Stored, first, sizes, strides, False, {})


def pickle_values():
    size = Recipe("torch.Size", (2, 4))
    index = Recipe("torch.distributed.checkpoint.metadata.MetadataIndex", state={"fqn": "w", "offset": size})
    info = Recipe("torch.distributed.checkpoint.filesystem._StorageInfo",
                  state={"relative_path": "__0_0.distcp", "offset": 0, "length": 900})
    yield tensor()
    yield {"model": {"layers.0.weight": tensor(8)}, "iteration": 7, "checkpoint_version": 3.0}
    yield Recipe("argparse.Namespace", state={"num_layers": 2, "lr": 1e-4, "bf16": True, "data": None})
    yield Recipe("torch.distributed.checkpoint.metadata.Metadata",
                 state={"state_dict_metadata": {"w": Recipe("torch.x", state={"size": size})},
                        "storage_data": {index: info}})
    yield [1, -1, 300, 70000, 1 << 40, 1 << 80, b"bytes", "text", (1, 2, 3, 4), {5}, [[[[]]]],
           frozenset((6,))]
    yield tensor(12)
    yield tensor(0, (4, 4), (1, 4))
    yield tensor(0, (1 << 40, 1 << 40), (1, 1))
    yield tensor(0, (0, 1 << 62), (1, 1))


def pickles():
    for value in pickle_values():
        for protocol in (2, 4):
            yield pickled(value, protocol)
    yield b"\x80\x02]q\x00h\x00a."             # a list that contains itself
    yield b"\x80\x02cos\nsystem\nX\x04\0\0\0trueq\x00\x85R."
    yield b"\x80\x02" + b"(" * 500
    yield b"\x80\x02X\xff\xff\xff\x7f"
    yield b"\x80\x02Nr\xff\xff\xff\xff."
    yield b""


def torch_files():
    def archive(data, **changes):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", **changes) as file:
            file.writestr("archive/data.pkl", data)
            file.writestr("archive/byteorder", "little")
            file.writestr("archive/data/0", bytes(range(64)))
        return b"T" + out.getvalue()
    yield from pickles()
    sound = archive(pickled({"w": tensor()}, 2))
    yield sound
    yield archive(pickled(tensor(8), 4), compression=zipfile.ZIP_DEFLATED)
    yield sound[:-30]
    yield sound.replace(b"little", b"bigger")
    yield sound + b"comment"
    yield sound.replace(b"PK\x03\x04", b"PK\x03\x05")


def frames():
    """Messages of replica groups; the target fills in length and hash."""
    def frame(kind, offers=0, text=b"", data=b"", rate=0.0, name=b"a"):
        header = struct.pack("<IHHQQQIIQ33s3x33s3x", 0x47504453, 1, kind, 1, 2, 3, 4, 0, 0, name, b"b")
        body = struct.pack("<qQQQqqqdII", 5, 6, 7, 8, 9, 10, 11, rate, 1, 2)
        body += struct.pack("<H", len(text)) + text + struct.pack("<H", 4) + b"tcp:"
        body += struct.pack("<H", offers)
        body += struct.pack("<33sQqqqqQ", name, 1, 2, 1, 3, 4, 5) * offers
        return header + body + struct.pack("<I", len(data)) + data
    for kind in range(1, 28):
        yield frame(kind, offers=1)
    yield frame(1, text=b"a run", rate=5.0)
    yield frame(11, offers=64)
    yield frame(24, offers=1, data=bytes(100))
    yield frame(3, rate=float("nan"))
    yield frame(10, offers=1, name=b"../a")
    yield frame(11, offers=65)
    yield frame(11, offers=2)[:-9]


TARGETS = {"frame": frames, "pickle": pickles, "torch_file": torch_files, "lossless": lossless,
           "shard": shards, "manifest": manifests, "arguments": arguments, "jsonl": json_lines,
           "tasks": tasks, "chat": chats,
           "corpus": corpora,
           "vocabulary": vocabularies, "tokenizer_json": tokenizer_jsons,
           "options": options, "data_args": data_args, "tokenizer": texts,
           "progress": progress, "hf": hf_folders,
           "tracker": lambda: [b"100\n", b"release", b"", b"-1", b"999999999999999", b"9999999999999999999",
                               b"12 34\n", b"\0" + b"1"],
           "lineage": lambda: [b"10\n20\n24\n", b"5", b"", b"7\n5\n", b"-1\n", b"999999999999999\n",
                               b"9999999999999999\n", b"1\n\n2\n", b"1\0\n"]}


def main():
    for target, seeds in TARGETS.items():
        folder = os.path.join(sys.argv[1], target)
        os.makedirs(folder, exist_ok=True)
        for i, seed in enumerate(seeds()):
            with open(os.path.join(folder, "%02d" % i), "wb") as file:
                file.write(seed)


if len(sys.argv) != 2:
    sys.exit(__doc__)
main()
