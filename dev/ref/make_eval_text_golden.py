#!/usr/bin/env python3
"""Generates test/golden/eval_text: a text in WikiText's format, cloze samples, and the results of
--eval-text and --eval-tasks for the model of test/golden/eval_tasks, computed with numpy in fp64.
test/unit/run/test_eval_tasks.c compares the trainer's results.

    pip install numpy tokenizers
    dev/ref/make_eval_text_golden.py

results.json contains the results for each stride and detokenizer, with the definitions of Megatron-LM's
tasks/zeroshot_gpt: each window is computed alone, and only tokens that no earlier window scored count.
"""
import json
import math
import pathlib
import random
import re
import struct

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
FOLDER = GOLDEN / "eval_text"
POSITIONS, HEADS = 128, 2
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew tea and count gradients by node".split()

MARKS = [[","], [";"], ["."], ['"', "tea", '"'], ["(", "\u3000fox", ")"], ["@-@", "old"], ["1", "@,@", "000"],
         ["'s"], ["30", "\u00b0", "N"], ["wizards", "'", "brew"], ["[", "a", "b", "]"], ["{", "}"]]


def wiki_text():
    """Returns paragraphs with the spaces and marks of WikiText's tokenization."""
    lines = [" "]
    for section in range(8):
        level = " = = " if section % 3 == 2 else " = "
        lines.append(level + random.choice(WORDS) + level)
        lines.append(" ")
        words = []
        for _ in range(random.randint(30, 90)):
            words.append(random.choice(WORDS))
            words += random.choice([[]] * 8 + MARKS)
        lines.append(" " + " ".join(words) + " . ")
    return "\n".join(lines) + " \n"


def detokenized(text):
    """Closes up the spaces that WikiText has around punctuation."""
    for before, after in (("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(before, after)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in ("()", "[]", "{}", '""', "''"):
        text = re.sub(rf"{re.escape(left)}([^{re.escape(right)}]*){re.escape(right)}",
                      lambda match, pair=(left, right): pair[0] + match[1].strip() + pair[1], text)
    for count in (4, 3, 2):
        text = text.replace(" ".join("=" * count), "=" * count)
    degree = "\u00b0"
    for before, after in ((f" {degree} ", degree), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "),
                          (" 's", "'s")):
        text = text.replace(before, after)
    return text


def read_model():
    """Returns the weights in fp64."""
    data = (GOLDEN / "eval_tasks" / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, tensor in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        bits = np.frombuffer(data[start + first:start + last], "<u2").astype(np.uint32) << 16
        weights[name.removeprefix("transformer.")] = bits.view(np.float32).astype(np.float64).reshape(tensor["shape"])
    return weights


def normalized(x, w, name):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"] + w[name + ".bias"]


def linear(x, w, name):
    return x @ w[name + ".weight"] + w[name + ".bias"]


def attention(x, w, name):
    T, width = x.shape
    qkv = np.split(linear(x, w, name + ".c_attn"), 3, -1)
    q, k, v = (part.reshape(T, HEADS, -1).swapaxes(0, 1) for part in qkv)
    scores = q @ k.swapaxes(1, 2) / math.sqrt(width // HEADS) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return linear((p @ v).swapaxes(0, 1).reshape(T, width), w, name + ".c_proj")


def log_probabilities(w, ids):
    """Returns (T, V) log-probabilities of the next token."""
    x = w["wte.weight"][ids] + w["wpe.weight"][:len(ids)]
    for layer in range(2):
        h = f"h.{layer}"
        x = x + attention(normalized(x, w, h + ".ln_1"), w, h + ".attn")
        a = linear(normalized(x, w, h + ".ln_2"), w, h + ".mlp.c_fc")
        a = 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a ** 3)))
        x = x + linear(a, w, h + ".mlp.c_proj")
    logits = normalized(x, w, "ln_f") @ w["wte.weight"].T
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def text_result(w, encode, raw, stride, detokenize):
    ids = encode(detokenized(raw) if detokenize else raw)
    seen, total = 1, 0.0
    for start in range(0, len(ids), stride):
        window = ids[start:start + POSITIONS + 1]
        last = start + len(window)
        if last <= seen:
            break
        log = log_probabilities(w, window[:-1])
        total -= sum(log[i - start - 1, ids[i]] for i in range(seen, last))
        seen = last
    words = len(raw.strip().split(" "))
    ratio = (len(ids) - 1) / (words - 1)
    loss = total / (len(ids) - 1)
    return {"stride": stride, "wikitext": detokenize, "tokens": len(ids), "words": words, "loss": loss,
            "ppl": math.exp(loss), "adjusted_ppl": math.exp(loss * ratio), "token_ratio": ratio}


def cloze_result(w, encode, texts, strict):
    samples = []
    for text in texts:
        head, last = text.rstrip().rsplit(" ", 1)
        whole = encode(text)
        context, word = (encode(head.strip()), encode(" " + last)) if strict else (whole[:-1], whole[-1:])
        ids = (context + word)[-POSITIONS - 1:]
        log = log_probabilities(w, ids[:-1])[-len(word):]
        best = np.sort(log, -1)
        samples.append({"log_likelihood": sum(row[i] for row, i in zip(log, word)),
                        "greedy": bool(all(row.argmax() == i for row, i in zip(log, word))),
                        "margin": min(best[:, -1] - best[:, -2])})
    return samples


def main():
    random.seed(1234)
    FOLDER.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE.from_file(*(str(GOLDEN / "tokenizer" / name)
                                                 for name in ("vocab.json", "merges.txt"))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def encode(text):
        return tokenizer.encode(text).ids

    w, raw, texts = read_model(), wiki_text(), []
    for i in range(400):
        at = random.randrange(len(WORDS))
        words = [WORDS[(at + k) % len(WORDS)] for k in range(random.choice((3, 9, 50)))]
        if i % 3 == 0:
            words[-1] = random.choice(WORDS)
        texts.append("".join((" " * (i % 5 == 1), " ".join(words), "." * (i % 4 == 1), "\n" * (i % 7 == 2))))
    # Keeps samples whose correctness does not depend on bf16 rounding, as many right as wrong ones.
    both = [cloze_result(w, encode, texts, strict) for strict in (False, True)]
    clear = [i for i in range(len(texts)) if min(both[0][i]["margin"], both[1][i]["margin"]) > 0.3]
    right = [i for i in clear if both[1][i]["greedy"]][:20]
    kept = sorted(right + [i for i in clear if not both[1][i]["greedy"]][:20])
    (FOLDER / "text.txt").write_text(raw, encoding="utf-8")
    (FOLDER / "cloze.jsonl").write_text("".join(json.dumps({"text": texts[i]}) + "\n" for i in kept))
    results = {"texts": [text_result(w, encode, raw, stride, detokenize)
                         for stride, detokenize in ((32, True), (128, False), (7, False))]}
    for name, samples in zip(("last_token", "strict"), both):
        results[name] = [{key: samples[i][key] for key in ("log_likelihood", "greedy")} for i in kept]
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(results["texts"], len(kept), sum(s["greedy"] for s in results["last_token"]),
          sum(s["greedy"] for s in results["strict"]))


if __name__ == "__main__":
    main()
