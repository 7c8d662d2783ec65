"""Attention to parts of the keys: joining outputs, and the backward pass of one part.

A ring, or a cache in pieces, attends to parts of the keys one after another. The output of a part
with the logsumexp L_p has the weight exp(L_p - L) in the output for all keys (:func:`merge`), where
L is the logsumexp of all L_p. With the joined logsumexp L and output O, each part's gradients are
sums over its keys alone (:func:`flash_attention_backward`):

    P = exp(S - L),   dS = P ∘ (dO Vᵀ - rowsum(O ∘ dO) + dL)
    dQ += scale · dS K,   dK += scale · dSᵀ Q,   dV += Pᵀ dO

so dQ need not be rounded between parts. Autograd through ``merge`` rounds the gradient of every
part's output, and every part's dQ, to the inputs' dtype instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from flashattn_triton.inputs import (
    as_length,
    check_inputs,
    check_tensors,
    given_starts,
    refuse_unknown,
)
from flashattn_triton.mask_and_bias import Given, check_sinks, normalised, without_unseen_keys
from flashattn_triton.op import ONLY_INPUTS, call_for
from flashattn_triton.problem import (
    Layout,
    OptionKeywords,
    Problem,
    accumulated,
    check_layout,
    heads_first,
    new_problem,
)
from flashattn_triton.tiled import sinks_gradient


def merge(
    outputs: Sequence[Tensor], logsumexps: Sequence[Tensor], *, layout: Layout = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Attention to all keys, from attention of the same queries to disjoint sets of keys.

    A query that no set shows a key has output 0 and logsumexp -inf. Where a logsumexp is -inf, it
    does not matter what the output holds. Differentiable in all inputs; computed in fp32, or in
    fp64 if a tensor is.

    Args:
        outputs: one for each set of keys, of equal shape, dtype and device: (..., H, N, E) for
            layout "bhsd", (..., N, H, E) for "bshd", which packed sequences are too.
        logsumexps: (..., H, N), as ``flash_attention`` returns them with ``return_lse=True``.
        layout: of the outputs.

    Returns:
        The output, in the dtype and layout of ``outputs``, and its logsumexp.

    Raises:
        ValueError: the sequences are empty, or not equally long, or their tensors do not fit.
        TypeError: not all are tensors.
    """
    check_layout(layout)
    for name, parts in (("outputs", outputs), ("logsumexps", logsumexps)):
        if not isinstance(parts, list | tuple):
            raise TypeError(
                f"{name} must be a list or tuple of tensors, one for each set of keys, but got "
                f"{type(parts).__name__}. Pass list({name})."
            )
    if not outputs or len(outputs) != len(logsumexps):
        raise ValueError(
            f"outputs and logsumexps must have equally many tensors, at least one each, but got "
            f"{len(outputs)} outputs and {len(logsumexps)} logsumexps. Pass one of each per set of "
            f"keys."
        )
    for i, (out, lse) in enumerate(zip(outputs, logsumexps, strict=True)):
        check_tensors(**{f"outputs[{i}]": out, f"logsumexps[{i}]": lse})
        if out.dim() < 3 or not out.is_floating_point():
            raise ValueError(
                f"outputs[{i}] must be a floating tensor of at least 3 dimensions, but got "
                f"{out.dtype} of shape {tuple(out.shape)}. Pass what flash_attention returns."
            )
        first = outputs[0]
        if (out.shape, out.dtype, out.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"outputs[{i}] must be like outputs[0], {first.dtype} of shape "
                f"{tuple(first.shape)} on {first.device}, but got {out.dtype} of shape "
                f"{tuple(out.shape)} on {out.device}. All parts have the same queries."
            )
        rows = (out if layout == "bhsd" else out.transpose(-3, -2)).shape[:-1]
        if lse.shape != rows or lse.device != out.device or not lse.is_floating_point():
            raise ValueError(
                f"logsumexps[{i}] must be a floating tensor of shape {tuple(rows)} on "
                f"{out.device}, but got {lse.dtype} of shape {tuple(lse.shape)} on {lse.device}. "
                f"Pass what flash_attention returns with return_lse=True, and the layout of "
                f"outputs."
            )
    lses = torch.stack([accumulated(lse) for lse in logsumexps])
    # Rows without any key: their maximum is taken as 0, because -inf - -inf is NaN.
    highest = lses.detach().amax(0)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(lses - highest)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    merged = torch.zeros_like(outputs[0], dtype=accumulated(outputs[0]).dtype)
    for out, *of_rows in zip(outputs, weights / total, lses == float("-inf"), strict=True):
        share, unseen = ((x if layout == "bhsd" else x.mT).unsqueeze(-1) for x in of_rows)
        merged = merged + out.masked_fill(unseen, 0.0) * share  # 0 · NaN is NaN
    lse = (highest + torch.log(total)).masked_fill(empty, float("-inf"))
    return merged.to(outputs[0].dtype), lse


