"""The operators ``forward``, ``backward``, ``bias_backward`` and ``sinks_backward``.

In ``torch.ops.flashattn_triton``. They are what ``torch.compile``, autograd and ``torch.func`` see
of this package: opaque to the compiler, each with a fake implementation (shapes and strides) and a
derivative, the first two also with a batching rule.

Inputs are (B, H, N, D) views; a packed batch is (1, H, T, D) together with ``cu_seqlens``. Options
travel as plain numbers and strings, see :func:`operator_arguments`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn_triton.calls import (
    backward_launcher,
    bias_launcher,
    forward_launcher,
    found,
    operator_key,
    sinks_launcher,
    store,
)
from flashattn_triton.configs import Tiling
from flashattn_triton.dispatch import Plan, choose
from flashattn_triton.launch import Packing, empty_output, empty_row_statistic
from flashattn_triton.logsumexp import add_sinks, sinks_gradient
from flashattn_triton.mask_and_bias import NAMES, NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.options import AttentionOptions

_PROBLEM = (
    "Tensor? alibi_slopes, Tensor? bias, Tensor? prefix_lengths, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "str causal, float scale, SymInt window_left, SymInt window_right, float softcap, "
    "bool deterministic, str implementation, int[] tiling"
)
_INPUTS = "Tensor query, Tensor key, Tensor value"
_RESULTS = "Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse"

_LIBRARY = torch.library.Library("flashattn_triton", "DEF")
_LIBRARY.define(f"forward({_INPUTS}, {_PROBLEM}) -> (Tensor, Tensor)")
_LIBRARY.define(f"backward({_INPUTS}, {_RESULTS}, {_PROBLEM}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"bias_backward({_INPUTS}, {_RESULTS}, {_PROBLEM}) -> Tensor")
_LIBRARY.define(f"sinks_backward(Tensor sinks, {_RESULTS}) -> Tensor")

FORWARD = torch.ops.flashattn_triton.forward.default
_BACKWARD = torch.ops.flashattn_triton.backward.default
_BIAS_BACKWARD = torch.ops.flashattn_triton.bias_backward.default
_SINKS_BACKWARD = torch.ops.flashattn_triton.sinks_backward.default
# Tensors of a problem: slopes, bias, prefixes, sinks, and starts of queries and keys of sequences.
PROBLEM_TENSORS = 6
BIAS = 4  # its position among the arguments of ``forward``
SINKS = 6


def operator_arguments(
    options: AttentionOptions,
    *,
    implementation: str = "auto",
    tiling: Tiling | None = None,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Any, ...]:
    """Everything after query, key, value and the results, in the operators' order.

    No limit of a window is -1, no soft-cap is 0, no explicit tiling is an empty list.
    """
    left, right = options.window
    starts: tuple[Any, ...] = (None, None, 0, 0)
    if packing is not None:
        starts = (
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            packing.max_seqlen_q,
            packing.max_seqlen_k,
        )
    return (
        *mask_and_bias.tensors,
        *starts,
        options.causal,
        options.scale,
        -1 if left is None else left,
        -1 if right is None else right,
        0.0 if options.softcap is None else options.softcap,
        options.deterministic,
        implementation,
        [] if tiling is None else tiling.pack(),
    )


def _plan(
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    mask_and_bias: MaskAndBias,
) -> tuple[AttentionOptions, Plan]:
    """Options and tier of an operator's call.

    Args:
        tensors: query, key and value.
        numbers: what follows the tensors of :func:`operator_arguments`, of which this is the
            inverse.
        mask_and_bias: of those tensors.
    """
    _, _, causal, scale, left, right, softcap, deterministic, implementation, tiling = numbers
    options = AttentionOptions(
        causal=causal,
        scale=scale,
        window=(None if left < 0 else left, None if right < 0 else right),
        softcap=softcap or None,
        deterministic=deterministic,
    )
    query, key, value, *_ = tensors
    plan = choose(
        query,
        key,
        value,
        options,
        implementation=implementation,
        tiling=Tiling.unpack(tuple(tiling)) if tiling else None,
        tensors=mask_and_bias.names,
    )
    return options, plan


def _problem(problem: Sequence[Any]) -> tuple[Packing | None, MaskAndBias, Sequence[Any]]:
    """What :func:`operator_arguments` made, apart: packed batch, mask and bias, and numbers."""
    numbers = problem[PROBLEM_TENSORS:]
    cu_seqlens_q, cu_seqlens_k = problem[PROBLEM_TENSORS - 2 : PROBLEM_TENSORS]
    packing = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packing = Packing(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=numbers[0],
            max_seqlen_k=numbers[1],
        )
    mask_and_bias, given = NO_MASK_OR_BIAS, problem[: len(NAMES)]
    if any(x is not None for x in given):
        mask_and_bias = MaskAndBias(**dict(zip(NAMES, given, strict=True)))
    return packing, mask_and_bias, numbers


def _cache_key(
    operator: str, tensors: Sequence[Tensor | None], problem: Sequence[Any], packing: Packing | None
) -> Hashable:
    """``tensors``: those before the ``problem``. Whether a packed batch's sequences have as many
    keys as queries decides, too, what is launched."""
    equal = packing is not None and packing.has_equal_lengths
    given, numbers = problem[:PROBLEM_TENSORS], problem[PROBLEM_TENSORS:]
    return operator_key(operator, (*tensors, *given), (equal, *numbers))


def forward(query: Tensor, key: Tensor, value: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    """Output (B, H, N_q, E) and logsumexp (B, H, N_q) fp32, by the tier that ``choose`` names."""
    tensors = (query, key, value)
    packing, mask_and_bias, numbers = _problem(problem)
    cache_key = _cache_key("forward", tensors, problem, packing)
    launcher = found(cache_key)
    if launcher is None:
        options, plan = _plan(tensors, numbers, mask_and_bias)
        launcher = forward_launcher(*tensors, options, plan, packing, mask_and_bias)
        store(cache_key, launcher)
    out, lse = launcher(*tensors, packing, mask_and_bias)
    return out, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *problem: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of :func:`forward`."""
    lse = lse.contiguous()  # what was saved may come back with other strides
    tensors = (query, key, value, out, lse, grad_out, grad_lse)
    packing, mask_and_bias, numbers = _problem(problem)
    cache_key = _cache_key("backward", tensors, problem, packing)
    launcher = found(cache_key)
    if launcher is None:
        options, plan = _plan((query, key, value), numbers, mask_and_bias)
        launcher = backward_launcher(
            query, key, value, out, grad_out, grad_lse, options, plan, packing, mask_and_bias
        )
        store(cache_key, launcher)
    dq, dk, dv = launcher(*tensors, packing, mask_and_bias)
    return dq, dk, dv


