"""Tensors of an attention case, with the gradients that its backward pass starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_cases import Case
from flashattn_triton.mask_and_bias import NOTHING, Given, resolve_mask_and_bias
from flashattn_triton.problem import Problem


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case. ``grad_lse`` is zero where the logsumexp is -inf for every input."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    tensors: dict[str, Tensor]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors.get("bias")

    @property
    def given(self) -> Given:
        layout = "thd" if self.query.dim() == 3 else "bhsd"
        given = Given(**self.tensors)._replace(bias=None)
        leading = (self.case.batch,)
        resolved = resolve_mask_and_bias(given, layout, leading, self.query, self.key)
        return resolved._replace(bias=self.bias)  # may be of a dtype that only the oracle takes

    @property
    def options(self) -> Problem:
        return self.case.options


def operator_arguments(problem: Problem, given: Given = NOTHING) -> tuple[Any, ...]:
    """What the operators take behind query, key and value, and behind the results."""
    return (*given, *problem.pack())


def gapped(x: Tensor, *, row_gap: int = 0, last_stride: int = 1) -> Tensor:
    """The same values as a view into a larger tensor; what lies between them is NaN."""
    *leading, rows, width = x.shape
    storage = x.new_full((*leading, rows, width * last_stride + row_gap), float("nan"))
    view = storage[..., : width * last_stride : last_stride]
    view.copy_(x)
    return view


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "bshd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "padded":
        return gapped(x, row_gap=8)
    if layout == "strided":
        return gapped(x, last_stride=2)
    assert layout in ("bhsd", "expanded"), layout
    return x


def make_inputs(case: Case, device: torch.device | str = "cpu", layout: str = "bhsd") -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    (heads, kv_heads), (dim, value_dim) = case.heads, case.head_dims
    n_queries, n_keys = (sum(column) for column in zip(*case.lengths, strict=True))

    def random(count: int, length: int, *width: int, dtype: torch.dtype) -> Tensor:
        shape = (count, length, *width) if case.packed else (case.batch, count, length, *width)
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        return x.transpose(0, 1).contiguous() if case.packed and width else x

    def leaf(count: int, length: int, width: int) -> Tensor:
        x = random(count, length, width, dtype=case.dtype)
        return laid_out(x, layout).detach().requires_grad_()

    def key_leaf(width: int) -> Tensor:
        if layout != "expanded":
            return leaf(kv_heads, n_keys, width)
        shared = random(1, n_keys, width, dtype=case.dtype)
        shape = (-1, kv_heads, -1) if case.packed else (-1, kv_heads, -1, -1)
        return shared.expand(shape).detach().requires_grad_()

    tensors: dict[str, Tensor] = {}
    if case.alibi is not None:
        shape: tuple[int, ...] = (heads,) if case.alibi == "heads" else (case.batch, heads)
        tensors["alibi_slopes"] = torch.rand(shape, generator=generator, device=device) / 4
    if case.bias is not None:
        sizes = zip("bhqk", (case.batch, heads, n_queries, n_keys), strict=True)
        shape = tuple(n if name in case.bias else 1 for name, n in sizes)
        bias = torch.randn(shape, generator=generator, device=device).to(case.dtype)
        tensors["bias"] = bias.requires_grad_()
    if case.prefix:  # some keys, none, more than there are
        lengths = [n // 2 + 1 for _, n in case.lengths] * (1 if case.packed else case.batch)
        lengths[1:3] = [0, lengths[-1] * 3][: len(lengths) - 1]
        tensors["prefix_lengths"] = torch.tensor(lengths, device=device)
    return Inputs(
        case=case,
        tensors=tensors,
        query=leaf(heads, n_queries, dim),
        key=key_leaf(dim),
        value=key_leaf(value_dim),
        grad_out=random(heads, n_queries, value_dim, dtype=case.dtype),
        grad_lse=random(heads, n_queries, dtype=torch.float32),
    )