@torch.no_grad()
def flash_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    into: Sequence[Tensor],
    *,
    grad_lse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sinks: Tensor | None = None,
    grad_sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    layout: Layout | None = None,
    **keywords: Unpack[OptionKeywords],
) -> None:
    """Adds the gradients of attention to a part of the keys to fp32 tensors.

    Outside of autograd and of compiled code. Each part has its own call, with the mask that it had
    in the forward pass, and with ``out`` and ``lse`` of all parts together. The Hopper
    tier adds up to head_dim 128, where it would compute; else the portable kernels do.

    Args:
        query: (B, H, N_q, D), (B, N_q, H, D) for layout "bshd", or (T_q, H, D) with ``cu_seqlens``;
            fp16, bf16 or fp32.
        key: (B, G, N_k, D), the keys of this part.
        value: (B, G, N_k, E).
        out: (B, H, N_q, E), the joined output, in query's dtype or fp32, which is more precise.
        lse: (B, H, N_q), or (H, T_q), fp32, the joined logsumexp.
        grad_out: like ``out``, its gradient, in query's dtype or fp32. Kernels multiply it in
            query's dtype.
        into: dQ, dK and dV: fp32 tensors of the shapes of query, key and value, which are changed,
            and have memory of their own.
        grad_lse: like ``lse``, the gradient of the joined logsumexp, or None for zero.
        cu_seqlens_q: where packed sequences start, with ``cu_seqlens_k``, ``max_seqlen_q`` and
            ``max_seqlen_k`` as of :func:`~flashattn_triton.flash_attention_varlen`.
        sinks: (H,), and ``grad_sinks``, to which their gradient is added: of all parts, so pass
            them with one part only. dQ, dK and dV know sinks by ``lse``.
        grad_sinks: (H,) fp32.
        alibi_slopes: as of :func:`~flashattn_triton.flash_attention`, as are ``prefix_lengths``,
            ``layout`` and the other keywords.

    Raises:
        ValueError: a tensor or an option is not what is described above.
        TypeError: not a tensor.
        RuntimeError: the call is traced by a compiler, or within a transform of ``torch.func``.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "flash_attention_backward changes tensors outside of autograd and cannot be traced. "
            "Call it from a function under torch.compiler.disable."
        )
    refuse_unknown("flash_attention_backward", OptionKeywords.__annotations__, keywords)
    check_tensors(query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out)
    if grad_lse is not None:
        check_tensors(grad_lse=grad_lse)
    tensors = (query, key, value, out, lse, grad_out, grad_lse)
    cu_seqlens_q, cu_seqlens_k = given_starts(cu_seqlens_q, cu_seqlens_k)
    packed = cu_seqlens_q is not None
    longest = (0, 0)
    if packed:
        longest_q = as_length("max_seqlen_q", max_seqlen_q, query.shape[0])
        longest = longest_q, as_length("max_seqlen_k", max_seqlen_k, key.shape[0])
    problem = new_problem("thd" if packed else layout, query.shape[-1], longest, **keywords)
    check_inputs(problem, query, key, value, cu_seqlens_q, cu_seqlens_k)
    if query.dtype == torch.float64:
        raise ValueError(
            "query must be float16, bfloat16 or float32, but got float64, whose sums in fp32 would "
            "be rounded. Differentiate merge by autograd instead."
        )
    _check_results(problem, query, value, out, lse, grad_out, grad_lse)
    if not isinstance(into, list | tuple) or len(into) != 3:
        got = f"{len(into)} tensors" if isinstance(into, list | tuple) else type(into).__name__
        raise ValueError(f"into must be dQ, dK and dV, but got {got}. Pass three tensors.")
    if (sinks is None) != (grad_sinks is None):
        raise ValueError("sinks and grad_sinks must both be given, but got one. Pass two, or none.")
    if sinks is not None and grad_sinks is not None:
        check_sinks(sinks, heads_first(query, problem.layout).shape[1], query.device)
    sums = (*into, grad_sinks)
    _refuse_transforms(*tensors, *sums, sinks, alibi_slopes, prefix_lengths, cu_seqlens_q)
    _check_sums(sums, (query, key, value, sinks), tensors)
    given = Given(alibi_slopes, None, prefix_lengths, None, None, cu_seqlens_q, cu_seqlens_k)
    rows = 1 if problem.layout == "bshd" else 2
    if not packed and query.shape[rows] != key.shape[rows]:
        (key, value, *of_keys), given = without_unseen_keys(
            problem, query.shape[rows], (key, value, *into[1:]), given
        )
        into = [into[0], *of_keys]
        tensors = (query, key, value, *tensors[3:])
    resolved = normalised(problem, query, key, given)
    if problem.implementation == "reference":
        _by_definition(problem, tensors, resolved, into)
    else:
        call = call_for(problem, query, key, value, given)
        call.backward(tensors, resolved, ONLY_INPUTS, into)
    if sinks is not None and grad_sinks is not None:
        o, do = (heads_first(x, problem.layout) for x in (out, grad_out))
        grad_sinks += sinks_gradient(sinks.float(), o, lse, do, grad_lse)


def _by_definition(
    problem: Problem, tensors: Sequence[Any], given: Given, into: Sequence[Tensor]
) -> None:
    """By autograd: Σ exp(L_p - L) (dO · O_p - D) has the gradients of the module's formulas."""
    from flashattn_triton.reference import attend_by_definition

    *inputs, out, lse, grad_out, grad_lse = tensors
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    q, k, v = leaves
    out, grad_out = (heads_first(x, problem.layout) for x in (out, grad_out))
    with torch.enable_grad():
        part, part_lse = attend_by_definition(problem, q, k, v, given)
        of_rows = (grad_out * (heads_first(part, problem.layout) - out)).sum(-1).view_as(lse)
        of_rows = of_rows if grad_lse is None else of_rows + grad_lse
        # A part of which a query sees no key has no share, and -inf - -inf is NaN.
        weight = (part_lse - lse).masked_fill(torch.isneginf(part_lse), float("-inf")).exp()
        gradients = torch.autograd.grad((weight * of_rows).sum(), leaves)
    for total, gradient in zip(into, gradients, strict=True):
        total += gradient


