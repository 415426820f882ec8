#!/usr/bin/env python3
"""Generates test/golden/gpt/gpt.golden: results of PyTorch for a small GPT, to test the model and its ops.

The model is Megatron-LM's legacy GPT: learned positions, pre-LayerNorm (eps 1e-5), q, k and v rows
interleaved per head, causal softmax with scale 1/sqrt(head size), tanh GELU, tied LM head, no dropout.
Everything is computed twice from the same bf16 weights: in fp32, which is the reference, and in bf16. The
errors of this program may be at most twice PyTorch's errors in bf16.

    python3 dev/ref/make_goldens.py [output file]          needs PyTorch >= 1.12 on the CPU, takes seconds

File format (test/golden/golden.h reads it): text lines, then raw little-endian data.
    golden 1 <bytes of the text part, a multiple of 64>
    # comments
    <name> <f32|bf16|i32> <shape, as in 3,144,48> <byte offset from the end of the text part>
The text part is padded with newlines; offsets are multiples of 64.

Tensors (L layers, hidden size C, NH heads, T positions, vocabulary size Vp, B sequences per micro-batch;
P stands for the parameter names of Megatron-LM's checkpoints):
    config                        i32   L, C, NH, T, Vp, B, steps, micro-batches per step
    tokens, targets               i32   (steps * micro-batches, B, T)
    weight.P                      bf16  initial weights
    logits losses loss            f32   (B, T, Vp), (B, T), (1): forward of micro-batch 0
    gradient.P                    f32   gradient of that loss
    adam, learning_rates          f32   beta1, beta2, epsilon, weight decay, clip; (steps)
    steps.loss steps.norm         f32   (steps): mean loss of the micro-batches, norm before clipping
    steps.bf16_loss .bf16_norm    f32   (steps): loss and norm of the bf16 run
    change.P                      bf16  final master weights minus initial weights, rounded
    statistics.P                  f32   sum and L2 norm of the final master weights, L2 norm of the change
    op.*                                single ops on bf16 inputs: attention of layer 0 and the LM head
    error.X                       f32   (2): root mean square and largest |PyTorch bf16 - reference| of X.
                                        X = change.P: of the master weights; X = rounded_change.P: of the
                                        bf16 weights
The bias of the k rows does not change the softmax. Its gradient consists of rounding errors, which Adam
scales up to full steps. These rows of gradient and change are therefore noise in both precisions; only the
rows of q and v can be compared.
"""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

L, C, NH, T, Vp, B = 3, 48, 3, 16, 128, 4
HD = C // NH
STEPS, MICRO_BATCHES = 10, 2
BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0
# The first learning rate is 0, as in Megatron-LM's warm-up.
LEARNING_RATES = [0.0, 1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 3e-3, 2e-3, 1e-3, 5e-4]


def parameter_shapes():
    """Returns names and shapes as in Megatron-LM, in module order."""
    shapes = {"embedding.word_embeddings.weight": (Vp, C), "embedding.position_embeddings.weight": (T, C)}
    for layer in range(L):
        p = f"encoder.layers.{layer}."
        shapes[p + "input_norm.weight"] = shapes[p + "input_norm.bias"] = (C,)
        shapes[p + "self_attention.query_key_value.weight"] = (3 * C, C)
        shapes[p + "self_attention.query_key_value.bias"] = (3 * C,)
        shapes[p + "self_attention.dense.weight"], shapes[p + "self_attention.dense.bias"] = (C, C), (C,)
        shapes[p + "post_attention_norm.weight"] = shapes[p + "post_attention_norm.bias"] = (C,)
        shapes[p + "mlp.dense_h_to_4h.weight"], shapes[p + "mlp.dense_h_to_4h.bias"] = (4 * C, C), (4 * C,)
        shapes[p + "mlp.dense_4h_to_h.weight"], shapes[p + "mlp.dense_4h_to_h.bias"] = (C, 4 * C), (C,)
    shapes["encoder.final_norm.weight"] = shapes["encoder.final_norm.bias"] = (C,)
    return shapes


def initial_weights(generator):
    """Returns fp32 weights with bf16 values. They are larger than usual, so that attention is not uniform.
    Biases and LayerNorm weights are random, so that every term has an effect."""
    weights = {}
    for name, shape in parameter_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            w = 0.12 * noise
        elif "norm.weight" in name:
            w = 1 + 0.1 * noise
        else:
            w = 0.05 * noise
        weights[name] = w.bfloat16().float()
    return weights


def attention(qkv):
    """Computes attention of qkv (B, T, NH, 3, HD). Returns (B, T, C). Scores and probabilities have the
    tensors' precision; the softmax is in fp32."""
    q, k, v = (qkv[:, :, :, i].transpose(1, 2) for i in range(3))  # (B, NH, T, HD)
    scores = torch.matmul(q, k.transpose(2, 3)) * HD ** -0.5
    masked = scores.float().masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    probabilities = torch.softmax(masked, dim=-1).to(qkv.dtype)
    return torch.matmul(probabilities, v).transpose(1, 2).reshape(qkv.shape[0], T, C)


