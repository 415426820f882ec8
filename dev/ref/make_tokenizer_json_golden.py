#!/usr/bin/env python3
"""Generates test/golden/tokenizer_json for test/unit/data/test_tokenizer_json.c: small tokenizers in the
styles of GPT-2, Llama 2 and 3, Mistral, Qwen 2 and others, in Hugging Face's tokenizer.json format, and
the ids that the `tokenizers` package produces for difficult texts.

    pip install tokenizers
    dev/ref/make_tokenizer_json_golden.py
    dev/ref/make_tokenizer_json_golden.py --compare build/preprocess_data --megabytes 3

The second form compares the ids of preprocess_data and `tokenizers` on random Unicode text. It uses only
characters in the Unicode tables of both Python and PCRE2, because PCRE2 and `tokenizers` may classify newer
characters differently.
"""
import argparse
import array
import ctypes
import ctypes.util
import itertools
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from make_tokenizer_golden import POOL, TEXTS, TRAINING_TEXT  # noqa: E402

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden" / "tokenizer_json"
MERGES = 300

# The published patterns of these models' tokenizers.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

HARD = [
    "I'LL we'Ve DON'T it'S he'D y'all'RE 'Sword 'ſ x'ſt 'ßa", "1234567890 12 3 12345 ١٢٣٤٥ ½⅓ 1٢3٤5 x1y22z333w4444",
    "one\r\ntwo\r\n\r\nthree \r\n four\n\n\n  five  \n six\t\n", " \n", "\n ", "x \n\n y", " \r\r\n\n\tz", "a.\n\nb!\r\n(c)/\n",
    "e\u0301 a\u0327\u0301 \u1100\u1161\u11a8 \uac00\u11a8 \u212b \u2126 \uf900 \u0344 \u0958 q\u0323\u0307 \u0307\u0323q",
    "<|begin_of_text|>hello<|eot_id|> world <|end_of_text|>", "a<|im_start|>b<|im_end|>\n<|im_end", "<|endoftext|><|endoftext|>x",
    "<tool_call>{\"a\": 1}</tool_call> <|endoftext", "    <mask>   y <mask>", "<strip> z",
    "caf\u00e9 cafe\u0301 CAFE\u0301",
    "def f(x):\n    return x\n\n\n        deep\n", "\ta\tb\t\tc", "!!!\n\n??? ...\r\n--", "   'tis", "'", "'9", "\u00a0\u00a0x\u2028y\u0085z",
    "ABCdefGHI iPhone McDonald \u01c5 \u02b0x", "a\u180eb \u180e", "\u3000\u3000\u65e5\u672c\u3000\n", "9" * 50, " " * 70 + "\n" + " " * 30 + "y",
]


def texts():
    rng = random.Random(20261124)
    pool = POOL + ["\r\n", "\u0301", "\u0327", "\u1161", "'S", "'lL", "<|", "|>",
                   "<|endoftext|>", "<|eot_id|>", "<mask>", "123", "//", "\u00e9", "\u212b"]
    mixed = ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 90))) for _ in range(60)]
    return [t for t in TEXTS if len(t) < 600 and "\0" not in t] + HARD + mixed


def byte_level(prefix=False, regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def train(pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([TRAINING_TEXT] * 2, trainers.BpeTrainer(
        vocab_size=256 + MERGES, show_progress=False, min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special(*names):
    return [AddedToken(name, special=True, normalized=False) for name in names]


def gpt2():
    """Has an end-of-document token that is also in the vocabulary."""
    tokenizer = train(byte_level(regex=True))
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["<|endoftext|>"] = len(state["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(special("<|endoftext|>"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"eos_token": "<|endoftext|>"}


def llama3():
    """Has its own pattern, ignores merges for whole words in the vocabulary, and adds a first token."""
    tokenizer = train(pre_tokenizers.Sequence([split(LLAMA3), byte_level()]))
    tokenizer.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"))
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    state["model"]["ignore_merges"] = True
    # Add two words that no merges produce: they match only as a whole. Later ids shift by 2.
    for token in state["added_tokens"]:
        token["id"] += 2
    vocab["\u0120world"] = len(vocab)
    vocab["qzx"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    first = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
                                      special_tokens=[("<|begin_of_text|>", first)])])
    return tokenizer, {"eos_token": "<|end_of_text|>"}


def qwen2():
    """Has NFC normalization, splits digits, and has special tokens and an added token that is not special."""
    tokenizer = train(pre_tokenizers.Sequence([split(QWEN2), byte_level()]), normalizers.NFC())
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False),
                          AddedToken("cafe\u0301", normalized=True)])
    return tokenizer, {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}


def o200k():
    """Has a pattern for which preprocess_data uses PCRE2."""
    tokenizer = train(pre_tokenizers.Sequence([split(O200K), byte_level()]))
    tokenizer.add_special_tokens(special("<|endoftext|>"))
    return tokenizer, None


def digits():
    """Splits in several steps: digits, then GPT-2's pattern with a prefix space. Also has tokens for runs of
    spaces, and tokens that strip the white space next to them."""
    tokenizer = train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.Split("//", "isolated"),
                                               byte_level(prefix=True, regex=True)]))
    tokenizer.add_special_tokens(special("</s>"))
    tokenizer.add_special_tokens([AddedToken("<mask>", special=True, normalized=False, lstrip=True),
                                  AddedToken("<strip>", special=True, normalized=False, lstrip=True,
                                             rstrip=True)])
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in (2, 3, 5, 8)])
    return tokenizer, None


