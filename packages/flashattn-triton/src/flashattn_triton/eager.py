"""A cache of eager calls on dense batches, by shapes, strides, types and options.

Checking arguments, normalising options, choosing a tier and passing through PyTorch's dispatcher
take the host longer than a small problem takes a GPU, and have the same results for all calls with
equal shapes, strides, types and options. The first such call stores them under a key, and later
calls look them up.

Tensor subclasses, transforms, compilers and dispatch modes must see the operators themselves: such
calls are left to :mod:`flashattn_triton.ops`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flashattn_triton import ops
from flashattn_triton.configs import Tiling
from flashattn_triton.dispatch import choose
from flashattn_triton.launch import alignment, dot_precision
from flashattn_triton.options import AttentionOptions

_PLAIN = (Tensor, torch.nn.Parameter)
# The cache is emptied at this many keys: lengths that never repeat would otherwise fill memory.
_LIMIT = 4096

_calls: dict[Hashable, CachedCall] = {}


class CachedCall:
    """What is worked out once for all inputs with one cache key: the tier, its launchers, options.

    Inputs are (B, H, N, D).
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        implementation: str,
        tiling: Tiling | None,
    ) -> None:
        plan = choose(query, key, value, options, implementation=implementation, tiling=tiling)
        self.problem = ops.operator_arguments(options, implementation=implementation, tiling=tiling)
        self.forward: Callable[..., tuple[Tensor, Tensor]] = functools.partial(
            ops.run_forward, options=options, packing=None, plan=plan
        )
        self.backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = functools.partial(
            ops.run_backward, options=options, packing=None, plan=plan
        )
        if plan.tier == "hopper":
            from flashattn_triton.hopper.backward import RepeatedHopperBackward
            from flashattn_triton.hopper.forward import hopper_forward_call

            self.forward = hopper_forward_call(query, key, value, options)
            if not options.deterministic:
                self.backward = RepeatedHopperBackward(options)
        if plan.tier == "triton" and all(x.stride(-1) == 1 for x in (query, key, value)):
            from flashattn_triton.backward import RepeatedBackward
            from flashattn_triton.forward import forward_call

            assert plan.tiling is not None
            self.forward = forward_call(query, key, value, options, plan.tiling.forward)
            self.backward = RepeatedBackward(options, plan.tiling)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, N_q, E), and logsumexp (B, H, N_q), which may be None if not asked for."""
        ops.refuse_forward_mode(query, key, value)
        differentiated = query.requires_grad or key.requires_grad or value.requires_grad
        if not differentiated or not torch.is_grad_enabled():
            return self.forward(query, key, value)
        if return_lse:
            out, lse = _apply(self, True, query, key, value)
            return out, lse
        return _apply(self, False, query, key, value), None


class _Attention(torch.autograd.Function):
    """The derivative of attention in eager mode: of a cached call, or of the operators.

    The bookkeeping of a derivative registered with ``torch.library`` takes the host longer than a
    small problem takes the GPU. ``call`` is a :class:`CachedCall` of three tensors, or the
    arguments that follow the operator's tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, call: CachedCall | tuple[Any, ...], return_lse: bool, *tensors: Tensor | None
    ) -> Any:
        if isinstance(call, tuple):
            out, lse = ops.FORWARD(*tensors, *call)
        else:
            out, lse = call.forward(*tensors)
        ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:])
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        # With a graph of its own, the backward pass must say that it has no derivative.
        if isinstance(call, tuple) or torch.is_grad_enabled() or operators_are_watched():
            problem = call if isinstance(call, tuple) else call.problem
            needed = ctx.needs_input_grad[2:]
            return (None, None, *ops.gradients_of(saved, grad_out, grad_lse, problem, needed))
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        return (None, None, *call.backward(*saved, grad_out, grad_lse))


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


def cache_key_of(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Hashable | None:
    """The key of a call in the cache, or None for calls that must run the registered operators.

    Equal values of unequal types (True and 1) are not equally valid, so types are part of the key.
    """
    if operators_are_watched():
        return None
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN:
        return None
    try:
        aligned = alignment((query, key, value))
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
    )


def cached(cache_key: Hashable | None) -> CachedCall | None:
    """The call that is stored under ``cache_key``, if there is one."""
    try:
        return _calls.get(cache_key)
    except TypeError:  # an argument that cannot be hashed, valid or not
        return None


def store(cache_key: Hashable | None, call: CachedCall) -> None:
    """Stores ``call`` in the cache under ``cache_key``."""
    if len(_calls) >= _LIMIT:
        _calls.clear()
    with contextlib.suppress(TypeError):
        _calls[cache_key] = call
