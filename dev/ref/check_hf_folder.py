#!/usr/bin/env python3
"""Opens a folder of build/convert_checkpoint with Hugging Face's transformers, without code of this
program. Exit code 1 when a weight is missing or left over, or when what it computes is wrong.

    pip install torch transformers
    dev/ref/check_hf_folder.py FOLDER [--logits test/golden/hf/logits.golden] [--bytes]
        [--tokenizer FILE] [--same-as FOLDER]
"""
import argparse
import sys

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_golden(path):
    """The tensors of a file that make_goldens.py describes."""
    with open(path, "rb") as file:
        data = file.read()
    begin, tensors = int(data.split()[2]), {}
    for line in data[:begin].decode().splitlines()[2:]:
        if line:
            name, kind, shape, offset = line.split()
            shape = [int(n) for n in shape.split(",")]
            dtype, at = {"f32": "<f4", "i32": "<i4"}[kind], begin + int(offset)
            array = np.frombuffer(data, dtype, int(np.prod(shape)), at)
            tensors[name] = torch.tensor(array.reshape(shape).copy())
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--logits", help="golden tokens and logits, to be met within 1e-4")
    parser.add_argument("--same-as", help="a folder whose model computes the same logits")
    parser.add_argument("--bytes", action="store_true", help="the tokenizer is one of bytes")
    parser.add_argument("--tokenizer", help="a tokenizer.json that the folder's tokenizer must equal")
    options = parser.parse_args()
    model, loading = AutoModelForCausalLM.from_pretrained(options.folder, output_loading_info=True)
    if any(loading.values()):
        sys.exit(f"weights are missing or left over: {loading}")
    if options.logits:
        golden = read_golden(options.logits)
        with torch.no_grad():
            worst = (model.eval()(golden["tokens"].long()).logits - golden["logits"]).abs().max().item()
        if not worst <= 1e-4:
            sys.exit(f"logits differ by {worst}")
        print(f"logits differ by {worst:g}")
    if options.same_as:
        tokens = torch.arange(24).reshape(2, 12) * 7 % model.config.vocab_size
        other = AutoModelForCausalLM.from_pretrained(options.same_as)
        with torch.no_grad():
            worst = (model.eval()(tokens).logits - other.eval()(tokens).logits).abs().max().item()
        if not worst <= 1e-4:
            sys.exit(f"logits differ by {worst}")
    text = "Hello, w\u00f6rld! \u4f60\u597d\n\t x  don't 12345"
    if options.tokenizer:
        ids = AutoTokenizer.from_pretrained(options.folder)(text).input_ids
        wanted = Tokenizer.from_file(options.tokenizer).encode(text).ids
        if ids != wanted:
            sys.exit(f"the tokenizer gives {ids}, not {wanted}")
    if options.bytes:
        tokenizer = AutoTokenizer.from_pretrained(options.folder)
        ids = tokenizer(text).input_ids
        if ids != list(text.encode()) or tokenizer.decode(ids) != text or tokenizer.eos_token_id != 256:
            sys.exit(f"the tokenizer gives {ids}")
    print(f"{options.folder}: {model.num_parameters():,} parameters in {model.dtype}")


if __name__ == "__main__":
    main()