def head(x, word_embeddings, targets):
    """Returns logits in the tensors' precision, and losses (B, T) from cross-entropy in fp32."""
    logits = F.linear(x, word_embeddings).float()
    return logits, F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def gpt(w, tokens, targets, layer_linear=F.linear):
    """Returns logits, losses, layer 0's qkv and the final LayerNorm's output. layer_linear: computes the
    four linears of a layer."""
    norm = lambda x, p: F.layer_norm(x, (C,), w[p + ".weight"], w[p + ".bias"], 1e-5)
    linear = lambda x, p: layer_linear(x, w[p + ".weight"], w[p + ".bias"])
    x = w["embedding.word_embeddings.weight"][tokens] + w["embedding.position_embeddings.weight"]
    first_qkv = None
    for layer in range(L):
        p = f"encoder.layers.{layer}."
        qkv = linear(norm(x, p + "input_norm"), p + "self_attention.query_key_value").view(-1, T, NH, 3, HD)
        first_qkv = qkv if first_qkv is None else first_qkv
        x = x + linear(attention(qkv), p + "self_attention.dense")
        hidden = linear(norm(x, p + "post_attention_norm"), p + "mlp.dense_h_to_4h")
        hidden = F.gelu(hidden, approximate="tanh")
        x = x + linear(hidden, p + "mlp.dense_4h_to_h")
    x = norm(x, "encoder.final_norm")
    logits, losses = head(x, w["embedding.word_embeddings.weight"], targets)
    return logits, losses, first_qkv, x


def leaf(value, dtype):
    """Returns a copy in this dtype that requires gradients."""
    return value.detach().to(dtype, copy=True).requires_grad_()


def gradients(weights, dtype, tokens, targets, scale, layer_linear=F.linear):
    """Runs forward and backward in `dtype`. The loss is the mean; backward multiplies it by scale."""
    w = {name: leaf(value, dtype) for name, value in weights.items()}
    logits, losses, first_qkv, final = gpt(w, tokens, targets, layer_linear)
    (losses.mean() * scale).backward()
    return {
        "logits": logits.detach(), "losses": losses.detach(), "loss": losses.mean().detach().reshape(1),
        "gradient": {name: value.grad.float() for name, value in w.items()},
        "qkv": first_qkv.detach(), "final": final.detach(),
    }


def adamw_steps(initial, dtype, tokens, targets):
    """Apex's FusedAdam with decoupled weight decay on fp32 master weights. The model weights are the master
    weights rounded to dtype."""
    master = {n: v.clone() for n, v in initial.items()}
    m = {n: torch.zeros_like(v) for n, v in initial.items()}
    v = {n: torch.zeros_like(value) for n, value in initial.items()}
    losses, norms = [], []
    f32 = lambda x: torch.tensor(x, dtype=torch.float32)
    b1, b2 = f32(BETA1), f32(BETA2)
    for step in range(STEPS):
        gradient = {n: torch.zeros_like(value) for n, value in master.items()}
        loss = 0.0
        for i in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
            result = gradients(master, dtype, tokens[i], targets[i], 1 / MICRO_BATCHES)
            loss += result["loss"].item() / MICRO_BATCHES
            for n in gradient:
                gradient[n] += result["gradient"][n]
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradient.values())).float()
        losses.append(loss)
        norms.append(norm.item())
        clip = f32(min(1.0, CLIP / (norm.item() + 1e-6)))
        correction1, correction2 = (f32(1 - float(b) ** (step + 1)) for b in (b1, b2))
        for n, p in master.items():
            g = gradient[n] * clip
            m[n] = b1 * m[n] + (1 - b1) * g
            v[n] = b2 * v[n] + (1 - b2) * g * g
            decay = WEIGHT_DECAY if p.dim() >= 2 else 0.0
            update = (m[n] / correction1) / (torch.sqrt(v[n] / correction2) + EPSILON) + decay * p
            master[n] = p - f32(LEARNING_RATES[step]) * update
    return master, losses, norms


def op_attention(qkv, dout, dtype):
    qkv = leaf(qkv, dtype)
    out = attention(qkv)
    out.backward(dout.to(dtype))
    return out.detach().float(), qkv.grad.float()


def op_head(x, wte, targets, dtype):
    x, wte = leaf(x, dtype), leaf(wte, dtype)
    losses = head(x, wte, targets)[1]
    losses.mean().backward()
    return losses.detach(), x.grad.float(), wte.grad.float()


