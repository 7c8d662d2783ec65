"""The two ways for keys and values to reach the queries of all ranks, and the choice of one.

``ring``: at step s a rank attends to the keys of the rank s before it, which come straight from
there while the step before computes (:mod:`.transfers`). Outputs in fp32 are joined by their
logsumexps. In the backward pass, a step's gradients of keys and values go back to their rank in
fp32, and are added up there (arXiv:2310.01889). A part that the mask hides is neither sent nor
computed.

``all_gather``: a few heads of keys and values of all ranks are gathered while the heads before them
compute. Every query has all of its keys in one call, so that there is nothing to join. In the
backward pass, gradients of a few heads are summed in fp32 by a reduce-scatter under the next ones.

Both take packed tensors, query (n, H, D), key (n, G, D) and value (n, G, E), with a rank's tokens
in zigzag order (:mod:`.zigzag`). They need the same bytes between ranks. The communication of a
step is started before its products, on a stream of its own.

A ring sends only parts that the mask shows, straight to where they are used, and copies between the
GPUs of a host take nothing from the kernels beside them: on four H100s it was faster for every
length (``docs/context-parallel.md``). With a window, sequences of different lengths have different
masks between parts, and a ring has a call for each. Gathering has as few calls as one GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton.attention import flash_attention, flash_attention_varlen
from flashattn_triton.context_parallel.communication import UnderWay, gather, sum_of_own
from flashattn_triton.context_parallel.transfers import SLOTS, Copies, Transfers, memory_for
from flashattn_triton.context_parallel.zigzag import Band, Call, Zigzag
from flashattn_triton.parts import flash_attention_backward
from flashattn_triton.problem import OptionKeywords, Problem

Way = Literal["auto", "ring", "all-gather"]

#: Pieces into which the heads are divided that are gathered, where their number allows it: one is
#: on its way while another one computes, and the way of the first one is not hidden.
PIECES = 8
_GIB = 2**30
_CALLS_A_PART = 3  # with more, a ring's parts are small


def heads_of_piece(kv_heads: int) -> int:
    """Key heads that are gathered at a time."""
    return -(-kv_heads // min(kv_heads, PIECES))


@functools.lru_cache(maxsize=256)
def choose(order: Zigzag, band: Band, kv_heads: int, width: int, itemsize: int) -> tuple[str, str]:
    """The way for such sequences, and why; ``width``: D + E, of key and value together."""
    # All ranks have about as many, and must make one choice.
    calls = sum(len(order.calls(0, source, band)) for source in range(order.world_size))
    if calls <= _CALLS_A_PART * order.world_size:
        return "ring", "keys travel under the calls for other keys"
    # A part in use, one on its way, and fp32 gradients of two parts, and of those that come back.
    ring = order.longest * kv_heads * width * (2 * itemsize + 4 * 4)
    gathered = order.starts[-1] * heads_of_piece(kv_heads) * width * (2 * itemsize + 2 * 4)
    memory = f"{gathered / _GIB:.2f} GiB of keys and gradients, in a ring {ring / _GIB:.2f} GiB"
    if gathered > max(_GIB, 2 * ring):
        return "ring", f"less memory: gathered {memory}"
    return "all-gather", f"a ring would have {calls} calls: {memory}"


@dataclass(frozen=True)
class Setting:
    """One rank's place in the problem.

    ``problem``: of all ranks' tokens. ``sinks``: (H,) or None. ``communication``: of a ring.
    """

    group: dist.ProcessGroup
    order: Zigzag
    problem: Problem
    sinks: Tensor | None
    communication: str

    def calls(self, source: int | None, rank: int | None = None) -> tuple[Call, ...]:
        """The calls for this rank's queries and the keys of ``source``, of all ranks if None."""
        rank = self.group.rank() if rank is None else rank
        return self.order.calls(rank, source, self.problem.band)

    def options(self, call: Call) -> OptionKeywords:
        """Keywords of a call."""
        (causal, window), problem = call.mask, self.problem
        return {
            "causal": causal, "window": window, "scale": problem.scale, "softcap": problem.softcap,
            "deterministic": problem.deterministic, "implementation": problem.implementation,
        }  # fmt: skip

    def is_read(self, step: int) -> bool:
        """Whether the rank ``step`` behind this one has calls for this rank's keys."""
        rank = self.group.rank()
        return bool(self.calls(rank, (rank + step) % self.group.size()))


