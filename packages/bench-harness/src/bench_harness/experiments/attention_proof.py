"""The proof that comes before timing: output and gradients beside an fp32 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench_harness.core import Row
from bench_harness.experiments.attention_problem import Problem, learned

if TYPE_CHECKING:
    from torch import Tensor

    from flashattn_triton.mask_and_bias import MaskAndBias

#: Longest sequence whose reference stores all scores of a head, 64 MB in fp32; longer ones are
#: computed in tiles of at most 16 MB.
_DEFINED, _TILE = 4096, 2048
_LEAST_TILE = 256


def exact(
    problem: Problem, tensors: Sequence[Tensor], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Output and gradients of the heads that are checked, in fp32.

    By the definition of attention, or in tiles where its scores would take too much memory.

    Returns:
        "out", "dq", "dk" and "dv", and "dsinks" or "dbias" where these are learned.
    """
    import torch

    from flashattn_triton.logsumexp import add_sinks
    from flashattn_triton.problem import new_problem
    from flashattn_triton.reference import attention_reference
    from flashattn_triton.tiled import tiled_backward, tiled_bias_backward, tiled_forward

    options = new_problem(
        head_dim=problem.head_dim,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
    )
    leaves = {
        name: _checked_heads(problem, name, x).detach().float().requires_grad_()
        for name, x in learned(settings).items()
    }
    mask_and_bias = _mask_and_bias(problem, {**settings, **leaves})
    sinks = leaves.get("sinks")
    found: list[dict[str, Tensor]] = []
    for q, k, v, grad_out in _checked(problem, tensors):
        if q.shape[2] <= _DEFINED:
            inputs = (*(x.requires_grad_() for x in (q, k, v)), *leaves.values())
            out, lse = attention_reference(q, k, v, options, mask_and_bias)
            if sinks is not None:
                out, _ = add_sinks(out, lse, sinks, "bhsd")
            gradients = torch.autograd.grad(out, inputs, grad_out)
        else:
            tile = max(_LEAST_TILE, _TILE // (k.shape[0] * k.shape[1]))
            group = q.shape[1] // k.shape[1]
            tiles = {"query_tile": max(1, tile // group), "key_tile": tile}
            extra: list[Tensor] = []
            part, lse = tiled_forward(q, k, v, options, mask_and_bias, **tiles)
            out, grad_lse = part, None
            if sinks is not None:
                part, lse = part.requires_grad_(), lse.requires_grad_()
                out, _ = add_sinks(part, lse, sinks, "bhsd")
                grad_out, grad_lse, *extra = torch.autograd.grad(out, (part, lse, sinks), grad_out)
            arguments = (q, k, v, part, lse, grad_out, grad_lse, options, mask_and_bias)
            if "bias" in leaves:
                extra = [tiled_bias_backward(*arguments, **tiles)]
            gradients = (*tiled_backward(*arguments, **tiles), *extra)
        names = ("dq", "dk", "dv", *(f"d{name}" for name in leaves))
        found.append({"out": out.detach(), **dict(zip(names, gradients, strict=True))})
    # Several parts are packed sequences or documents, which have no learned arguments.
    return {name: torch.cat([part[name] for part in found], dim=-2 if found[1:] else 0)
            for name in found[0]}  # fmt: skip


def errors(
    attend: Callable[[], Tensor],
    problem: Problem,
    tensors: Sequence[Tensor],
    settings: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    limit: float,
    *,
    forward_only: bool = False,
) -> Row:
    """Largest errors of output and gradients of the checked heads, as shares of the largest value.

    Args:
        forward_only: compare the output alone.

    Raises:
        ArithmeticError: an error is too large, or a gradient is missing; nothing is timed then.
    """
    import torch

    leaves = learned(settings)
    out = attend()
    if forward_only:
        parts = [o for *_, o in _checked(problem, (*tensors[:3], out))]
        return _within({"out": torch.cat(parts, dim=2)}, {"out": wanted["out"]}, limit)
    inputs = (*tensors[:3], *leaves.values())
    gradients = torch.autograd.grad(out, inputs, tensors[3], allow_unused=True)
    names = ("query", "key", "value", *leaves)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            raise ArithmeticError(f"{name} must have a gradient, but got none. It is not timed")
    pieces = list(_checked(problem, (*gradients[:3], out)))
    dq, dk, dv, out = (torch.cat(each, dim=2) for each in zip(*pieces, strict=True))
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    for name, gradient in zip(leaves, gradients[3:], strict=True):
        found[f"d{name}"] = _checked_heads(problem, name, gradient).float()
    return _within(found, wanted, limit)


def _within(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], limit: float) -> Row:
    """The errors as columns of a row.

    Raises:
        ArithmeticError: one is larger than the limit.
    """
    row: Row = {}
    for what, exactly in wanted.items():
        error = float((found[what] - exactly).abs().max() / exactly.abs().max())
        if not error <= limit:  # also catches NaN
            raise ArithmeticError(
                f"error of {what} must be at most {limit:g} of its largest "
                f"value, but got {error:.2e}. It is not timed"
            )
        row[f"error_{what}"] = error
    return row


def _heads(problem: Problem) -> tuple[int, int]:
    """How many query heads and key heads are checked, counted from the last.

    Those of the last key head; all of them for sinks, whose gradients are single numbers: the error
    of one that is small by chance says nothing.
    """
    if problem.feature == "sinks":
        return problem.heads, problem.kv_heads
    return problem.heads // problem.kv_heads, 1


def _checked(
    problem: Problem, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(query, key, value, output or its gradient) of the checked heads, in fp32.

    One part, of the last batch element, or of all of them if they share a gradient; or a part for
    each packed sequence or document.
    """
    group, keys = _heads(problem)
    heads = (group, keys, keys, group)
    if problem.lengths:
        for start, end in itertools.pairwise([0, *itertools.accumulate(problem.lengths)]):
            q, k, v, o = (
                x.detach()[start:end, -n:].transpose(0, 1)[None].float()
                for x, n in zip(tensors, heads, strict=True)
            )
            yield q, k, v, o
        return
    batch = slice(None) if problem.feature in ("sinks", "bias") else slice(-1, None)
    for start, end in itertools.pairwise([0, *itertools.accumulate(problem.documents)]):
        q, k, v, o = (
            x.detach()[batch, -n:, start:end].float().clone()
            for x, n in zip(tensors, heads, strict=True)
        )
        yield q, k, v, o


def _checked_heads(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """The part of a keyword argument, or of its gradient, that belongs to the checked heads."""
    group, _ = _heads(problem)
    return tensor[:, -group:] if name == "bias" else tensor[-group:]


def _mask_and_bias(problem: Problem, settings: Mapping[str, Any]) -> MaskAndBias:
    """What the reference takes of the keyword arguments, for the checked heads of one element.

    ``settings["bias"]`` is already that of the checked heads.
    """
    from flashattn_triton.mask_and_bias import MaskAndBias

    slopes, prefixes = settings.get("alibi_slopes"), settings.get("prefix_lengths")
    return MaskAndBias(
        alibi_slopes=None if slopes is None else _checked_heads(problem, "", slopes)[None],
        bias=settings.get("bias"),
        prefix_lengths=None if prefixes is None else prefixes[-1:],
    )
