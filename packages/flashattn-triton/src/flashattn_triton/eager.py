"""Calls in eager mode, found again by shapes, strides, types and options.

Checking arguments, normalising options, choosing a tier and passing through PyTorch's dispatcher
take the host longer than a small problem takes a GPU, and have the same results for all calls with
equal shapes, strides, types and options. The first such call stores them in the cache of
:mod:`flashattn_triton.calls`, and later calls look them up.

Tensor subclasses, transforms, compilers and dispatch modes must see the operators themselves: such
calls are left to :mod:`flashattn_triton.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_triton import ops
from flashattn_triton.calls import (
    BackwardLauncher,
    alignment,
    backward_launcher,
    backward_of_tokens,
    forward_launcher,
    forward_of_tokens,
    found,
    store,
)
from flashattn_triton.configs import Tiling
from flashattn_triton.dispatch import choose
from flashattn_triton.launch import Packing, as_batch, as_tokens, dot_precision
from flashattn_triton.options import AttentionOptions

_PLAIN = (Tensor, torch.nn.Parameter)


class CachedCall:
    """What is worked out once for all inputs with one cache key: the tier, its launcher, options.

    Inputs are (B, H, N, D), or (T, H, D) of a packed batch, whose calls also bring ``cu_seqlens``
    of queries and keys. Launchers of the backward pass depend on the gradient's strides too, so
    they have keys of their own in the cache.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        implementation: str,
        tiling: Tiling | None,
        packing: Packing | None = None,
    ) -> None:
        """Chooses the tier; ``packing``: of the packed batch that is the first one of its kind."""
        batch = (query, key, value)
        if packing is not None:
            batch = (as_batch(query), as_batch(key), as_batch(value))
        plan = choose(*batch, options, implementation=implementation, tiling=tiling)
        self.options, self.plan = options, plan
        self.problem = ops.operator_arguments(
            options, implementation=implementation, tiling=tiling, packing=packing
        )[ops.PROBLEM_TENSORS :]
        launcher = forward_launcher(*batch, options, plan, packing)
        self.longest: tuple[int, int] | None = None
        # Given Q, K, V, and ``cu_seqlens`` of a packed batch: output and logsumexp.
        self.forward: Callable[..., tuple[Tensor, Tensor]] = launcher
        if packing is not None:
            self.longest = (packing.max_seqlen_q, packing.max_seqlen_k)
            self.launch_packed = forward_of_tokens(launcher)
            self.forward = self.forward_packed

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output (T_q, H, E) and logsumexp (H, T_q)."""
        assert self.longest is not None
        starts_q, starts_k = cu_seqlens
        packing = Packing(starts_q, starts_k, *self.longest)
        return self.launch_packed(query, key, value, packing)

    def operator_gradients(
        self,
        saved: Sequence[Tensor],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """dQ, dK and dV by the operators; None where none is ``needed``.

        Args:
            saved: query, key, value, output, logsumexp, and ``cu_seqlens`` of a packed batch.
            grad_out: of the output; ``grad_lse`` of the logsumexp; None stands for zeros.
            needed: whether Q, K and V need a gradient.
        """
        *tensors, lse = saved[:5]
        # There are no slopes, bias, prefixes and sinks.
        rest: list[Any] = [None, None, None, None, *(saved[5:] or (None, None))]
        if self.longest is not None:
            tensors, lse = [as_batch(x) for x in tensors], lse.unsqueeze(0)
            grad_out = None if grad_out is None else as_batch(grad_out)
            grad_lse = None if grad_lse is None else grad_lse.unsqueeze(0)
        gradients = ops.gradients_of(
            [*tensors, lse, *rest],
            grad_out,
            grad_lse,
            self.problem,
            (*needed, *[False] * ops.PROBLEM_TENSORS),
        )[:3]
        if self.longest is None:
            return gradients
        return [None if x is None else as_tokens(x) for x in gradients]

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV in the shapes of Q, K and V."""
        lse = lse.contiguous()  # what was saved may come back with other strides
        cache_key = (
            self,
            query.stride(),
            key.stride(),
            value.stride(),
            out.stride(),
            grad_out.stride(),
            None if grad_lse is None else grad_lse.stride(),
            alignment((query, key, value, out, lse, grad_out, grad_lse, *cu_seqlens)),
            dot_precision(query.dtype),
        )
        launcher: BackwardLauncher | None = found(cache_key)
        if launcher is None:
            launcher = self._backward_launcher(
                query, key, value, out, grad_out, grad_lse, *cu_seqlens
            )
            store(cache_key, launcher)
        if self.longest is None:
            return launcher(query, key, value, out, lse, grad_out, grad_lse)
        starts_q, starts_k = cu_seqlens
        packing = Packing(starts_q, starts_k, *self.longest)
        return launcher(query, key, value, out, lse, grad_out, grad_lse, packing)

    def _backward_launcher(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *cu_seqlens: Tensor,
    ) -> BackwardLauncher:
        """What launches the backward pass of such tensors."""
        if self.longest is None:
            return backward_launcher(
                query, key, value, out, grad_out, grad_lse, self.options, self.plan
            )
        starts_q, starts_k = cu_seqlens
        launcher = backward_launcher(
            as_batch(query),
            as_batch(key),
            as_batch(value),
            as_batch(out),
            as_batch(grad_out),
            None if grad_lse is None else grad_lse.unsqueeze(0),
            self.options,
            self.plan,
            Packing(starts_q, starts_k, *self.longest),
        )
        return backward_of_tokens(launcher)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, return_lse: bool, *cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, N_q, E), and logsumexp (B, H, N_q), which may be None if not asked for.

        Of a packed batch, (T_q, H, E) and (H, T_q).
        """
        ops.refuse_forward_mode(query, key, value)
        differentiated = query.requires_grad or key.requires_grad or value.requires_grad
        if not differentiated or not torch.is_grad_enabled():
            return self.forward(query, key, value, *cu_seqlens)
        if return_lse:
            out, lse = _apply(self, True, query, key, value, *cu_seqlens)
            return out, lse
        return _apply(self, False, query, key, value, *cu_seqlens), None


class _Attention(torch.autograd.Function):
    """The derivative of attention in eager mode: of a cached call, or of the operators.

    The bookkeeping of a derivative registered with ``torch.library`` takes the host longer than a
    small problem takes the GPU. ``call`` is a :class:`CachedCall` of Q, K, V and ``cu_seqlens``, or
    the arguments that follow the operator's tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: CachedCall | tuple[Any, ...],
        return_lse: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Tensor | None,
    ) -> Any:
        if isinstance(call, tuple):
            out, lse = ops.FORWARD(query, key, value, *others, *call)
        else:
            out, lse = call.forward(query, key, value, *others)
        ctx.save_for_backward(query, key, value, out, lse, *others)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        if isinstance(call, tuple):
            needed = ctx.needs_input_grad[2:]
            return (None, None, *ops.gradients_of(saved, grad_out, grad_lse, call, needed))
        query, key, value, out, lse, *cu_seqlens = saved
        # With a graph of its own, the backward pass must say that it has no derivative.
        if torch.is_grad_enabled() or operators_are_watched():
            dq, dk, dv = call.operator_gradients(
                saved, grad_out, grad_lse, ctx.needs_input_grad[2:5]
            )
        elif grad_out is None and grad_lse is None:
            dq = dk = dv = None
        else:
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            dq, dk, dv = call.backward(query, key, value, out, lse, grad_out, grad_lse, *cu_seqlens)
        if not cu_seqlens:
            return None, None, dq, dk, dv
        return None, None, dq, dk, dv, None, None