def whole():
    """Has no pattern, so that texts are not split."""
    tokenizer = train(byte_level(regex=True))
    tokenizer.pre_tokenizer = byte_level(prefix=True)
    tokenizer.add_special_tokens(special("<|endoftext|>"))
    return tokenizer, None


SPACE = "\u2581"


def of_characters(missing=(), runs=True, extra=(), **model):
    """A BPE of characters as converted from SentencePiece: special tokens, 256 byte tokens but those missing,
    merged tokens, characters. runs: has tokens for runs of spaces. extra: more merges, last in rank."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TRAINING_TEXT] * 2, trainers.BpeTrainer(
        vocab_size=420, show_progress=False, min_frequency=2, limit_alphabet=110))
    state = json.loads(trained.to_str())["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in state["merges"]]
    if runs:
        merges[20:20] = [[SPACE] * 2, [SPACE * 2] * 2, [SPACE * 2, SPACE], [SPACE * 4] * 2]
    merges += [list(m) for m in extra]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256) if b not in missing]
    tokens += [a + b for a, b in merges] + sorted((t for t in state["vocab"] if len(t) == 1), reverse=True)
    tokens += ["qzx" + SPACE + "y"]  # a token that no merge produces
    vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
             "vocab": vocab, "merges": merges, **model}
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**empty, "model": model}))
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def llama2():
    """Replaces spaces by a normalizer, and has added tokens before and after normalization."""
    tokenizer = of_characters()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.add_tokens([AddedToken("<mask>", normalized=True), AddedToken("the end", normalized=True),
                          AddedToken("<|eot_id|>", normalized=False, rstrip=True),
                          AddedToken("<strip>", normalized=False, lstrip=True)])
    return tokenizer, {"eos_token": "</s>"}


def mistral():
    """Replaces spaces by a pre_tokenizer that leaves the text whole."""
    tokenizer = of_characters()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|eot_id|>"))
    tokenizer.add_tokens([AddedToken("<mask>", normalized=True, lstrip=True)])
    return tokenizer, {"eos_token": "</s>"}


def crossing():
    """Has merges across spaces, so that texts must not be cut there, and no token for 0xE4 and 0xF0, so that
    some characters are unknown."""
    tokenizer = of_characters(missing=(0xE4, 0xF0), extra=[("e", SPACE), ("s", SPACE), ("e" + SPACE, "t")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                                           decoders.Fuse()])
    return tokenizer, None


def metaspace():
    """Splits at every space and ignores merges for whole words; unknown characters are not fused."""
    tokenizer = of_characters(missing=range(0x80, 0xF5), runs=False, fuse_unk=False, ignore_merges=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="never", split=True)
    return tokenizer, None


STYLES = {"gpt2": gpt2, "llama3": llama3, "qwen2": qwen2, "o200k": o200k, "digits": digits, "whole": whole,
          "llama2": llama2, "mistral": mistral, "crossing": crossing, "metaspace": metaspace}
OF_CHARACTERS = ("llama2", "mistral", "crossing", "metaspace")


def pairs_of_merges(state, pairs):
    """Writes merges as ["left", "right"], or as "left right" in the older format."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in state["model"]["merges"]]
    state["model"]["merges"] = merges if pairs else [" ".join(m) for m in merges]


def write_style(name, made, all_texts):
    tokenizer, config = made
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(tokenizer.to_str())
    pairs_of_merges(state, name != "gpt2")
    text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    again = Tokenizer.from_str(text)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    encoded = [again.encode(t, add_special_tokens=False).ids for t in all_texts]
    lines = [json.dumps(ids, separators=(",", ":")) for ids in encoded]
    decoded = [json.dumps(again.decode(ids, skip_special_tokens=False)) for ids in encoded]
    head = {"made_with": f"tokenizers {tokenizers.__version__}", "size": again.get_vocab_size(),
            "with_special": again.encode("hello").ids}
    text = json.dumps(head)[:-1] + ', "ids": [\n' + ",\n".join(lines) + "\n]"
    if name in OF_CHARACTERS:
        text += ', "decoded": [\n' + ",\n".join(decoded) + "\n]"
    (folder / "ids.json").write_text(text + "}\n", encoding="utf-8")


