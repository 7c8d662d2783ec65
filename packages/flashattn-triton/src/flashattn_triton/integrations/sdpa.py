"""Routes ``torch.nn.functional.scaled_dot_product_attention`` to this package, for a while.

    with route_sdpa() as routing:
        loss = model(batch)
        loss.backward()
    print(routing)

The name in ``torch.nn.functional`` is replaced while any such context is open, in all threads:
PyTorch runs backward passes, and with them the recomputation of activation checkpoints, in threads
of its own. (A ``TorchFunctionMode`` would end with its thread, and is off inside of functions that
themselves honour it, ``multi_head_attention_forward`` and ``Tensor.backward`` among them.)
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_triton import flash_attention
from flashattn_triton.problem import DTYPES, LARGEST_FACTOR, MAX_HEAD_DIMS, as_number, broadcasts


@dataclass
class Routing:
    """What became of the calls: how many were routed, and why others went to PyTorch."""

    strict: bool = False
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
    up to 256, and 512 in half types. An ``attn_mask`` that broadcasts to the scores is
    ``flash_attention``'s ``mask`` if it is boolean, else its ``bias``, with a gradient. A call with
    dropout, or with anything else that ``flash_attention`` does not compute, goes to PyTorch
    unchanged, is counted with its reason, and is reported by a ``RuntimeWarning`` when the context
    ends.

    Hide keys by -inf: PyTorch's kernels do not agree on a query whose keys all have the lowest
    finite number instead, and nor do tiers here. Where all keys are hidden the output is 0.

    Calls by a name imported from ``torch.nn.functional`` beforehand, calls in code compiled outside
    of the context, and calls in C++ (such as the fast path of ``torch.nn.TransformerEncoderLayer``
    in inference) do not look the name up and are neither routed nor counted. Code compiled inside
    of the context has a graph break at each call. Contexts may be nested or overlap in several
    threads: the one entered last decides, and counts.

    Args:
        strict: raise instead of passing a call on.

    Yields:
        The :class:`Routing` that counts.

    Raises:
        ValueError: from within the context, if ``strict`` and a call cannot be routed.
    """
    routing = Routing(strict=strict)
    _SWITCH.enter(routing)
    try:
        yield routing
    finally:
        _SWITCH.leave(routing)
    if routing.passed_on:
        warnings.warn(str(routing), RuntimeWarning, stacklevel=3)


class _Switch:
    """The open contexts, and the replacement that is installed while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: list[Routing] = []
        self.original = F.scaled_dot_product_attention

    def enter(self, routing: Routing) -> None:
        with self.lock:
            if not self.open:
                self.original = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = self.attend
            self.open.append(routing)

    def leave(self, routing: Routing) -> None:
        with self.lock:
            self.open = [other for other in self.open if other is not routing]
            # If someone wrapped the replacement meanwhile, it stays and only passes calls on.
            if not self.open and F.scaled_dot_product_attention == self.attend:
                F.scaled_dot_product_attention = self.original

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Has the signature of ``scaled_dot_product_attention``."""
        try:
            call: _Call | None = _Call(*args, **kwargs)
        except TypeError:  # those of a later PyTorch, or mistakes that PyTorch's own error names
            call = None
        reason = "arguments that are not known" if call is None else call.obstacle()
        with self.lock:
            routing = self.open[-1] if self.open else None
            if routing is not None and reason is None:
                routing.routed += 1
            elif routing is not None and not routing.strict:
                routing.passed_on[str(reason)] += 1
        if routing is None:
            return self.original(*args, **kwargs)
        if call is not None and reason is None:
            return call.run()
        if routing.strict:
            raise ValueError(
                f"scaled_dot_product_attention cannot be routed to flash_attention: {reason}; "
                f"use route_sdpa(strict=False) to let PyTorch compute such calls"
            )
        return self.original(*args, **kwargs)


_SWITCH = _Switch()


@dataclass
class _Call:
    """The arguments of ``scaled_dot_product_attention``, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: object = False
    scale: float | None = None
    enable_gqa: bool = False

    def obstacle(self) -> str | None:
        """Why ``flash_attention`` cannot compute this; None if it can."""
        query, key, value = self.query, self.key, self.value
        tensors = (query, key, value)
        if not isinstance(self.is_causal, bool):
            return "an is_causal that is no bool"
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
        limits = MAX_HEAD_DIMS[query.element_size()]
        for x, limit in zip((query, value), limits, strict=True):
            if x.shape[-1] > limit:
                return f"head_dim above {limit}"
        if key.shape[-1] != query.shape[-1] or value.shape[-2] != key.shape[-2]:
            return "shapes that do not fit together"
        scale = 0 if self.scale is None else self.scale
        if not abs(as_number(scale)) <= LARGEST_FACTOR:
            return f"a scale that is no number of at most {LARGEST_FACTOR:.0e} in size"
        mask = self.attn_mask
        if mask is None:
            return None
        if type(mask) not in (Tensor, torch.nn.Parameter):
            return "an attn_mask of a tensor subclass"
        if mask.dtype not in (torch.bool, query.dtype):
            return "an attn_mask that is neither boolean nor of the query's dtype"
        if self.is_causal:
            return "attn_mask is given beside is_causal"
        if mask.dim() < query.dim() - 2:
            return "an attn_mask of fewer than 2 dimensions"  # which PyTorch's kernels may refuse
        if not broadcasts(mask.shape, (*query.shape[:-1], key.shape[-2])):
            return "an attn_mask that does not broadcast to the scores"
        return "attn_mask on another device" if mask.device != query.device else None

    def run(self) -> Tensor:
        mask = self.attn_mask
        is_bool = mask is not None and mask.dtype == torch.bool
        return flash_attention(  # of (B, N, D), the batch is in the place of the heads
            self.query, self.key, self.value, causal="top-left" if self.is_causal else False,
            scale=self.scale, mask=mask if is_bool else None, bias=None if is_bool else mask,
            layout="bhsd",
        )  # fmt: skip
