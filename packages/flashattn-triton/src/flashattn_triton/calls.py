"""The cache between a call and its compiled kernels: one dictionary, looked up once a pass.

What runs follows from the shapes, strides, types and alignment of tensors, and from options. The
first call of a kind chooses the tier, lays out the kernels' arguments and stores what launches them
under a key; later calls look it up. The operators have keys of their own, calls in eager mode and
their backward passes others (see :mod:`flashattn_triton.eager`), all in the same dictionary.

It is emptied when it is full. Threads may share it: each reads or stores an entry by one operation,
and an entry that two of them make is equal. Devices are part of every key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from flashattn_triton.dispatch import Plan
from flashattn_triton.launch import (
    Packing,
    as_batch,
    as_tokens,
    dot_precision,
    empty_output,
    unit_last_stride,
)
from flashattn_triton.logsumexp import sinks_gradient
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.options import AttentionOptions

# What launches a forward pass: (query, key, value, packing=None, mask_and_bias=...) to output and
# logsumexp.
ForwardLauncher = Callable[..., tuple[Tensor, Tensor]]
# A backward pass: (query, key, value, out, logsumexp, grad_out, grad_logsumexp, packing=None,
# mask_and_bias=...) to dQ, dK and dV.
BackwardLauncher = Callable[..., tuple[Tensor, Tensor, Tensor]]

_Results = TypeVar("_Results")
# Where a backward pass takes tensors of rows: query, key, value, out and grad_out.
_ROWS_OF_BACKWARD = (0, 1, 2, 3, 5)
# The cache is emptied at this many keys: lengths that never repeat would otherwise fill memory.
_LIMIT = 4096

_launchers: dict[Hashable, Any] = {}


def found(cache_key: Hashable) -> Any | None:
    """What is stored under ``cache_key``, if anything is."""
    try:
        return _launchers.get(cache_key)
    except TypeError:  # an argument that cannot be hashed, valid or not
        return None


def store(cache_key: Hashable, launcher: Any) -> None:
    """Stores ``launcher``, which must hold no tensors, under ``cache_key``."""
    if len(_launchers) >= _LIMIT:
        _launchers.clear()
    with contextlib.suppress(TypeError):
        _launchers[cache_key] = launcher


def alignment(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The addresses' remainders by 16; nothing if all are multiples."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    if bits % 16 == 0:
        return ()
    return tuple([0 if x is None else x.data_ptr() % 16 for x in tensors])


def operator_key(
    operator: str, tensors: Sequence[Tensor | None], numbers: Sequence[Any]
) -> Hashable:
    """The key of an operator's call.

    Args:
        operator: its name.
        tensors: all of its arguments that are tensors, or None; the first is one.
        numbers: the others; the last is a list.
    """
    first = tensors[0]
    assert first is not None
    return (
        operator,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        alignment(tensors),
        dot_precision(first.dtype),
        *numbers[:-1],
        tuple(numbers[-1]),
    )


def forward_launcher(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    plan: Plan,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> ForwardLauncher:
    """What launches the forward pass of such inputs by the tier of ``plan``."""
    if plan.tier == "hopper":
        from flashattn_triton.hopper.forward import hopper_forward_call, no_scores

        if packing is not None and (query.numel() == 0 or key.numel() == 0):
            return no_scores
        return hopper_forward_call(query, key, value, options, packing, mask_and_bias.sinks)
    if plan.tiling is None:
        return functools.partial(_tiled_forward, options)
    from flashattn_triton.portable.forward import forward_call

    tensors = (query, key, value)
    q, k, v = readable = with_unit_last_strides(*tensors)
    call = forward_call(q, k, v, options, plan.tiling.forward, packing, mask_and_bias)
    if all(x is y for x, y in zip(tensors, readable, strict=True)):
        return call
    return _on_copies(call, (0, 1, 2))


def backward_launcher(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    plan: Plan,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> BackwardLauncher:
    """What launches the backward pass of such inputs by the tier of ``plan``.

    Tensors that its kernels cannot read as they are will be copied at each call.
    """
    tensors = (query, key, value, out, grad_out)
    if plan.runs_hopper_backward(options):
        from flashattn_triton.hopper.backward import hopper_backward_call, no_gradients

        if query.numel() == 0 or key.numel() == 0:  # which no descriptor can express
            return no_gradients
        return hopper_backward_call(tensors, grad_logsumexp, options, packing)
    if plan.tiling is None:
        return functools.partial(_tiled_backward, options)
    from flashattn_triton.portable.backward import backward_call

    q, k, v, o, do = readable = with_unit_last_strides(*tensors)
    call = backward_call(
        q, k, v, o, do, grad_logsumexp, options, plan.tiling, packing, mask_and_bias
    )
    if all(x is y for x, y in zip(tensors, readable, strict=True)):
        return call
    return _on_copies(call, _ROWS_OF_BACKWARD)


def forward_of_tokens(launcher: ForwardLauncher) -> ForwardLauncher:
    """``launcher``, but given (T, H, D) tensors, and with results (T, H, E) and (H, T)."""
    of_tokens: Callable[[], ForwardLauncher] | None = getattr(launcher, "of_tokens", None)
    if of_tokens is not None:  # without views, each of which costs what an allocation does
        return of_tokens()

    def launch(
        query: Tensor, key: Tensor, value: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        out, lse = launcher(as_batch(query), as_batch(key), as_batch(value), packing)
        # A Function refuses to have its output changed in place if that is a view.
        return as_tokens(out).detach(), lse.squeeze(0).detach()

    return launch


def backward_of_tokens(launcher: BackwardLauncher) -> BackwardLauncher:
    """``launcher``, but given and returning (T, H, D) tensors; of the logsumexps (H, T)."""
    of_tokens: Callable[[], BackwardLauncher] | None = getattr(launcher, "of_tokens", None)
    if of_tokens is not None:
        return of_tokens()

    def launch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor,
        grad_logsumexp: Tensor | None,
        packing: Packing,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = launcher(
            *(as_batch(x) for x in (query, key, value, out)),
            logsumexp.unsqueeze(0),
            as_batch(grad_out),
            None if grad_logsumexp is None else grad_logsumexp.unsqueeze(0),
            packing,
        )
        return as_tokens(dq), as_tokens(dk), as_tokens(dv)

    return launch


def bias_launcher(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    plan: Plan,
    mask_and_bias: MaskAndBias,
) -> Callable[..., Tensor]:
    """What computes the gradient of the bias, given what a backward pass takes but for packing."""
    if plan.tiling is None:
        from flashattn_triton.tiled import tiled_bias_backward

        compute: Callable[..., Tensor] = tiled_bias_backward
        return lambda *given: compute(*given[:-1], options, given[-1])
    from flashattn_triton.portable.bias_pass import bias_call

    q, k, v, o, do = with_unit_last_strides(query, key, value, out, grad_out)
    call = bias_call(q, k, v, o, do, grad_logsumexp, options, plan.tiling, mask_and_bias)
    return _on_copies(call, _ROWS_OF_BACKWARD)


def sinks_launcher(
    out: Tensor, grad_out: Tensor, grad_logsumexp: Tensor | None
) -> Callable[..., Tensor]:
    """What computes the gradient of the sinks: (sinks, out, logsumexp, dO, dL) to dsinks."""
    if not out.is_cuda:
        return sinks_gradient
    from flashattn_triton.portable.sinks_pass import sinks_call

    call = sinks_call(unit_last_stride(out), unit_last_stride(grad_out), grad_logsumexp)
    return _on_copies(call, (1, 3))


def with_unit_last_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where elements of one row are not neighbours."""
    return tuple([unit_last_stride(x) for x in tensors])


