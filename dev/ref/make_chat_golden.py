#!/usr/bin/env python3
"""Generates test/golden/chat for test/unit/data/test_chat.c: two small tokenizers that have the tokens of
all chat templates, and the ids and loss masks of conversations as transformers computes them.

    pip install transformers jinja2
    dev/ref/make_chat_golden.py
    dev/ref/make_chat_golden.py --compare MODEL TEMPLATE build/preprocess_data

--compare checks preprocess_data --chat TEMPLATE with the tokenizer and the chat template of a real model:
a folder of Hugging Face with tokenizer.json and tokenizer_config.json.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

from transformers import AutoTokenizer, PreTrainedTokenizerFast

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
          "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]

# The models' templates without tools, reasoning and error messages.
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN25 = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\n' }}
{{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
{{- '<|im_end|>\\n' }}{% endif %}""" + CHATML
QWEN3 = """{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last_query and loop.last %}
    {{- '<think>\\n\\n</think>\\n\\n' + m.content.lstrip('\\n') }}
{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}{% if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}"""
MISTRAL = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"""
MISTRAL_V7 = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
# name: (tokenizer, template, end of turn, has a system role)
TEMPLATES = {
    "chatml": ("bytes", CHATML, "<|im_end|>", True),
    "qwen2.5": ("bytes", QWEN25, "<|im_end|>", True),
    "qwen3": ("bytes", QWEN3, "<|im_end|>", True),
    "llama3": ("bytes", "{{- bos_token }}" + LLAMA3, "<|eot_id|>", True),
    "llama3.1": ("bytes", LLAMA31 + LLAMA3, "<|eot_id|>", True),
    "mistral": ("metaspace", MISTRAL, "</s>", False),
    "mistral-nemo": ("bytes", MISTRAL_V7, "</s>", False),
    "mistral-v7": ("bytes", MISTRAL_V7, "</s>", True),
}
CONVERSATIONS = [
    [("user", "hi"), ("assistant", "Hello there, friend.")],
    [("system", "Be brief."), ("user", "What is 12 + 30?"), ("assistant", "42"), ("user", "And 7 more?"),
     ("assistant", "It's 49.")],
    [("user", "  spaces \t"), ("assistant", " around the answer  \n"), ("user", "\n\nnew lines\n"),
     ("assistant", "none")],
    [("system", ""), ("user", ""), ("assistant", "An answer to nothing")],
    [("user", "caf\u00e9 \u4e2d\u6587 \U0001f600"), ("assistant", "na\u00efve \u00a0 text\u3000"),
     ("user", "unanswered")],
    [("user", "the token <|eot_id|> and </s> in a text"), ("assistant", "a <s> b")],
]


def messages_of(turns):
    return [{"role": role, "content": text} for role, text in turns]


def masked(tokenizer, messages, stop):
    """Returns ids, and masks that are 1 from the end of the prompt of each answer to its end of turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            assert text.startswith(prompt), (text, prompt)
            answer = text.index(message["content"].strip(), len(prompt)) + len(message["content"].strip())
            spans.append((len(prompt), text.index(stop, answer) + len(stop)))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= begin and end <= b for a, b in spans)) for begin, end in found["offset_mapping"]]
    return found["input_ids"], mask


def make_tokenizer(name, source):
    path = GOLDEN / "tokenizer_json" / source / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    (GOLDEN / "chat" / name).mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(GOLDEN / "chat" / name / "tokenizer.json"), pretty=False)
    return tokenizer


def generate():
    tokenizers = {"bytes": make_tokenizer("bytes", "llama3"),
                  "metaspace": make_tokenizer("metaspace", "mistral")}
    cases = []
    for name, (which, template, stop, system) in TEMPLATES.items():
        tokenizer = tokenizers[which]
        tokenizer.chat_template = template
        tokenizer.bos_token = "<|begin_of_text|>" if stop == "<|eot_id|>" else "<s>"
        tokenizer.eos_token = stop
        for turns in CONVERSATIONS:
            if not system and turns[0][0] == "system":
                continue
            ids, mask = masked(tokenizer, messages_of(turns), stop)
            line = json.dumps({"messages": messages_of(turns)})
            cases.append({"template": name, "tokenizer": which, "line": line, "ids": ids, "mask": mask})
    with open(GOLDEN / "chat" / "cases.json", "w") as out:
        out.write("{\"cases\": [\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]}\n")


def compare(folder, name, preprocess):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, _, stop, system = TEMPLATES[name]
    chosen = [messages_of(turns) for turns in CONVERSATIONS if system or turns[0][0] != "system"]
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work)
        (path / "in").write_text("".join(json.dumps({"messages": m}) + "\n" for m in chosen))
        subprocess.run([preprocess, "--chat", name, "--input", path / "in", "--output-prefix", path / "out",
                        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder], check=True)
        data = (path / "out_messages_document.bin").read_bytes()
        mask = list((path / "out_messages_document_loss_mask.bin").read_bytes())
    size = len(data) // len(mask)
    ids = [int.from_bytes(data[i:i + size], "little") for i in range(0, len(data), size)]
    at, differ = 0, 0
    for messages in chosen:
        expected = masked(tokenizer, messages, stop)
        end = at + len(expected[0])
        if (ids[at:end], mask[at:end]) != tuple(expected):
            differ += 1
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            print("differs:", json.dumps(messages), text, sep="\n")
        at = end
    print(f"{len(chosen)} conversations, {differ} differ, {len(ids) - at} ids more")
    sys.exit(differ > 0 or at != len(ids))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        compare(*sys.argv[2:])
    generate()
