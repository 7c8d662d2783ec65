"""Errors of attention to keys in parts: the table of ``docs/how-to/rings.md``.

python packages/flashattn-triton/tools/errors_of_parts.py

bf16 inputs with 4 query heads, 2 key heads, 512 tokens and head_dim 64, on a GPU if there is one.
An error is the root mean square of the difference to fp64, over that of the fp64 result. "bf16
parts" are results as ``flash_attention`` returns them, joined by ``merge`` and differentiated by
autograd; "fp32 parts" have ``out_dtype=torch.float32`` and ``flash_attention_backward``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_triton import flash_attention, flash_attention_backward, merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = (1, 2, 8, 32)


def in_bf16(inputs: list[Tensor], grad_out: Tensor, parts: int) -> list[Tensor]:
    """Output, dQ, dK and dV of parts in the inputs' dtype."""
    query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
    of_keys = zip(key.chunk(parts, 2), value.chunk(parts, 2), strict=True)
    results = [flash_attention(query, *part, return_lse=True) for part in of_keys]
    out, _ = merge(*zip(*results, strict=True))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def in_fp32(inputs: list[Tensor], grad_out: Tensor, parts: int) -> list[Tensor]:
    """The same of outputs and sums of gradients in fp32, rounded at the end."""
    query, key, value = inputs
    of_keys = list(zip(key.chunk(parts, 2), value.chunk(parts, 2), strict=True))
    results = [
        flash_attention(query, *part, return_lse=True, out_dtype=torch.float32) for part in of_keys
    ]
    out, lse = merge(*zip(*results, strict=True))
    dq, dk, dv = (torch.zeros(x.shape, device=DEVICE) for x in inputs)
    for part, *into in zip(of_keys, dk.chunk(parts, 2), dv.chunk(parts, 2), strict=True):
        flash_attention_backward(query, *part, out, lse, grad_out, (dq, *into))
    return [out, dq, dk, dv]


def main() -> None:
    """Prints the table as Markdown."""
    torch.manual_seed(0)
    shapes = [(1, heads, 512, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
    grad_out = torch.randn(shapes[0], device=DEVICE).bfloat16()
    exact = [x.double().requires_grad_() for x in inputs]
    q, k, v = exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])
    out = ((q @ k.mT) / 8).softmax(-1) @ v
    wanted = [out.detach(), *torch.autograd.grad(out, exact, grad_out.double())]
    names = ("output", "dQ", "dK", "dV")
    print("| parts |", *(f"{n}, {d} parts |" for d in ("bf16", "fp32") for n in names))
    print("|---:|" + "---:|" * 8)
    for parts in PARTS:
        found = [x for way in (in_bf16, in_fp32) for x in way(inputs, grad_out, parts)]
        errors = [
            float((x.bfloat16().double() - y).square().mean().sqrt() / y.square().mean().sqrt())
            for x, y in zip(found, wanted * 2, strict=True)
        ]
        print(f"| {parts} |", *(f"{error:.1e} |" for error in errors))


if __name__ == "__main__":
    main()