def pcre2_unicode_version():
    """Returns the Unicode version of the installed PCRE2, for instance "14.0.0"."""
    pcre2 = ctypes.CDLL(ctypes.util.find_library("pcre2-8") or "libpcre2-8.so.0")
    version = ctypes.create_string_buffer(24)  # large enough according to man pcre2_config
    pcre2.pcre2_config_8(10, version)  # PCRE2_CONFIG_UNICODE_VERSION
    return version.value.decode()


def known_characters():
    """Returns all characters that both Python and PCRE2 know, except line feeds, NUL and surrogates. If
    PCRE2's tables are older than Python's, uses Unicode 3.2, the only older version that Python has."""
    older = int(pcre2_unicode_version().split(".")[0]) < int(unicodedata.unidata_version.split(".")[0])
    tables = unicodedata.ucd_3_2_0 if older else unicodedata
    return [chr(c) for c in range(0x110000)
            if not 0xD800 <= c < 0xE000 and tables.category(chr(c)) != "Cn" and chr(c) not in "\n\0"]


def random_texts(megabytes):
    """Yields texts with characters of all scripts and classes. Their only line ending is \\r."""
    rng = random.Random(5)
    every = known_characters()
    white = [c for c in every if c.isspace()]
    marks = [c for c in every if unicodedata.combining(c)]
    number = [c for c in every if unicodedata.category(c)[0] == "N"]
    words = ["'s", "'LL", "'Re", "the", " of", "<|endoftext|>", "<|eot_id|>", "\r", "  ",
             "<mask>", "123", "e\u0301"]
    kinds = [every, every[:600], white, marks, number, list("abcXYZ '!-/"), words]
    size = 0
    while size < megabytes * 1e6:
        kind = [rng.choice(kinds) for _ in range(3)]
        text = "".join(rng.choice(rng.choice(kind)) for _ in range(rng.randrange(1, 400)))
        size += len(text.encode())
        yield text


def documents_of(prefix):
    """Returns the sequences of a shard as lists of ids."""
    index = prefix.with_suffix(".idx").read_bytes()
    dtype, count = struct.unpack_from("<BQ", index, 17)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    ids = array.array("H" if dtype == 8 else "i", prefix.with_suffix(".bin").read_bytes())
    ends = list(itertools.accumulate(lengths))
    return [list(ids[end - length:end]) for end, length in zip(ends, lengths)]


def compare(program, megabytes):
    """Exits with an error if the ids of preprocess_data and `tokenizers` differ on random text."""
    all_texts = list(random_texts(megabytes))
    lines = "".join(json.dumps({"text": t}) + "\n" for t in all_texts)
    with tempfile.TemporaryDirectory() as folder:
        for name in STYLES:
            path = FOLDER / name / "tokenizer.json"
            command = [program, "--input", "-", "--output-prefix", folder + "/out",
                       "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path,
                       "--tokenizer-hf-no-include-special-tokens"]
            subprocess.run(command, input=lines.encode(), stderr=subprocess.DEVNULL, check=True)
            ours = documents_of(pathlib.Path(folder, "out_text_document"))
            theirs = Tokenizer.from_file(str(path)).encode_batch(all_texts, add_special_tokens=False)
            for text, mine, encoding in zip(all_texts, ours, theirs, strict=True):
                if mine != encoding.ids:
                    sys.exit(f"{name}: ids differ for {text.encode('unicode_escape')}")
    print(f"{len(all_texts)} texts, {len(lines)} bytes of JSON: equal ids in {len(STYLES)} styles")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="*", metavar="STYLE",
                        help="write only these (default: all); versions of tokenizers train other merges")
    parser.add_argument("--compare", metavar="PROGRAM")
    parser.add_argument("--megabytes", type=float, default=3)
    arguments = parser.parse_args()
    if arguments.compare:
        compare(arguments.compare, arguments.megabytes)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    all_texts = texts()
    (FOLDER / "texts.json").write_text("[\n" + ",\n".join(json.dumps(t) for t in all_texts) + "\n]\n", encoding="utf-8")
    for name in arguments.styles or STYLES:
        write_style(name, STYLES[name](), all_texts)


if __name__ == "__main__":
    main()