def _refuse_transforms(*tensors: object) -> None:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(isinstance(x, Tensor) and wrapped(x) for x in tensors):
        raise RuntimeError(
            "flash_attention_backward must have tensors with memory of their own, to which it "
            "adds, but got one of a transform, such as torch.func.vmap. Call it outside, with the "
            "mapped dimension as a part of the batch."
        )


def _check_results(
    problem: Problem, query: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None,
) -> None:  # fmt: skip
    rows, device = heads_first(query, problem.layout).shape[:-1], query.device
    of_rows = ((*query.shape[:-1], value.shape[-1]), (query.dtype, torch.float32))
    statistics = (tuple(rows[1:] if problem.packed else rows), (torch.float32,))
    for name, x, (shape, dtypes) in (
        ("out", out, of_rows),
        ("grad_out", grad_out, of_rows),
        ("lse", lse, statistics),
        ("grad_lse", grad_lse, statistics),
    ):
        if x is not None and ((*x.shape,) != shape or x.dtype not in dtypes or x.device != device):
            raise ValueError(
                f"{name} must be {' or '.join(map(str, dtypes))} of shape {shape} on {device}, but "
                f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}. Pass what merge returned, "
                f"and its gradients."
            )


def _check_sums(sums: Sequence[Any], inputs: Sequence[Any], read: Sequence[Any]) -> None:
    taken = [x for x in read if x is not None]
    names = ("into's dQ", "into's dK", "into's dV", "grad_sinks")
    for name, total, x in zip(names, sums, inputs, strict=True):
        if x is None:
            continue
        check_tensors(**{name: total})
        repeats = any(n > 1 and s == 0 for n, s in zip(total.shape, total.stride(), strict=True))
        wrong = total.shape != x.shape or total.dtype != torch.float32 or total.device != x.device
        if wrong or repeats or total.stride(-1) != 1:
            raise ValueError(
                f"{name} must be float32 of shape {tuple(x.shape)} on {x.device} with contiguous "
                f"rows, but got {total.dtype} of shape {tuple(total.shape)} and strides "
                f"{total.stride()} on {total.device}. Allocate it with torch.zeros."
            )
        if any(_share_memory(total, x) for x in taken):
            raise ValueError(
                f"{name} must have memory of its own, because it is changed, but got that of an "
                f"input or of another sum. Allocate it with torch.zeros."
            )
        taken.append(total)


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether some byte belongs to both, whatever the strides: views may lie between each other."""
    if not x.numel() or not y.numel():
        return False
    # Steps from x's first byte to another one of x, and back from one of y, by their length.
    least, most = Counter({1: 1 - y.element_size()}), Counter({1: x.element_size() - 1})
    for steps, sign, tensor in ((most, 1, x), (least, -1, y)):
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            steps[stride * tensor.element_size()] += sign * (n - 1)
    lengths = sorted({*least, *most} - {0}, reverse=True)
    return _reaches(y.data_ptr() - x.data_ptr(), [(n, least[n], most[n]) for n in lengths])


def _reaches(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether steps add up to ``distance``: of each, the length, and how many at least and most."""
    if not steps:
        return distance == 0
    (length, least, most), *shorter = steps
    low, high = (sum(step[0] * step[bound] for step in shorter) for bound in (1, 2))
    first, last = -((high - distance) // length), (distance - low) // length
    counts = range(max(least, first), min(most, last) + 1)
    return any(_reaches(distance - length * n, shorter) for n in counts)
