#!/usr/bin/env python3
"""FP8 linear layers in PyTorch with the scaling rule of --fp8-recipe tensorwise, as a reference:
scale = largest value of the format / absmax in fp32, casts saturate, products by torch._scaled_mm. On CPUs,
where older versions of PyTorch have neither FP8 types nor torch._scaled_mm, codes are fp32 tensors of the
same values and products are fp32 products.

    python3 dev/ref/fp8.py      prints why PyTorch cannot compute FP8 products on this machine's GPU;
                                exit code 0 if it can
"""
import sys

import torch

# dtype of PyTorch, largest value, bits of mantissa, exponent of the smallest normal number
FORMATS = {"e4m3": ("float8_e4m3fn", 448.0, 3, -6), "e5m2": ("float8_e5m2", 57344.0, 2, -14)}


def missing():
    """Returns why this machine's GPU has no FP8 products in PyTorch, or None."""
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has no FP8 tensor cores"
    if not hasattr(torch, "_scaled_mm") or not hasattr(torch, "float8_e5m2"):
        return f"PyTorch {torch.__version__} has no FP8 products"
    return None


def device(kind):
    """Returns the device on which to compute a reference, with FP8 if `kind` is not None."""
    return "cuda" if torch.cuda.is_available() and not (kind and missing()) else "cpu"


def scale_for(absmax, kind):
    """Returns scale and inverse as fp32 tensors of one element. absmax 0 or not finite: 1."""
    absmax = absmax.float().reshape(1)
    scale = torch.full_like(absmax, FORMATS[kind][1]) / absmax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((absmax > 0) & torch.isfinite(absmax), scale, torch.ones_like(absmax))
    return scale, torch.ones_like(scale) / scale


def encode(x, scale, kind):
    """Returns codes of x * scale: rounded to nearest even, saturating."""
    name, largest, mantissa, smallest = FORMATS[kind]
    y = (x.float() * scale).clamp(-largest, largest)
    if x.is_cuda:
        return y.to(getattr(torch, name))
    exponent = (torch.frexp(y)[1] - 1).clamp(min=smallest)
    unit = torch.ldexp(torch.ones_like(y), exponent - mantissa)
    return torch.round(y / unit) * unit


def quantize(x, kind):
    """Returns codes and the inverse of the scale."""
    scale, inverse = scale_for(x.abs().max(), kind)
    return encode(x, scale, kind), inverse


def product(a, b, inverse_a, inverse_b, bias=None, dtype=torch.bfloat16, fast=False):
    """Returns a (m, k) times b (n, k) transposed, plus bias."""
    a, b = a.contiguous(), b.contiguous()
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=inverse_a, scale_b=inverse_b, bias=bias, out_dtype=dtype,
                                use_fast_accum=fast)
    result = (a @ b.t()) * (inverse_a * inverse_b)
    return (result if bias is None else result + bias.float()).to(dtype)


class Linear(torch.autograd.Function):
    """x w^T + bias in bf16, with all three products in FP8. gradient: format of the output gradient."""

    @staticmethod
    def forward(ctx, x, w, bias, gradient):
        rows = x.reshape(-1, x.shape[-1])
        (x8, x_inverse), (w8, w_inverse) = quantize(rows, "e4m3"), quantize(w, "e4m3")
        ctx.save_for_backward(x8, x_inverse, w8, w_inverse)
        ctx.gradient, ctx.shape, ctx.has_bias = gradient, x.shape, bias is not None
        y = product(x8, w8, x_inverse, w_inverse, bias, fast=True)
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x8, x_inverse, w8, w_inverse = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dy8, dy_inverse = quantize(rows, ctx.gradient)
        dx = product(dy8, w8.t(), dy_inverse, w_inverse)
        dw = product(dy8.t(), x8.t(), dy_inverse, x_inverse)
        return dx.view(ctx.shape), dw, rows.sum(0) if ctx.has_bias else None, None


def linear(kind):
    """Returns a replacement of torch.nn.functional.linear for --fp8-format `kind` (hybrid or e4m3)."""
    gradient = "e5m2" if kind == "hybrid" else "e4m3"
    return lambda x, w, bias=None: Linear.apply(x, w, bias, gradient)


def flags(kind):
    """Returns this program's flags for the same layers."""
    return ["--fp8-format", kind, "--fp8-recipe", "tensorwise"] if kind else []


if __name__ == "__main__":
    reason = missing()
    if reason:
        sys.exit(reason)
