#!/usr/bin/env python3
"""Computes losses of a small Llama in double precision, for test/unit/model/test_gpt.c.

Implements Hugging Face's LlamaForCausalLM: RMSNorm, rotary positions by rotate_half, grouped-query
attention, SwiGLU, and an untied output layer. The last model also has the query and key norms of
Qwen3ForCausalLM. Needs only Python and uses no code of the trainer. The test computes the same weights,
which are exact in bf16, with the same integer formula.

    dev/ref/llama_golden.py >test/golden/gpt/llama_losses.h
"""
import math

LAYERS, C, HEADS, F, V, B, T, EPSILON, BASE = 2, 32, 4, 48, 40, 2, 8, 1e-5, 500.0
HD = C // HEADS


def tensor(number, rows, columns, offset):
    """Returns the tensor with this index in the trainer's table."""
    def element(i):
        return offset + (((i * 2654435761 + number * 40503) % 2**32 // 128) % 64 - 32) / 128
    return [[element(r * columns + c) for c in range(columns)] for r in range(rows)]


class Llama:
    """The weights, numbered as in the trainer's table and split as in Hugging Face's model."""

    def __init__(self, groups, qk_norm):
        self.groups, self.layers, per_group = groups, [], HEADS // groups
        n = 2
        self.words, self.output = tensor(0, V, C, 0), tensor(1, V, C, 0)
        for _ in range(LAYERS):
            norms = [tensor(n + 2 + i, 1, HD, 1)[0] if qk_norm else None for i in range(2)]
            fused = tensor(n + 1, (HEADS + 2 * groups) * HD, C, 0)
            q, k, v = [], [], []
            for g in range(groups):
                rows = fused[g * (per_group + 2) * HD:(g + 1) * (per_group + 2) * HD]
                q += rows[:per_group * HD]
                k += rows[per_group * HD:(per_group + 1) * HD]
                v += rows[(per_group + 1) * HD:]
            o = n + 2 + 2 * qk_norm
            fc1 = tensor(o + 2, 2 * F, C, 0)
            self.layers.append({'input_norm': tensor(n, 1, C, 1)[0], 'q': q, 'k': k, 'v': v,
                                'q_norm': norms[0], 'k_norm': norms[1],
                                'o': tensor(o, C, C, 0), 'post_norm': tensor(o + 1, 1, C, 1)[0],
                                'gate': fc1[:F], 'up': fc1[F:], 'down': tensor(o + 3, C, F, 0)})
            n = o + 4
        self.final_norm = tensor(n, 1, C, 1)[0]


def product(matrix, x):
    return [sum(w * e for w, e in zip(row, x)) for row in matrix]


def rms_norm(x, gain):
    root = math.sqrt(sum(e * e for e in x) / len(x) + EPSILON)
    return [g * e / root for g, e in zip(gain, x)]


def rotate(x, t):
    """Returns x cos + rotate_half(x) sin, with the angles t / BASE^(2 i / HD) repeated twice."""
    angles = [t / BASE ** (2 * i / HD) for i in range(HD // 2)] * 2
    half = [-e for e in x[HD // 2:]] + x[:HD // 2]
    return [e * math.cos(a) + h * math.sin(a) for e, h, a in zip(x, half, angles)]


def turned(x, gain, t):
    return rotate(rms_norm(x, gain) if gain else x, t)


def attention(layer, rows, groups):
    q, k, v = ([product(layer[name], x) for x in rows] for name in 'qkv')
    out = [[0.0] * C for _ in rows]
    for head in range(HEADS):
        g = head // (HEADS // groups)
        keys = [turned(k[t][g * HD:(g + 1) * HD], layer['k_norm'], t) for t in range(T)]
        for t in range(T):
            query = turned(q[t][head * HD:(head + 1) * HD], layer['q_norm'], t)
            scores = [sum(a * b for a, b in zip(query, keys[s])) / math.sqrt(HD) for s in range(t + 1)]
            weights = [math.exp(s - max(scores)) for s in scores]
            for d in range(HD):
                total = sum(w * v[s][g * HD + d] for s, w in enumerate(weights))
                out[t][head * HD + d] = total / sum(weights)
    return [product(layer['o'], x) for x in out]


def losses(model, tokens, targets):
    rows = [model.words[t][:] for t in tokens]
    for layer in model.layers:
        branch = attention(layer, [rms_norm(x, layer['input_norm']) for x in rows], model.groups)
        rows = [[a + b for a, b in zip(x, y)] for x, y in zip(rows, branch)]
        for t, x in enumerate(rows):
            y = rms_norm(x, layer['post_norm'])
            gate, up = product(layer['gate'], y), product(layer['up'], y)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
            rows[t] = [a + b for a, b in zip(x, product(layer['down'], inner))]
    result = []
    for x, target in zip(rows, targets):
        logits = product(model.output, rms_norm(x, model.final_norm))
        top = max(logits)
        result.append(math.log(sum(math.exp(z - top) for z in logits)) + top - logits[target])
    return result


def main():
    print('// Made by dev/ref/llama_golden.py: the losses of its model, (B, T).')
    print('#pragma once')
    for groups, qk_norm in ((4, False), (2, False), (2, True)):
        model, all_losses = Llama(groups, qk_norm), []
        for b in range(B):
            at = range(b * T, (b + 1) * T)
            all_losses += losses(model, [(i * 7 + 3) % V for i in at], [(i * 5 + 1) % V for i in at])
        name = f'llama_losses_{groups}_groups' + '_qk_norm' * qk_norm
        print(f'static const double {name}[{B * T}] = {{')
        for i in range(0, B * T, 4):
            print('    ' + ' '.join(f'{x:.12f},' for x in all_losses[i:i + 4]))
        print('};')


main()