class Results(NamedTuple):
    """Output (n, H, E) and logsumexp (H, n), and the gradients of both; the last may be None."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def of(self, rows: slice, heads: slice = slice(None)) -> Results:
        """Those of some queries and heads."""
        grad_lse = None if self.grad_lse is None else self.grad_lse[heads, rows]
        return Results(
            self.out[rows, heads], self.lse[heads, rows], self.grad_out[rows, heads], grad_lse
        )


# -- the ring --------------------------------------------------------------------------------------


def ring_forward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) in query's dtype, and logsumexp (H, n)."""
    found: tuple[Tensor, Tensor] | None = None
    for _, calls, (k, v) in _parts(setting, _transfers(setting, key, value, 0)):
        for call in calls:
            # Sinks are keys without a value, before all others.
            sinks = setting.sinks if found is None else None
            if found is None and call.queries != slice(0, len(query)):
                found, sinks = _before_all_keys(query, value, torch.float32, sinks), None
            part = _attend(setting, call, query, k, v, sinks=sinks, out_dtype=torch.float32)
            if found is None:
                found = part
            else:
                join(found[0][call.queries], found[1][:, call.queries], *part)
    out, lse = found or _before_all_keys(query, value, torch.float32, setting.sinks)
    return out.to(query.dtype), lse


def ring_backward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, results: Results
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in fp32."""
    transfers = _transfers(setting, key, value, SLOTS)
    dq = _zeros(query)
    dk, dv = own = _zeros(key), _zeros(value)
    returning: list[UnderWay[Sequence[Tensor]]] = []  # of the step before
    for step, calls, (k, v) in _parts(setting, transfers):
        sums = own if step == 0 else transfers.zeros(step, len(k))
        for call in calls:
            _differentiate(setting, call, (query, k, v), results, (dq, *sums))
        _add_arrived(own, returning)
        if step > 0:
            returning.append(transfers.give_back(step, sums, is_read=setting.is_read(step)))
    _add_arrived(own, returning)
    return dq, dk, dv


def _transfers(setting: Setting, key: Tensor, value: Tensor, slots: int) -> Transfers:
    """How keys and values travel, and gradients of up to ``slots`` steps at a time come back."""
    own, rows = (key.contiguous(), value.contiguous()), setting.order.longest
    if setting.communication != "messages" and key.is_cuda:
        memory = memory_for(setting.group, key.device, Copies.nbytes(own, rows, slots))
        if not isinstance(memory, str):
            return Copies(memory, setting.group, own, rows)
        if setting.communication == "peer-copy":
            raise ValueError(
                'communication="peer-copy" must have GPUs that can read each other\'s memory, but '
                f'{memory}. Pass "auto" or "messages".'
            )
    return Transfers(setting.group, own)


def _parts(
    setting: Setting, transfers: Transfers
) -> Iterator[tuple[int, tuple[Call, ...], Sequence[Tensor]]]:
    """For every step, the calls for the keys of its part, and these keys and values.

    While the caller uses a part, the next one is on its way. A part that is hidden has no rows.
    """
    rank, size = setting.group.rank(), setting.group.size()
    part: Sequence[Tensor] = transfers.own
    coming: UnderWay[Sequence[Tensor]] | None = None
    for step in range(size):
        if coming is not None:
            part = coming.wait()
        if step + 1 < size:
            source = (rank - step - 1) % size
            rows = setting.order.length(source) if setting.calls(source) else 0
            coming = transfers.fetch(step + 1, rows, is_read=setting.is_read(step + 1))
        yield step, setting.calls((rank - step) % size), part


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds attention to further keys in place: out (n, H, E) and lse (H, n), in fp32.

    With L the logsumexp of both, the weights exp(lse - L) and exp(part_lse - L) sum to one, and the
    second one is sigmoid(part_lse - lse).
    """
    if out.is_cuda:
        from flashattn_triton.context_parallel.join_kernel import join_on_gpu  # needs Triton

        join_on_gpu(out, lse, part, part_lse)
        return
    weight = torch.sigmoid(part_lse - lse)
    weight = weight.masked_fill_(torch.isneginf(part_lse), 0.0)  # -inf - -inf is NaN
    out.lerp_(part, weight.T.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _add_arrived(sums: Sequence[Tensor], returning: list[UnderWay[Sequence[Tensor]]]) -> None:
    for transfer in returning:
        for total, part in zip(sums, transfer.wait(), strict=True):
            if len(part):
                total += part
    returning.clear()


# -- all-gather ------------------------------------------------------------------------------------


def all_gather_forward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) in query's dtype, and logsumexp (H, n)."""
    out, lse = _before_all_keys(query, value, query.dtype)
    for heads, (k, v) in gathered(setting, query, key, value):
        sinks = None if setting.sinks is None else setting.sinks[heads]
        for call in setting.calls(None):
            part, part_lse = _attend(setting, call, query[:, heads], k, v, sinks=sinks)
            # A query sees keys in one call. In others its output is zero, and its logsumexp that of
            # the sinks alone, which is less.
            out[call.queries, heads] += part
            rows = lse[heads, call.queries]
            torch.maximum(rows, part_lse, out=rows)
    return out, lse


