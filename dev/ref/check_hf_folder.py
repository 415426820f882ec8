#!/usr/bin/env python3
"""Checks a model folder that build/convert_checkpoint has written, with Hugging Face's transformers. Exits
with 1 if weights are missing or unexpected, or if logits or token ids are wrong.

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
    """Returns the tensors of a golden file (format: make_goldens.py)."""
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
    parser.add_argument("--logits", help="golden tokens and logits; tolerance 1e-4")
    parser.add_argument("--same-as", help="folder of a model with the same logits")
    parser.add_argument("--bytes", action="store_true", help="expect a byte tokenizer")
    parser.add_argument("--tokenizer", help="tokenizer.json that must produce the same ids")
    options = parser.parse_args()
    model, loading = AutoModelForCausalLM.from_pretrained(options.folder, output_loading_info=True)
    if any(loading.values()):
        sys.exit(f"weights are missing or unexpected: {loading}")
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
