"""Routes ``torch.nn.functional.scaled_dot_product_attention`` to this package, for a while.

    with route_sdpa() as routing:
        loss = model(batch)
        loss.backward()
    print(routing)

Nothing in PyTorch is replaced: the context manager is a ``TorchFunctionMode``, which belongs to the
thread that entered it (and to the backward passes that this thread starts), and ends with it,
whatever happened inside.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashattn_triton.attention import flash_attention
from flashattn_triton.options import DTYPES, MAX_HEAD_DIM


@dataclass
class Routing:
    """What became of the calls: how many were routed, and why others went to PyTorch."""

    routed: int = 0
    passed_on: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "".join(f"; {count} passed on: {why}" for why, count in self.passed_on.items())
        return f"{self.routed} calls of scaled_dot_product_attention routed{reasons}"


@contextlib.contextmanager
def route_sdpa(*, strict: bool = False) -> Iterator[Routing]:
    """Within the context, calls of ``scaled_dot_product_attention`` run ``flash_attention``.

    ``is_causal`` (top-left), ``scale`` and ``enable_gqa`` are supported, for float16, bfloat16 and
    float32 tensors (batch, heads, sequence, head_dim) or (batch, sequence, head_dim) with head_dim
    up to 256. A call with a mask, with dropout, or with anything else that ``flash_attention``
    does not compute goes to PyTorch unchanged, is counted with its reason, and is reported by a
    ``RuntimeWarning`` when the context ends.

    Calls from compiled code that was traced outside of the context, and from C++ (such as the fast
    path of ``torch.nn.TransformerEncoderLayer`` in inference), never pass through Python and are
    neither routed nor counted.

    Args:
        strict: raise instead of passing a call on.

    Yields:
        The :class:`Routing` that counts.

    Raises:
        ValueError: from within the context, if ``strict`` and a call cannot be routed.
    """
    routing = Routing()
    with _Mode(routing, strict):
        yield routing
    if routing.passed_on:
        warnings.warn(str(routing), RuntimeWarning, stacklevel=3)


class _Mode(TorchFunctionMode):
    def __init__(self, routing: Routing, strict: bool) -> None:
        super().__init__()
        self.routing = routing
        self.strict = strict

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = _Call(*args, **(kwargs or {}))
        reason = call.obstacle()
        if reason is None:
            self.routing.routed += 1
            return call.run()
        if self.strict:
            raise ValueError(
                f"scaled_dot_product_attention cannot be routed to flash_attention: {reason}; "
                f"use route_sdpa(strict=False) to let PyTorch compute such calls"
            )
        self.routing.passed_on[reason] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class _Call:
    """The arguments of ``scaled_dot_product_attention``, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def obstacle(self) -> str | None:
        """Why ``flash_attention`` cannot compute this; None if it can."""
        query, key, value = self.query, self.key, self.value
        tensors = (query, key, value)
        if self.attn_mask is not None:
            return "attn_mask is given"
        if self.dropout_p != 0.0:
            return "dropout_p is not 0"
        if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested for x in tensors):
            return "a nested tensor or a tensor subclass"
        if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            return "a dtype other than float16, bfloat16, float32, or a mixture"
        if key.device != query.device or value.device != query.device:
            return "tensors on different devices"
        if query.dim() not in (3, 4) or any(x.dim() != query.dim() for x in tensors):
            return "other than 3 or 4 dimensions"
        if any(x.shape[:-3] != query.shape[:-3] for x in tensors):
            return "batch dimensions that broadcast"
        heads, kv_heads = query.shape[-3], key.shape[-3]
        if value.shape[-3] != kv_heads or (heads != kv_heads and not self.enable_gqa):
            return "head dimensions that broadcast"
        if any(0 in x.shape for x in tensors) or heads % kv_heads:
            return "empty tensors, or key heads that do not divide the query heads"
        if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
            return f"head_dim above {MAX_HEAD_DIM}"
        if key.shape[-1] != query.shape[-1] or value.shape[-2] != key.shape[-2]:
            return "shapes that do not fit together"
        return None

    def run(self) -> Tensor:
        tensors = (self.query, self.key, self.value)
        if self.query.dim() == 3:  # (B, N, D): the batch takes the place of the heads
            query, key, value = (x[None] for x in tensors)
            return flash_attention(query, key, value, causal=self.is_causal, scale=self.scale)[0]
        return flash_attention(*tensors, causal=self.is_causal, scale=self.scale)
