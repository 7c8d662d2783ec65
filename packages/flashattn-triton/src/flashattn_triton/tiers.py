"""From a problem and its plan to what launches kernels: each tier has one way in.

Launchers are made once for each kind of tensors (:class:`flashattn_triton.op.CachedCall`) and hold
no tensors. They take and return tensors in the layout of the problem. Those of the GPU tiers pass
addresses on, so that no layout costs views; the tiled computation looks at (B, H, N, D) views.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from flashattn_triton.dispatch import Plan
from flashattn_triton.launch import (
    BackwardTensors,
    empty_result,
    empty_row_statistic,
    unit_last_stride,
)
from flashattn_triton.mask_and_bias import NOTHING, Given, parts_of_batch
from flashattn_triton.problem import MAX_HEAD_DIM_BACKWARD, Problem, as_given, heads_first
from flashattn_triton.tiled import sinks_gradient, tiled_backward, tiled_forward

# (query, key, value), given=NOTHING to output and logsumexp.
ForwardLauncher = Callable[..., tuple[Tensor, Tensor]]
# BackwardTensors, given=NOTHING, into=() to gradients.
BackwardLauncher = Callable[..., tuple[Tensor | None, ...]]
# The gradients that are wanted: of query, key and value; of the bias; of the sinks.
Needs = tuple[bool, bool, bool]

_Results = TypeVar("_Results")
# Where a pass takes tensors of rows: query, key, value, out and grad_out.
_ROWS = (0, 1, 2, 3, 5)


def forward_launcher(
    tensors: tuple[Tensor, Tensor, Tensor], problem: Problem, plan: Plan, given: Given
) -> ForwardLauncher:
    """What launches the forward pass of such tensors by the tier of ``plan``.

    ``tensors``: query, key and value. ``given``: normalised.
    """
    if plan.tier == "hopper":
        from flashattn_triton.hopper.forward import HopperForwardCall

        q, k, v = _views(tensors, problem)
        return HopperForwardCall(q, k, v, problem, given)
    if plan.tiling is None:
        return functools.partial(_tiled_forward, problem)
    from flashattn_triton.portable.forward import ForwardCall

    q, k, v = _views(readable(tensors), problem)
    call = ForwardCall(q, k, v, problem, plan.tiling.forward, given)
    return _on_copies(call, tensors)


def gradients_launcher(
    tensors: BackwardTensors, problem: Problem, plan: Plan, given: Given, needs: Needs,
    into: Sequence[Tensor] = (),
) -> BackwardLauncher:  # fmt: skip
    """What launches the backward passes of such tensors by the tier of ``plan``.

    ``into``: fp32 tensors with the strides of those that dQ, dK and dV are added to, which are the
    launcher's last argument then; or nothing. The launcher returns dQ, dK and dV, and the gradients
    of bias and sinks, if one of them is wanted: None for those that are not.
    """
    # Above this head_dim, tiles of PyTorch compute gradients.
    tiling = None if tensors[0].shape[-1] > MAX_HEAD_DIM_BACKWARD else plan.tiling
    main: BackwardLauncher | None = None
    of_bias: Callable[..., Tensor] | None = None
    of_sinks: Callable[..., Tensor] | None = None
    if needs[0] or (needs[1] and tiling is None):
        views, sums = _views(tensors, problem), _views(into, problem)
        by_hopper = plan.hopper_backward
        if by_hopper and into:
            from flashattn_triton.hopper.backward import can_add

            by_hopper = can_add((views[0].shape[3], views[2].shape[3]), sums)
        if by_hopper:
            from flashattn_triton.hopper.backward import HopperBackwardCall

            main = HopperBackwardCall(views, problem, given, sums)
        elif tiling is None:
            main = functools.partial(_tiled_backward, problem, needs)
        else:
            from flashattn_triton.portable.backward import BackwardCall

            views = _views(readable(tensors), problem)
            main = _on_copies(BackwardCall(views, problem, tiling, given, sums), tensors)
    if main is not None and not needs[1] and not needs[2]:
        return main
    if needs[1] and tiling is not None:
        from flashattn_triton.portable.bias_pass import BiasCall

        views = _views(readable(tensors), problem)
        of_bias = _on_copies(BiasCall(views, problem, tiling, given), tensors)
    if needs[2] and tensors[3].is_cuda and tensors[3].numel():
        from flashattn_triton.portable.preprocess import SinksCall

        assert given.sinks is not None
        views = _views(readable(tensors), problem)
        of_sinks = _on_copies(SinksCall(views, given.sinks), tensors)

    def launch(tensors: BackwardTensors, given: Given = NOTHING) -> tuple[Tensor | None, ...]:
        none = (None, None, None)
        found = none if main is None else main(tensors, given)
        dbias = found[3] if len(found) > 3 else None
        if of_bias is not None:
            dbias = of_bias(tensors, given)
        dsinks = None if of_sinks is None else of_sinks(tensors, given)
        if needs[2] and of_sinks is None and given.sinks is not None:
            dsinks = sinks_gradient(given.sinks, *_views(tensors, problem)[3:])
        return *(found[:3] if needs[0] else none), dbias, dsinks

    return launch


def _views(tensors: Sequence[Any], problem: Problem) -> tuple[Any, ...]:
    return tuple([None if x is None else heads_first(x, problem.layout) for x in tensors])


def readable(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Tensors of a pass, those of rows copied where their last stride is not 1."""
    return tuple([unit_last_stride(x) if i in _ROWS else x for i, x in enumerate(tensors)])


def _on_copies(call: Callable[..., _Results], tensors: Sequence[Any]) -> Callable[..., _Results]:
    """``call``, given copies of those of ``tensors`` that it cannot read, if there are any."""
    if all(map(operator.is_, tensors, readable(tensors))):
        return call
    return lambda tensors, *rest: call(readable(tensors), *rest)


def _tiled_forward(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], given: Given = NOTHING
) -> tuple[Tensor, Tensor]:
    query, key, value = tensors
    out = empty_result(query, value.shape[-1], problem.layout, problem.out_dtype).zero_()
    lse = empty_row_statistic(heads_first(query, problem.layout)).fill_(float("-inf"))
    lse = as_given(lse, problem.layout)
    of_queries, of_keys = (query, out, lse), (key, value)
    for (q, o, l_rows), (k, v), own in parts_of_batch(problem, given, of_queries, of_keys):
        o[:], l_rows[:] = tiled_forward(q, k, v, problem, own)
    # A Function refuses to have its output changed in place if that is a view.
    out = query.new_empty(0) if problem.largest_only else out.detach()
    return out, lse.detach()


def _tiled_backward(
    problem: Problem, needs: Needs, tensors: BackwardTensors, given: Given = NOTHING,
    into: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs, results = tensors[:3], tensors[3:]
    sums = into or [empty_result(x, x.shape[-1], problem.layout).zero_() for x in inputs]
    if into:  # gradients have the dtype of their inputs
        inputs = (inputs[0].float(), inputs[1].float(), inputs[2].float())
    of_queries, of_keys = (sums[0], inputs[0], *results), (*sums[1:], *inputs[1:])
    for (dq, q, *rows), (dk, dv, k, v), own in parts_of_batch(problem, given, of_queries, of_keys):
        part: Any = (q, k, v, *rows)
        gradients = tiled_backward(part, problem, own, of_bias=needs[1])
        for total, gradient in zip((dq, dk, dv), gradients, strict=False):
            total += gradient
    # A bias comes with one part.
    return *(x.detach() for x in sums), *gradients[3:]
