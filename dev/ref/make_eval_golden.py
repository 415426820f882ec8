#!/usr/bin/env python3
"""Generates test/golden/eval_tasks: a small GPT2LMHeadModel with the vocabulary of test/golden/tokenizer,
a file for --eval-tasks, and the scores of EleutherAI's lm-evaluation-harness.
test/unit/run/test_eval_tasks.c imports the model and compares the trainer's scores.

    pip install lm-eval torch transformers accelerate
    dev/ref/make_eval_golden.py             # takes a minute

scores.json contains the harness's metrics of each task, and for each sample its log-likelihoods in fp32
and whether it is greedy. "bf16_error" is the largest error of a log-likelihood in bf16.
"""
import json
import math
import pathlib
import random
import shutil
import tempfile

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from harness_scores import correct, harness_scores, largest_error, read_tasks

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
FOLDER = GOLDEN / "eval_tasks"
POSITIONS, HIDDEN = 128, 16
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew tea and count gradients by node".split()


def text(count, start=None):
    """Returns random words, some of which can be predicted from the previous word."""
    at, words = random.randrange(len(WORDS)) if start is None else start, []
    for _ in range(count):
        words.append(WORDS[at % len(WORDS)])
        at += random.choice((1, 1, 1, 1, 2, 5))
    return " ".join(words)


def choice_samples():
    for number in range(64):
        context, choices = text(random.choice((2, 6, 14, 60))), [text(random.randint(1, 6)) for _ in range(4)]
        if number % 4 == 0:
            choices[1] += " Größe \u65e5\u672c"
        if number % 5 == 0:
            choices.pop()
        context += {3: " ", 7: "\n\n", 11: "\u3000", 13: ":\t "}.get(number, "")
        yield {"task": "choose", "context": "" if number == 5 else context, "choices": choices,
               "gold": random.randrange(len(choices))}


def continuation_samples():
    for number in range(64):
        words = text(random.choice((3, 9, 70))).split()
        last = words[-1] if number % 3 else random.choice(WORDS)
        context = "" if number == 9 else " ".join(words[:-1])
        yield {"task": "complete", "context": context, "continuation": " " + last}


def trained(tokenizer):
    """Returns a model with bf16 weights, trained on these texts, and its loss."""
    config = GPT2Config(n_layer=2, n_embd=HIDDEN, n_head=2, n_positions=POSITIONS, vocab_size=len(tokenizer),
                        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        documents = [tokenizer.encode(text(80))[:POSITIONS] for _ in range(8)]
        ids = torch.tensor([[tokenizer.eos_token_id] + ids[:POSITIONS - 1] for ids in documents])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().bfloat16(), loss.item()


def greedy_margin(model, tokenizer, sample):
    """Returns the margin of the logits that decides whether a continuation is greedy."""
    if "continuation" not in sample:
        return math.inf
    context = tokenizer.encode(sample["context"])
    whole = tokenizer.encode(sample["context"] + sample["continuation"])
    scored = len(whole) - len(context)
    ids = whole[-POSITIONS - 1:] if context else [tokenizer.eos_token_id] + whole
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, -scored:].float()
    best = logits.topk(2).values
    ahead = best[:, 0] - logits.gather(1, torch.tensor(ids[-scored:])[:, None])[:, 0]
    return ahead.max().item() if ahead.max() > 0 else (best[:, 0] - best[:, 1]).min().item()


def clear(tasks, exact, rounded, model, tokenizer):
    """Removes samples whose correctness depends on bf16 rounding."""
    limit = 2 * largest_error(exact, rounded)
    for name, samples in tasks.items():
        sure = []
        for sample, one, other in zip(samples, exact[name]["samples"], rounded[name]["samples"]):
            right, margins = correct(sample, one)
            if right == correct(sample, other)[0] and min(margins) > 2 * limit \
                    and greedy_margin(model, tokenizer, sample) > 0.3:
                sure.append(sample)
        tasks[name] = sure
    return tasks


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    random.seed(1234)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(GOLDEN / "tokenizer" / name, work)
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False,
                    **{name: "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}}
        pathlib.Path(work, "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = AutoTokenizer.from_pretrained(work)
        model, loss = trained(tokenizer)
        model.save_pretrained(FOLDER)
        model.save_pretrained(work)
        path = FOLDER / "tasks.jsonl"

        def score(tasks):
            lines = [json.dumps(sample, ensure_ascii=False) + "\n" for samples in tasks.values()
                     for sample in samples]
            path.write_text("".join(lines), encoding="utf-8")
            return [harness_scores(work, read_tasks(path), dtype) for dtype in ("float32", "bfloat16")]

        tasks = {"choose": list(choice_samples()), "complete": list(continuation_samples())}
        exact, rounded = score(clear(tasks, *score(tasks), model.float(), tokenizer))
    scores = {"bf16_error": largest_error(exact, rounded), "tasks": exact}
    (FOLDER / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    print(f"loss {loss:.3f};", {name: {key: value for key, value in task.items() if key != "samples"}
                                for name, task in exact.items()}, scores["bf16_error"])


if __name__ == "__main__":
    main()
