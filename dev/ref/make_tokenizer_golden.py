#!/usr/bin/env python3
"""Generates test/golden/tokenizer for test/unit/data/test_tokenizer.c: a small byte-level BPE vocabulary,
and the ids that Hugging Face's `tokenizers` produces for difficult texts with it and with GPT-2's
vocabulary.

    pip install tokenizers
    dev/ref/make_tokenizer_golden.py --gpt2 FOLDER     # FOLDER holds GPT-2's vocab.json and merges.txt

Without --gpt2, the file with GPT-2's ids does not change. The texts use only characters of Unicode 14, so
that older and newer Unicode tables give the same ids.
"""
import argparse
import json
import pathlib
import random

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden" / "tokenizer"
MERGES = 500

TRAINING_TEXT = """
The quantized gradient is sent in two steps: inside a node with eight bits, between nodes with four. It's the difference of the weights
that is quantized, not the weights themselves; they'll drift otherwise, and we've measured that they don't. I'm sure you'd like to
see the numbers: 1024 tokens, 12 layers, 768 channels, 0.0006 learning rate, 300000 iterations.

static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
for (int i = 0; i < count; i++) {
\tif (length[i] == 0) continue;
\tsum += (double)length[i];
}
    if __name__ == "__main__":
        print("hello, world")

The loss went down, the loss went down again, and then the training stopped; the reader of the log reads the training log again.
Größe, naïve café, señor, façade, über, Ελληνικά, русский язык, 日本語の文章, 中文文本, 한국어, العربية, עברית, हिन्दी, ไทย.
The end of the document is the end of the text -- there is no more text after the end of the document...
aaaa aaaaaaaa aaaaaaaaaaaaaaaa ======== -------- ........ ________ 2023-10-20 00000000 11111111
"""

TEXTS = [
    "", " ", "a", "'", "  ", "\n", "Hello world", "Hello  world\n\n  It's  I'LL 123abc\t\tx ", "\n\n\nfoo", "foo 'm", "foo'm'll've're'd't's 's",
    "I'm you're we've they'll he'd it's don't 'tis 'S 'RE ''s '' 'x", "   leading", "trailing   ", "tab\tand\t\ttabs \t mixed\n \n\t\n x",
    "\r\n\r\nwindows\r\nlines\r\n", "a\u000bb\u000cc\u001cd\u001ee\u001ff\u0085g", "no-break\u00a0space\u00a0\u00a0x \u00a0y", "mongolian\u180evowel \u180e\u180e separator",
    "\u2000\u2001\u2002\u2003\u2004x\u2005\u2006\u2007\u2008\u2009\u200a", "zero\u200bwidth\u200d\u2060\ufeffmarks", "line\u2028separator\u2029paragraph\u202fnarrow\u205fmath\u3000ideographic",
    "\u1680ogham\u1680\u1680 space", "price: $1,234.56 (−7%) №5 ½ ² Ⅷ ① ٣٤ ৪ 万", "x=1;y=2;z=x+y;//comment", "snake_case camelCase PascalCase kebab-case UPPER123lower",
    "emoji 😀😃 👩‍👩‍👧‍👦 🇫🇷🏴‍☠️ ❤️ text", "中文没有空格，标点。日本語テキストと漢字かな混じり文。한국어 띄어쓰기", "e\u0301a\u0300o\u0302\u0323 combining n\u0303 \u0301 alone",
    "العربية مع تشكيلٌ، עִבְרִית, हिन्दी में, ภาษาไทย", "Ελληνικά русский Ωmega ßharp İstanbul ŉ ǅ ʰ ª º", "𝕳𝖊𝖑𝖑𝖔 𝟘𝟙𝟚 𐍈 𠀀𠀁 🀄",
    "<|endoftext|> is plain text <|endoftext|>", "\ufffd replacement \uffff \U0010ffff \ue000 private", "nul\u0000in\u0000side \u0001\u0002\u007f\u0080\u009f",
    "http://www.example.org/a/b?c=d&e=%20#f user@example.org", "a" * 15 + " " + "b" * 16 + " " + "c" * 17, "a" * 47 + " " + "a" * 48 + " " + "a" * 49 + " " + "a" * 1000,
    "the" * 200, " " * 100 + "x", "=" * 300 + "\n" + "-" * 75, "ab" * 333 + "ba" * 77, "中" * 120, "😀" * 60, "'s" * 40, "0" * 257,
    TRAINING_TEXT,
]

POOL = (list("abcdeZQ079 \t\n\r'.,-_=(") + list("stmdrevl") * 2 + [" "] * 6 + ["'"] * 3
        + ["\u180e", "\u00a0", "\u2003", "\u3000", "\u0085", "\u001c", "\u200b", "é", "e\u0301", "ß", "Я", "中", "ก", "한", "ع", "😀", "👩‍👧", "٣", "Ⅷ", "½", "\ufffd", "'ll", "the ", "tion"])


def all_texts():
    rng = random.Random(20241120)
    mixed = ["".join(rng.choice(POOL) for _ in range(rng.randrange(1, 120))) for _ in range(120)]
    long_pieces = ["".join(rng.choice("aehlnotr") for _ in range(rng.randrange(40, 400))) for _ in range(12)]
    return TEXTS + mixed + long_pieces


def byte_level(model):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def train():
    tokenizer = byte_level(models.BPE())
    tokenizer.train_from_iterator([TRAINING_TEXT] * 2, trainers.BpeTrainer(
        vocab_size=256 + MERGES, show_progress=False, min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.model.save(str(FOLDER))
    vocab = json.loads((FOLDER / "vocab.json").read_text(encoding="utf-8"))
    vocab["<|endoftext|>"] = len(vocab)
    (FOLDER / "vocab.json").write_text(json.dumps(vocab) + "\n", encoding="utf-8")
    merges = (FOLDER / "merges.txt").read_text(encoding="utf-8").rstrip("\n") + "\n"
    (FOLDER / "merges.txt").write_text(merges, encoding="utf-8")


def write_cases(path, folder, with_text):
    tokenizer = byte_level(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    lines = []
    for text in all_texts():
        ids = tokenizer.encode(text).ids
        # Texts with U+0000 are written in hexadecimal, because strings end there in the C reader.
        case = {"text": text} if "\0" not in text else {"hex": text.encode().hex()}
        lines.append(json.dumps({**case, "ids": ids} if with_text else ids, separators=(",", ":")))
    header = json.dumps({"made_with": f"tokenizers {tokenizers.__version__}"})[:-1]
    path.write_text(header + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2", type=pathlib.Path, help="folder with GPT-2's vocab.json and merges.txt")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    train()
    write_cases(FOLDER / "cases.json", FOLDER, True)
    if arguments.gpt2:
        write_cases(FOLDER / "gpt2_ids.json", arguments.gpt2, False)


if __name__ == "__main__":
    main()