# ``_Attention.apply`` without its loop over arguments, which looks for tensor wrappers left over
# from a ``torch.func`` transform that has already ended. Such wrappers have no address, so
# :func:`cache_key_of` returns None for them.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply


def attend(query: Tensor, key: Tensor, value: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    """Calls ``torch.ops.flashattn_triton.forward`` with its derivative.

    In eager mode this costs less than the operator's registered derivative. Inside ``torch.func``
    transforms it is the only way: they do not see what is registered with an operator.
    """
    ops.refuse_forward_mode(query, key, value)
    differentiated = query.requires_grad or key.requires_grad or value.requires_grad
    for x in (problem[ops.BIAS - 3], problem[ops.SINKS - 3]):
        differentiated = differentiated or (x is not None and x.requires_grad)
    compiling = torch.compiler.is_compiling()
    if not compiling and ops.is_transformed():
        out, lse = ops.Transformed.apply(ops.FORWARD, query, key, value, *problem)
    elif differentiated and torch.is_grad_enabled() and not compiling:
        tensors, rest = problem[: ops.PROBLEM_TENSORS], problem[ops.PROBLEM_TENSORS :]
        out, lse = _Attention.apply(rest, True, query, key, value, *tensors)
    else:
        out, lse = ops.FORWARD(query, key, value, *problem)
    return out, lse


def operators_are_watched() -> bool:
    """Whether a compiler, a transform or a mode is to see operators instead of their effects."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or ops.is_transformed()
    )


def cache_key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    cu_seqlens: tuple[Tensor, ...] = (),
) -> Hashable | None:
    """The key of a call in the cache, or None for calls that must run the registered operators.

    Equal values of unequal types (True and 1) are not equally valid, so types are part of the key.
    Two ``cu_seqlens`` at one address say that sequences have as many keys as queries.
    """
    if operators_are_watched():
        return None
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN:
        return None
    if query.is_meta:  # whose results are the shapes that the operators promise
        return None
    starts: tuple[Any, ...] = ()
    try:
        aligned = alignment((query, key, value, *cu_seqlens))
        if cu_seqlens:
            starts_q, starts_k = cu_seqlens
            if type(starts_q) not in _PLAIN or type(starts_k) not in _PLAIN:
                return None
            starts = (
                starts_q.shape,
                starts_k.shape,
                starts_q.stride(),
                starts_k.stride(),
                starts_q.dtype,
                starts_k.dtype,
                starts_q.device,
                starts_k.device,
                starts_q.data_ptr() == starts_k.data_ptr(),
            )
    except RuntimeError:  # no memory: wrappers left over from a transform that has ended
        return None
    types: tuple[Any, ...] = tuple(map(type, arguments))
    if tuple in types:
        types += tuple([tuple(map(type, x)) for x in arguments if type(x) is tuple])
    return (
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        aligned,
        dot_precision(query.dtype),
        arguments,
        types,
        starts,
    )