def _on_copies(call: Callable[..., _Results], rows: Sequence[int]) -> Callable[..., _Results]:
    """``call``, given copies of those tensors that it cannot read as they are.

    Args:
        call: reads tensors whose last stride is 1.
        rows: the positions of these tensors among its arguments.
    """

    def launch(*given: Any) -> _Results:
        readable = list(given)
        for i in rows:
            readable[i] = unit_last_stride(given[i])
        return call(*readable)

    return launch


def _tiled_forward(
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor]:
    from flashattn_triton.tiled import tiled_forward, tiled_forward_varlen

    if packing is None:
        out, lse = tiled_forward(query, key, value, options, mask_and_bias)
    else:
        starts = (packing.cu_seqlens_q, packing.cu_seqlens_k)
        q, k, v = (as_tokens(x) for x in (query, key, value))
        out, lse = tiled_forward_varlen(q, k, v, *starts, options, mask_and_bias)
        out, lse = as_batch(out), lse.unsqueeze(0)
    return _laid_out(out, query), lse


def _tiled_backward(
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    from flashattn_triton.tiled import tiled_backward, tiled_backward_varlen

    if packing is None:
        tensors = (query, key, value, out, logsumexp, grad_out, grad_logsumexp)
        dq, dk, dv = tiled_backward(*tensors, options, mask_and_bias)
    else:
        q, k, v, o, do = (as_tokens(x) for x in (query, key, value, out, grad_out))
        dl = None if grad_logsumexp is None else grad_logsumexp[0]
        starts = (packing.cu_seqlens_q, packing.cu_seqlens_k)
        gradients = tiled_backward_varlen(
            q, k, v, o, logsumexp[0], do, dl, *starts, options, mask_and_bias
        )
        dq, dk, dv = (as_batch(x) for x in gradients)
    return _laid_out(dq, query), _laid_out(dk, key), _laid_out(dv, value)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the strides that the operators' fake implementations promise."""
    promised = empty_output(like, x.shape[3])
    return x if x.stride() == promised.stride() else promised.copy_(x)