def bias_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *problem: Any,
) -> Tensor:
    """The gradient of the bias of :func:`forward`, in its shape and dtype."""
    tensors = (query, key, value, out, lse.contiguous(), grad_out, grad_lse)
    _, mask_and_bias, numbers = _problem(problem)
    cache_key = _cache_key("bias_backward", tensors, problem, None)
    launcher = found(cache_key)
    if launcher is None:
        options, plan = _plan((query, key, value), numbers, mask_and_bias)
        launcher = bias_launcher(
            query, key, value, out, grad_out, grad_lse, options, plan, mask_and_bias
        )
        store(cache_key, launcher)
    gradient: Tensor = launcher(*tensors, mask_and_bias)
    return gradient


def sinks_backward(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of the sinks of :func:`forward`, in their shape and dtype."""
    tensors = (out, sinks, lse.contiguous(), grad_out, grad_lse)
    cache_key = operator_key("sinks_backward", tensors, [[]])
    launcher = found(cache_key)
    if launcher is None:
        launcher = sinks_launcher(out, grad_out, grad_lse)
        store(cache_key, launcher)
    gradient: Tensor = launcher(sinks, out, *tensors[2:])
    return gradient


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *problem: Any
) -> tuple[Tensor, Tensor]:
    return empty_output(query, value.shape[3]), empty_row_statistic(query)


def _backward_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_output(x, x.shape[3]) for x in (query, key, value))
    return dq, dk, dv


def _bias_backward_fake(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor, *problem: Any,
) -> Tensor:  # fmt: skip
    return bias.new_empty(bias.shape)


def _sinks_backward_fake(sinks: Tensor, *results: Tensor | None) -> Tensor:
    return sinks.new_empty(sinks.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.problem = inputs[: 3 + PROBLEM_TENSORS], inputs[3 + PROBLEM_TENSORS :]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The registered derivative of the operator ``forward``."""
    gradients = gradients_of(
        ctx.saved_tensors, grad_out, grad_lse, ctx.problem, ctx.needs_input_grad
    )
    return (*gradients, *[None] * len(ctx.problem))


def gradients_of(
    saved: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    problem: Sequence[Any],
    needed: Sequence[bool],
    backward: Callable[..., Any] = _BACKWARD,
    bias_backward: Callable[..., Any] = _BIAS_BACKWARD,
    sinks_backward: Callable[..., Any] = _SINKS_BACKWARD,
) -> list[Tensor | None]:
    """Gradients of the tensors that the operator ``forward`` takes; None where none is needed.

    Args:
        saved: query, key, value, output, logsumexp, and the tensors of the problem, if any.
        grad_out: of the output; ``grad_lse`` of the logsumexp; None stands for zeros.
        problem: what the operator takes after those tensors.
        needed: which of its arguments need a gradient.
        backward: and ``bias_backward``, ``sinks_backward``: the operators, or what replaces them.
    """
    query, key, value, out, lse, *rest = saved
    gradients: list[Tensor | None] = [None] * (3 + len(rest))
    if grad_out is None and grad_lse is None:
        return gradients
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    arguments = (query, key, value, out, lse, grad_out, grad_lse, *rest, *problem)
    if any(needed[:3]):
        gradients[:3] = backward(*arguments)
    if rest and needed[BIAS]:
        gradients[BIAS] = bias_backward(*arguments)
    if rest and needed[SINKS]:
        gradients[SINKS] = sinks_backward(rest[SINKS - 3], out, lse, grad_out, grad_lse)
    return gradients


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The second derivative is refused, so there is nothing to save."""


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "flash attention has first derivatives only, and the backward pass was differentiated; "
        "use implementation='reference' for higher derivatives"
    )


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Moves a batched dimension in front of the batch and merges the two."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap(operator: Any, n_tensors: int) -> Any:
    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        tensors, problem = args[:n_tensors], args[n_tensors:]
        sinks, sinks_dim = problem[SINKS - 3], in_dims[n_tensors + SINKS - 3]
        if sinks_dim is not None or n_tensors > 3:  # backward knows them by the logsumexp
            problem = (*problem[: SINKS - 3], None, *problem[SINKS - 2 :])
        if problem[4] is not None:
            raise ValueError(
                "vmap over packed sequences is not supported: add the sequences to cu_seqlens"
            )
        for name, x in zip(NAMES, problem[:3], strict=False):
            if x is not None:
                raise ValueError(
                    f"{name} must be None under torch.func.vmap, but got one. Make the mapped "
                    f"dimension a part of the batch."
                )
        size = info.batch_size
        folded = (_fold(x, d, size) for x, d in zip(tensors, in_dims, strict=False))
        results = operator(*folded, *problem)
        results = tuple(x.unflatten(0, (size, -1)) for x in results)
        if sinks_dim is not None and n_tensors == 3:
            out, lse = results
            results = add_sinks(out, lse, sinks.movedim(sinks_dim, 0)[:, None], "bhsd")
        return results, (0,) * len(results)

    return batched


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raises ``RuntimeError`` for dual tensors, whose tangents kernels would silently drop."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "flash attention has no forward-mode derivative, and a dual tensor was given; "
            "use torch.func.grad or backward(), or implementation='reference'"
        )


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is being applied."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Transformed(torch.autograd.Function):
    """An operator as ``torch.func`` takes it: ``Transformed.apply(operator, *arguments)``.

    Transforms do not see what is registered with an operator. Only ``forward`` has a derivative,
    which calls the other two in this way too.
    """

    @staticmethod
    def forward(operator: Callable[..., Any], *arguments: Any) -> Any:
        """What the operator returns."""
        return operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the derivative of ``forward`` needs."""
        ctx.operator, *arguments = inputs
        if ctx.operator is FORWARD:
            _save_for_backward(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The derivative of ``forward``; the other operators have none."""
        if ctx.operator is not FORWARD:
            _refuse_second_derivative(ctx)
        grad_out, grad_lse = grads
        gradients = gradients_of(
            ctx.saved_tensors,
            grad_out,
            grad_lse,
            problem=ctx.problem,
            needed=ctx.needs_input_grad[1:],
            backward=functools.partial(Transformed.apply, _BACKWARD),
            bias_backward=functools.partial(Transformed.apply, _BIAS_BACKWARD),
            sinks_backward=sinks_gradient,
        )
        return (None, *gradients, *[None] * len(ctx.problem))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], operator: Callable[..., Any], *args: Any
    ) -> tuple[Any, Any]:
        """Folds the mapped dimension into the batch."""
        n_tensors = 3 if operator is FORWARD else 7
        again = functools.partial(Transformed.apply, operator)
        batched: tuple[Any, Any] = _vmap(again, n_tensors)(info, in_dims[1:], *args)
        return batched


_LIBRARY.impl("forward", forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashattn_triton::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("flashattn_triton::backward", _backward_fake, lib=_LIBRARY)
_LIBRARY.impl("bias_backward", bias_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashattn_triton::bias_backward", _bias_backward_fake, lib=_LIBRARY)
_LIBRARY.impl("sinks_backward", sinks_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashattn_triton::sinks_backward", _sinks_backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "flashattn_triton::forward", _differentiate, setup_context=_save_for_backward, lib=_LIBRARY
)
for _name in ("backward", "bias_backward", "sinks_backward"):
    torch.library.register_autograd(
        f"flashattn_triton::{_name}",
        _refuse_second_derivative,
        setup_context=_save_nothing,
        lib=_LIBRARY,
    )
torch.library.register_vmap("flashattn_triton::forward", _vmap(FORWARD, 3), lib=_LIBRARY)
torch.library.register_vmap("flashattn_triton::backward", _vmap(_BACKWARD, 7), lib=_LIBRARY)