class Writer:
    def __init__(self):
        self.lines, self.data, self.offset = [], [], 0

    def add(self, name, value, kind="f32"):
        value = value if torch.is_tensor(value) else torch.tensor(value)
        if kind == "bf16":
            array = value.bfloat16().contiguous().view(torch.int16).numpy().astype("<i2")
        else:
            array = value.contiguous().numpy().astype({"f32": "<f4", "i32": "<i4"}[kind])
        shape = ",".join(str(n) for n in value.shape)
        self.lines.append(f"{name} {kind} {shape} {self.offset}\n")
        raw = array.tobytes()
        raw += bytes(-len(raw) % 64)
        self.data.append(raw)
        self.offset += len(raw)

    def add_error(self, name, bf16, reference):
        difference = (bf16.float() - reference.float()).double()
        self.add("error." + name, [difference.pow(2).mean().sqrt().item(), difference.abs().max().item()])

    def write(self, path):
        versions = f"PyTorch {torch.__version__}, numpy {np.__version__}"
        body = f"# made by dev/ref/{os.path.basename(sys.argv[0])} with {versions}\n" + "".join(self.lines)
        total = (len("golden 1 00000000\n") + len(body) + 63) // 64 * 64
        text = (f"golden 1 {total:08d}\n" + body).encode()
        with open(path, "wb") as file:
            file.write(text + b"\n" * (total - len(text)) + b"".join(self.data))


def add_ops(out, weights, fp32, targets, generator):
    """Adds single ops with inputs that are exact in bf16, so that both precisions use the same values."""
    qkv, x = fp32["qkv"].bfloat16().float(), fp32["final"].bfloat16().float()
    dout = torch.randn(B, T, C, generator=generator).bfloat16().float()
    wte = weights["embedding.word_embeddings.weight"]
    out.add("op.attention.qkv", qkv, "bf16")
    out.add("op.attention.dout", dout, "bf16")
    out.add("op.head.x", x, "bf16")
    cases = [(("op.attention.out", "op.attention.dqkv"), op_attention, (qkv, dout)),
             (("op.head.losses", "op.head.dx", "op.head.dwte"), op_head, (x, wte, targets[0]))]
    for names, op, inputs in cases:
        for name, reference, bf16 in zip(names, op(*inputs, torch.float32), op(*inputs, torch.bfloat16)):
            out.add(name, reference)
            out.add_error(name, bf16, reference)


def main():
    default = os.path.join(os.path.dirname(__file__), "../../test/golden/gpt/gpt.golden")
    path = sys.argv[1] if len(sys.argv) > 1 else default
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1234)
    weights = initial_weights(generator)
    # Half of the tokens are successors of the previous token, so that there is something to learn.
    stream = torch.randint(0, Vp - 8, (STEPS * MICRO_BATCHES, B, T + 1), generator=generator)
    repeat = torch.rand(stream.shape, generator=generator) < 0.5
    for t in range(1, T + 1):
        stream[:, :, t] = torch.where(repeat[:, :, t], (stream[:, :, t - 1] + 1) % (Vp - 8), stream[:, :, t])
    tokens, targets = stream[:, :, :-1], stream[:, :, 1:]

    out = Writer()
    out.add("config", [L, C, NH, T, Vp, B, STEPS, MICRO_BATCHES], "i32")
    out.add("adam", [BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP])
    out.add("learning_rates", LEARNING_RATES)
    out.add("tokens", tokens, "i32")
    out.add("targets", targets, "i32")
    for name, value in weights.items():
        out.add("weight." + name, value, "bf16")

    fp32 = gradients(weights, torch.float32, tokens[0], targets[0], 1.0)
    bf16 = gradients(weights, torch.bfloat16, tokens[0], targets[0], 1.0)
    for name in ("logits", "losses", "loss"):
        out.add(name, fp32[name])
        out.add_error(name, bf16[name], fp32[name])
    for name in weights:
        out.add("gradient." + name, fp32["gradient"][name])
        out.add_error("gradient." + name, bf16["gradient"][name], fp32["gradient"][name])
    add_ops(out, weights, fp32, targets, generator)

    final, losses, norms = adamw_steps(weights, torch.float32, tokens, targets)
    final_bf16, losses_bf16, norms_bf16 = adamw_steps(weights, torch.bfloat16, tokens, targets)
    out.add("steps.loss", losses)
    out.add("steps.norm", norms)
    out.add("steps.bf16_loss", losses_bf16)
    out.add("steps.bf16_norm", norms_bf16)
    for name, value in final.items():
        change = value - weights[name]
        out.add("change." + name, change, "bf16")
        numbers = value.double().sum(), value.double().norm(), change.double().norm()
        out.add("statistics." + name, [number.item() for number in numbers])
        out.add_error("change." + name, final_bf16[name] - weights[name], change)
        out.add_error("rounded_change." + name, final_bf16[name].bfloat16().float() - weights[name], change)
    out.write(path)
    print(f"{path}: {os.path.getsize(path)} bytes")
    for kind, loss, norm in ("fp32", losses, norms), ("bf16", losses_bf16, norms_bf16):
        text = " ".join(f"{x:.4f}" for x in norm)
        print(f"{kind}: loss {loss[0]:.6f} -> {loss[-1]:.6f}, gradient norms {text}")


if __name__ == "__main__":
    main()