def all_gather_backward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, results: Results
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in fp32."""
    dq = _zeros(query)
    summed: list[list[Tensor]] = []
    returning: list[UnderWay[Tensor]] = []  # of the piece before
    for heads, (k, v) in gathered(setting, query, key, value):
        into = (dq[:, heads], _zeros(k), _zeros(v))
        of_heads = results.of(slice(None), heads)
        for call in setting.calls(None):
            _differentiate(setting, call, (query[:, heads], k, v), of_heads, into)
        summed += [[x.wait() for x in returning]] if returning else []
        returning = [sum_of_own(setting.group, setting.order, x) for x in into[1:]]
    summed.append([x.wait() for x in returning])
    dk, dv = (torch.cat(of, dim=1) for of in zip(*summed, strict=True))
    return dq, dk, dv


def gathered(
    setting: Setting, query: Tensor, *tensors: Tensor
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Some query heads, and what they read of all ranks' keys and values, piece by piece.

    While the caller uses a piece, the next one is on its way.
    """
    groups = tensors[0].shape[1]
    ratio = query.shape[1] // groups
    size = heads_of_piece(groups)
    coming: list[UnderWay[Tensor]] = []
    for start in range(0, groups + size, size):
        arrived = [x.wait() for x in coming]
        heads = slice(start, min(start + size, groups))
        if start < groups:
            coming = [gather(setting.group, setting.order, x[:, heads]) for x in tensors]
        if arrived:
            yield slice((start - size) * ratio, min(start, groups) * ratio), arrived


# -- calls -----------------------------------------------------------------------------------------


def _before_all_keys(
    query: Tensor, value: Tensor, dtype: torch.dtype, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of queries that have seen no key but sinks."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=dtype)
    lse = query.new_full((query.shape[1], len(query)), float("-inf"), dtype=torch.float32)
    if sinks is not None:
        lse.copy_(sinks.unsqueeze(-1))
    return out, lse


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _attend(
    setting: Setting, call: Call, query: Tensor, key: Tensor, value: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of the queries of ``call``, packed."""
    tensors = (query[call.queries], key[call.keys], value[call.keys])
    options: Any = {**setting.options(call), **more}
    if call.is_dense:
        q, k, v = (x.unsqueeze(0) for x in tensors)
        out, lse = flash_attention(q, k, v, layout="bshd", return_lse=True, **options)
        return out.squeeze(0), lse.squeeze(0)
    starts, longest = call.starts(query.device), call.longest
    out, lse = flash_attention_varlen(*tensors, *starts, *longest, return_lse=True, **options)
    return out, lse


def _differentiate(
    setting: Setting,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    results: Results,
    into: Sequence[Tensor],
) -> None:
    """Adds the gradients of ``call`` to those of all queries, keys and values."""
    rows = (call.queries, call.keys, call.keys)
    q, k, v = (x[of] for x, of in zip(tensors, rows, strict=True))
    sums = [x[of] for x, of in zip(into, rows, strict=True)]
    out, lse, grad_out, grad_lse = results.of(call.queries)
    options: Any = {**setting.options(call)}
    if call.is_dense:
        q, k, v, out, lse, grad_out = (x.unsqueeze(0) for x in (q, k, v, out, lse, grad_out))
        sums = [x.unsqueeze(0) for x in sums]
        grad_lse = None if grad_lse is None else grad_lse.unsqueeze(0)
        options["layout"] = "bshd"
    else:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        starts = (*call.starts(lse.device), *call.longest)
        options.update(zip(names, starts, strict=True))
    flash_attention_backward(q, k, v, out, lse, grad_out, sums, grad_lse=grad_lse, **options)
