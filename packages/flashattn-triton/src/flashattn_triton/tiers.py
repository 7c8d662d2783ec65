"""From a problem and its plan to what launches kernels: each tier has one way in.

Launchers are made once for each kind of tensors (:class:`flashattn_triton.op.CachedCall`) and hold
no tensors. They take and return tensors in the layout of the problem. Those of the GPU tiers pass
addresses on, so that no layout costs views; the tiled computation looks at (B, H, N, D) views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from flashattn_triton.dispatch import Plan
from flashattn_triton.launch import Packing, empty_result, empty_row_statistic, unit_last_stride
from flashattn_triton.logsumexp import sinks_gradient
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias, parts_of_batch
from flashattn_triton.problem import MAX_HEAD_DIM_BACKWARD, Problem, heads_first

# (query, key, value, packing=None, mask_and_bias=...) to output and logsumexp.
ForwardLauncher = Callable[..., tuple[Tensor, Tensor]]
# (query, key, value, out, logsumexp, grad_out, grad_logsumexp, packing=None, mask_and_bias=...) to
# gradients.
BackwardLauncher = Callable[..., tuple[Tensor | None, ...]]
# The gradients that are wanted: of query, key and value; of the bias; of the sinks.
Needs = tuple[bool, bool, bool]

_Results = TypeVar("_Results")
# Where a backward pass takes tensors of rows: query, key, value, out and grad_out.
_ROWS_OF_BACKWARD = (0, 1, 2, 3, 5)


def forward_launcher(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, plan: Plan,
    packing: Packing | None, mask_and_bias: MaskAndBias,
) -> ForwardLauncher:  # fmt: skip
    """What launches the forward pass of such tensors by the tier of ``plan``."""
    tensors = (query, key, value)
    if plan.tier == "hopper":
        from flashattn_triton.hopper.forward import hopper_forward_call

        q, k, v = _views(tensors, problem)
        return hopper_forward_call(q, k, v, problem, packing, mask_and_bias.sinks)
    if plan.tiling is None:
        return functools.partial(_tiled_forward, problem)
    from flashattn_triton.portable.forward import forward_call

    q, k, v = _views([unit_last_stride(x) for x in tensors], problem)
    call = forward_call(q, k, v, problem, plan.tiling.forward, packing, mask_and_bias)
    return _on_copies(call, tensors, (0, 1, 2))


def gradients_launcher(
    tensors: Sequence[Tensor | None], problem: Problem, plan: Plan, packing: Packing | None,
    mask_and_bias: MaskAndBias, needs: Needs, into: Sequence[Tensor] = (),
) -> BackwardLauncher:  # fmt: skip
    """What launches the backward passes of such tensors by the tier of ``plan``.

    ``tensors``: query, key, value, out, logsumexp, and the gradients of the last two, of which that
    of the logsumexp may be None. ``into``: fp32 tensors with the strides of those that dQ, dK and
    dV are added to, which are the launcher's last argument then; or nothing. The launcher returns
    dQ, dK and dV, and the gradients of bias and sinks, if one of them is wanted: None for those
    that are not.
    """
    main = of_bias = of_sinks = None
    if needs[0]:
        main = _backward_launcher(tensors, problem, plan, packing, mask_and_bias, into)
        if not needs[1] and not needs[2]:
            return main
    if needs[1]:
        of_bias = _bias_launcher(tensors, problem, plan, mask_and_bias)
    if needs[2]:
        of_sinks = _sinks_launcher(mask_and_bias.sinks, tensors, problem)

    def launch(*given: Any) -> tuple[Tensor | None, ...]:
        *tensors, _, mask_and_bias = given
        gradients = (None, None, None) if main is None else main(*given)
        dbias = None if of_bias is None else of_bias(*tensors, mask_and_bias)
        dsinks = None if of_sinks is None else of_sinks(mask_and_bias.sinks, *tensors[3:])
        return *gradients, dbias, dsinks

    return launch


def _backward_launcher(
    tensors: Sequence[Tensor | None], problem: Problem, plan: Plan, packing: Packing | None,
    mask_and_bias: MaskAndBias, into: Sequence[Tensor],
) -> BackwardLauncher:  # fmt: skip
    grad_lse = tensors[6]
    rows = [x for i in _ROWS_OF_BACKWARD if (x := tensors[i]) is not None]
    dl, sums = _rows_view(grad_lse, problem), _views(into, problem)
    if plan.runs_hopper_backward(problem):
        from flashattn_triton.hopper.backward import can_add, hopper_backward_call

        views = _views(rows, problem)
        if not into or can_add((views[0].shape[3], views[2].shape[3]), sums):
            return hopper_backward_call(views, dl, problem, packing, sums)
    if plan.tiling is None or rows[0].shape[-1] > MAX_HEAD_DIM_BACKWARD:
        return functools.partial(_tiled_backward, problem)
    from flashattn_triton.portable.backward import backward_call

    q, k, v, o, do = _views([unit_last_stride(x) for x in rows], problem)
    call = backward_call(q, k, v, o, do, dl, problem, plan.tiling, packing, mask_and_bias, sums)
    return _on_copies(call, tensors, _ROWS_OF_BACKWARD)


def _bias_launcher(
    tensors: Sequence[Tensor | None], problem: Problem, plan: Plan, mask_and_bias: MaskAndBias
) -> Callable[..., Tensor]:
    """What computes the gradient of the bias, given what a backward pass takes but for packing."""
    query = tensors[0]
    if plan.tiling is None or (query is not None and query.shape[-1] > MAX_HEAD_DIM_BACKWARD):
        from flashattn_triton.tiled import tiled_bias_backward

        def launch(*given: Any) -> Tensor:
            *tensors, grad_lse, mask_and_bias = given
            q, k, v, out, lse, grad_out = tensors
            q, k, v, out, grad_out = _views((q, k, v, out, grad_out), problem)
            return tiled_bias_backward(
                q, k, v, out, lse, grad_out, grad_lse, problem, mask_and_bias
            )

        return launch
    from flashattn_triton.portable.bias_pass import bias_call

    rows = [unit_last_stride(x) for i in _ROWS_OF_BACKWARD if (x := tensors[i]) is not None]
    q, k, v, o, do = _views(rows, problem)
    call = bias_call(q, k, v, o, do, tensors[6], problem, plan.tiling, mask_and_bias)
    return _on_copies(call, tensors, _ROWS_OF_BACKWARD)


def _sinks_launcher(
    sinks: Tensor | None, tensors: Sequence[Tensor | None], problem: Problem
) -> Callable[..., Tensor]:
    """What computes the gradient of the sinks: (sinks, out, logsumexp, dO, dL) to dsinks."""
    _, _, _, out, _, grad_out, grad_lse = tensors
    assert out is not None
    assert grad_out is not None
    if not out.is_cuda or out.numel() == 0:

        def launch(
            sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
        ) -> Tensor:
            out, grad_out = _views((out, grad_out), problem)
            return sinks_gradient(sinks, out, lse, grad_out, grad_lse)

        return launch
    from flashattn_triton.portable.sinks_pass import sinks_call

    o, do = _views([unit_last_stride(x) for x in (out, grad_out)], problem)
    assert sinks is not None
    call = sinks_call(sinks, o, do, _rows_view(grad_lse, problem))
    return _on_copies(call, (None, out, None, grad_out), (1, 3))


def _views(tensors: Sequence[Tensor], problem: Problem) -> list[Tensor]:
    return [heads_first(x, problem.layout) for x in tensors]


def _rows_view(x: Tensor | None, problem: Problem) -> Tensor | None:
    """The gradient of a logsumexp as (B, H, N)."""
    return x.unsqueeze(0) if x is not None and problem.packed else x


def _on_copies(
    call: Callable[..., _Results], tensors: Sequence[Tensor | None], rows: Sequence[int]
) -> Callable[..., _Results]:
    """``call``, given copies of those tensors that it cannot read as they are, if there are any.

    Args:
        call: reads tensors whose last stride is 1.
        tensors: its arguments.
        rows: the positions among them where that matters.
    """
    if all((x := tensors[i]) is None or unit_last_stride(x) is x for i in rows):
        return call

    def launch(*given: Any) -> _Results:
        readable = list(given)
        for i in rows:
            readable[i] = unit_last_stride(given[i])
        return call(*readable)

    return launch


def _tiled_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flashattn_triton.tiled import tiled_forward

    q, k, v = _views((query, key, value), problem)
    out = empty_result(query, value.shape[-1], problem.layout, problem.out_dtype).zero_()
    lse = empty_row_statistic(q).fill_(float("-inf"))
    (o,) = _views((out,), problem)
    for rows, columns, tensors in parts_of_batch(*_starts(packing), mask_and_bias):
        part = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
        o[:, :, rows], lse[:, :, rows] = tiled_forward(*part, problem, tensors)
    # A Function refuses to have its output changed in place if that is a view.
    out = query.new_empty(0) if problem.largest_only else out.detach()
    return out, lse.squeeze(0).detach() if problem.packed else lse


def _tiled_backward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor, grad_logsumexp: Tensor | None, packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS, into: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    from flashattn_triton.tiled import tiled_backward

    inputs = (query, key, value)
    sums = into or [empty_result(x, x.shape[-1], problem.layout).zero_() for x in inputs]
    if into:  # gradients have the dtype of their inputs
        inputs = (query.float(), key.float(), value.float())
    q, k, v, o, do = _views((*inputs, out, grad_out), problem)
    lse, dl = _rows_view(logsumexp, problem), _rows_view(grad_logsumexp, problem)
    assert lse is not None
    for rows, columns, tensors in parts_of_batch(*_starts(packing), mask_and_bias):
        inputs = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
        results = (o[:, :, rows], lse[:, :, rows], do[:, :, rows])
        grad_lse = None if dl is None else dl[:, :, rows]
        gradients = tiled_backward(*inputs, *results, grad_lse, problem, tensors)
        spans = (rows, columns, columns)
        for total, part, span in zip(_views(sums, problem), gradients, spans, strict=True):
            total[:, :, span] += part
    return tuple(x.detach() for x in sums)


def _starts(packing: Packing | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packing is None else packing[:2]
