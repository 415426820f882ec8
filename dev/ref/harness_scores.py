#!/usr/bin/env python3
"""Scores a file of --eval-tasks with EleutherAI's lm-evaluation-harness on a Hugging Face model, and
compares the results with the trainer's log (--log-eval-samples).

Exits with 1 if
- a log-likelihood differs by more than twice the harness's largest error in bf16 relative to fp32,
- a sample is correct in only one of the two results, and the scores of its choices are not that close,
- a metric of the trainer differs from its value computed from the trainer's samples.

    pip install lm-eval torch transformers accelerate
    dev/ref/harness_scores.py FOLDER TASKS.jsonl RUN.jsonl [--max-length N]
"""
import argparse
import collections
import json
import math
import os
import pathlib
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", DISABLE_MULTIPROC="1")


def read_tasks(path):
    """Returns {task: samples}, in the order of the file."""
    tasks = collections.OrderedDict()
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        tasks.setdefault(sample["task"], []).append(sample)
    return tasks


def write_task(folder, name, samples):
    """Writes a task in the harness's format: a configuration and a file with the samples."""
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    if "choices" in samples[0]:
        form = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    else:
        form = {"output_type": "loglikelihood", "doc_to_target": "{{continuation}}"}
    metrics = ["acc", "acc_norm" if "choices" in samples[0] else "perplexity"]
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test", "doc_to_text": "{{context}}",
            "metric_list": [{"metric": metric} for metric in metrics], **form}
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def harness_scores(model, tasks, dtype, max_length=None):
    """Returns {task: {"acc": ..., "samples": [{"log_likelihoods": [...], "greedy": bool}, ...]}}."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    arguments = {"pretrained": str(model), "dtype": dtype}
    if max_length:
        arguments["max_length"] = max_length
    with tempfile.TemporaryDirectory() as folder:
        for name, samples in tasks.items():
            write_task(pathlib.Path(folder), name, samples)
        # A batch size of one avoids padding, which would change rounding in bf16.
        found = lm_eval.simple_evaluate(model="hf", model_args=arguments, tasks=list(tasks), device="cpu",
                                        batch_size=1, bootstrap_iters=2, log_samples=True,
                                        task_manager=TaskManager(include_path=folder))
    scores = {}
    for name in tasks:
        figures = {key.split(",")[0]: value for key, value in found["results"][name].items()
                   if key.split(",")[0] in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "perplexity")}
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        answers = [[one[0] for one in sample["resps"]] for sample in samples]
        scores[name] = {**figures, "samples": [
            {"log_likelihoods": [float(answer[0]) for answer in sample],
             "greedy": str(sample[0][1]) == "True"} for sample in answers]}
    return scores


def largest_error(one, other):
    """Returns the largest difference between the log-likelihoods of two results of harness_scores."""
    return max(abs(a - b) for name in one for x, y in zip(one[name]["samples"], other[name]["samples"])
               for a, b in zip(x["log_likelihoods"], y["log_likelihoods"]))


def correct(sample, scores):
    """Returns whether a sample is correct by acc and by acc_norm, and the margins of both decisions."""
    if "choices" not in sample:
        return (scores["greedy"],), (math.inf,)
    lengths = [len(choice) for choice in sample["choices"]]
    by_length = [value / length for value, length in zip(scores["log_likelihoods"], lengths)]
    right, margins = [], []
    for values, unit in ((scores["log_likelihoods"], 1), (by_length, min(lengths))):
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        right.append(order[0] == sample["gold"])
        margins.append((values[order[0]] - values[order[1]]) * unit if len(values) > 1 else math.inf)
    return tuple(right), tuple(margins)


def compare_task(name, samples, logged, figures, scores, limit):
    """Yields a description of each difference in a task."""
    names, hits = ("acc", "acc_norm") if "choices" in samples[0] else ("acc",), [0, 0]
    for number, (sample, ours, theirs) in enumerate(zip(samples, logged, scores["samples"])):
        for a, b in zip(ours["log_likelihoods"], theirs["log_likelihoods"]):
            if not abs(a - b) <= limit:
                yield f"{name}, sample {number}: {a} instead of {b}"
        own, _ = correct(sample, ours)
        right, margins = correct(sample, theirs)
        for which, metric in enumerate(names):
            hits[which] += own[which]
            # In bf16, a token that is greedy in fp32 may have the same probability as another one.
            if own[which] != right[which] and "choices" in sample and margins[which] > 2 * limit:
                yield f"{name}, sample {number}: different result by {metric}"
    for which, metric in enumerate(names):
        if figures["n"] != len(samples) or abs(figures[metric] - hits[which] / len(samples)) > 1e-12:
            yield f"{name}: {metric} is {figures[metric]}, but {hits[which]} of {len(samples)} are correct"
    mean = sum(sample["log_likelihoods"][0] for sample in logged) / len(logged)
    if "perplexity" in figures and not math.isclose(figures["perplexity"], math.exp(-mean), rel_tol=1e-9):
        yield f"{name}: perplexity is {figures['perplexity']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("tasks")
    parser.add_argument("run")
    parser.add_argument("--max-length", type=int)
    options = parser.parse_args()
    tasks = read_tasks(options.tasks)
    exact = harness_scores(options.folder, tasks, "float32", options.max_length)
    rounded = harness_scores(options.folder, tasks, "bfloat16", options.max_length)
    limit = 2 * largest_error(exact, rounded)
    lines = [json.loads(line) for line in pathlib.Path(options.run).read_text().splitlines()]
    last = max(line["iteration"] for line in lines if line["kind"] == "task")
    complaints = []
    for name, samples in tasks.items():
        mine = [line for line in lines if line.get("iteration") == last and line.get("task") == name]
        logged = [line for line in mine if line["kind"] == "eval_sample"]
        figures = [line for line in mine if line["kind"] == "task"]
        if len(logged) != len(samples) or len(figures) != 1:
            sys.exit(f"{name}: {len(logged)} samples and {len(figures)} records in {options.run}")
        complaints += compare_task(name, samples, logged, figures[0], exact[name], limit)
        print(f"{name}: {figures[0]}, the harness in fp32 {exact[name]['acc']}, in bf16 {rounded[name]['acc']}")
    print(f"log-likelihoods may differ by {limit:.4f}")
    sys.exit("\n".join(complaints) or 0)


if __name__ == "__main__":
    main()
