#!/usr/bin/env python3
"""Checks that Hugging Face's transformers reads the same from two model folders, apart from the
weights: special token ids, generation settings and the tokenizer with its chat templates. Exits
with 1 and the difference.

    pip install transformers
    dev/ref/check_hf_same.py SOURCE EXPORT
"""
import sys

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

TEXT = "Hello, w\u00f6rld! \u4f60\u597d\n\t x  don't 12345"


def read(folder):
    config = AutoConfig.from_pretrained(folder)
    found = {name: getattr(config, name, None)
             for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "model_type")}
    try:
        found["generation"] = GenerationConfig.from_pretrained(folder).to_dict()
    except OSError:
        found["generation"] = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found.update(type=type(tokenizer).__name__, template=tokenizer.chat_template,
                 ids=tokenizer(TEXT).input_ids, special=tokenizer.special_tokens_map,
                 special_ids=tokenizer.all_special_ids,
                 added={i: str(token) for i, token in tokenizer.added_tokens_decoder.items()})
    return found


def main():
    source, export = read(sys.argv[1]), read(sys.argv[2])
    for name, value in source.items():
        if export[name] != value:
            sys.exit(f"{name} is {export[name]}, not {value}")
    print(f"{len(source)} settings are equal")


if __name__ == "__main__":
    main()
