"""The operators ``forward``, ``backward``, ``bias_backward`` and ``sinks_backward``.

In ``torch.ops.flashattn_triton``. They are what ``torch.compile``, autograd and ``torch.func`` see
of this package: opaque to the compiler, each with a fake implementation (shapes and strides) and a
derivative, the first two also with a batching rule.

Inputs are (B, H, N, D) views; a packed batch is (1, H, T, D) together with ``cu_seqlens``. Options
travel as plain numbers and strings, see :func:`operator_arguments`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn_triton.configs import Tiling
from flashattn_triton.dispatch import Plan, choose
from flashattn_triton.launch import (
    Packing,
    as_batch,
    as_tokens,
    empty_output,
    empty_row_statistic,
)
from flashattn_triton.logsumexp import add_sinks, sinks_gradient
from flashattn_triton.mask_and_bias import NAMES, NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.options import AttentionOptions, Causal

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


@functools.lru_cache(maxsize=1024)
def _options(
    causal: Causal,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    tiling: tuple[int, ...],
) -> tuple[AttentionOptions, Tiling | None]:
    options = AttentionOptions(
        causal=causal,
        scale=scale,
        window=(
            None if window_left < 0 else window_left,
            None if window_right < 0 else window_right,
        ),
        softcap=softcap or None,
        deterministic=deterministic,
    )
    return options, Tiling.unpack(tiling) if tiling else None


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    prefix_lengths: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: Causal,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    implementation: str,
    tiling: Sequence[int],
) -> tuple[AttentionOptions, Packing | None, Plan, MaskAndBias]:
    """The inverse of :func:`operator_arguments`, and which tier runs."""
    options, explicit = _options(
        causal, scale, window_left, window_right, softcap, deterministic, tuple(tiling)
    )
    packing = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packing = Packing(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    mask_and_bias = NO_MASK_OR_BIAS
    given = (alibi_slopes, bias, prefix_lengths, sinks)
    if any(x is not None for x in given):
        mask_and_bias = MaskAndBias(**dict(zip(NAMES, given, strict=True)))
    plan = choose(
        query,
        key,
        value,
        options,
        implementation=implementation,
        tiling=explicit,
        tensors=mask_and_bias.names,
    )
    return options, packing, plan, mask_and_bias


def forward(query: Tensor, key: Tensor, value: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    """Output (B, H, N_q, E) and logsumexp (B, H, N_q) fp32, by the tier that ``choose`` names."""
    return run_forward(query, key, value, *_problem(query, key, value, *problem))


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    packing: Packing | None,
    plan: Plan,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor]:
    """:func:`forward` by the tier of ``plan``."""
    if plan.tier == "hopper":
        from flashattn_triton.hopper.forward import hopper_forward

        return hopper_forward(query, key, value, options, packing, mask_and_bias.sinks)
    if plan.tiling is not None:
        from flashattn_triton.portable.forward import triton_forward

        tiles = plan.tiling.forward
        return triton_forward(query, key, value, options, tiles, packing, mask_and_bias)
    from flashattn_triton.tiled import tiled_forward, tiled_forward_varlen

    if packing is None:
        out, lse = tiled_forward(query, key, value, options, mask_and_bias)
    else:
        starts = (packing.cu_seqlens_q, packing.cu_seqlens_k)
        q, k, v = (as_tokens(x) for x in (query, key, value))
        out, lse = tiled_forward_varlen(q, k, v, *starts, options, mask_and_bias)
        out, lse = as_batch(out), lse.unsqueeze(0)
    return _laid_out(out, query), lse


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
    tensors = (query, key, value, out, lse, grad_out, grad_lse)
    return run_backward(*tensors, *_problem(query, key, value, *problem))


def run_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    options: AttentionOptions,
    packing: Packing | None,
    plan: Plan,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`backward` by the tier of ``plan``."""
    lse = lse.contiguous()  # what was saved may come back with other strides
    if plan.runs_hopper_backward(options, packing is not None):
        from flashattn_triton.hopper.backward import hopper_backward

        tensors = (query, key, value, out, lse, grad_out, grad_lse)
        return hopper_backward(*tensors, options, packing)
    if plan.tiling is not None:
        from flashattn_triton.portable.backward import triton_backward

        tensors = (query, key, value, out, lse, grad_out, grad_lse)
        return triton_backward(*tensors, options, plan.tiling, packing, mask_and_bias)
    from flashattn_triton.tiled import tiled_backward, tiled_backward_varlen

    if packing is None:
        tensors = (query, key, value, out, lse, grad_out, grad_lse)
        dq, dk, dv = tiled_backward(*tensors, options, mask_and_bias)
    else:
        q, k, v, o, do = (as_tokens(x) for x in (query, key, value, out, grad_out))
        dl = None if grad_lse is None else grad_lse[0]
        starts = (packing.cu_seqlens_q, packing.cu_seqlens_k)
        gradients = tiled_backward_varlen(
            q, k, v, o, lse[0], do, dl, *starts, options, mask_and_bias
        )
        dq, dk, dv = (as_batch(x) for x in gradients)
    return _laid_out(dq, query), _laid_out(dk, key), _laid_out(dv, value)


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
    options, _, plan, mask_and_bias = _problem(query, key, value, *problem)
    if plan.tiling is not None:
        from flashattn_triton.portable.bias_pass import triton_bias_backward

        return triton_bias_backward(*tensors, options, plan.tiling, mask_and_bias)
    from flashattn_triton.tiled import tiled_bias_backward

    return tiled_bias_backward(*tensors, options, mask_and_bias)


def sinks_backward(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of the sinks of :func:`forward`, in their shape and dtype."""
    if not out.is_cuda:
        return sinks_gradient(sinks, out, lse, grad_out, grad_lse)
    from flashattn_triton.portable.sinks_pass import triton_sinks_backward

    return triton_sinks_backward(sinks, out, lse, grad_out, grad_lse)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the strides that the fake implementation promises."""
    promised = empty_output(like, x.shape[3])
    return x if x.stride() == promised.stride() else promised.copy_(x)


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
