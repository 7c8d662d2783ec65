"""Tokens, positions and labels in zigzag order: from whole sequences to a rank's, and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton.context_parallel.communication import gather, own_rows
from flashattn_triton.context_parallel.zigzag import Zigzag
from flashattn_triton.inputs import check_tensors

Group = Any  # a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks


def ranks_of(group: Group) -> dist.ProcessGroup | None:
    """The process group that ``group`` stands for; None where there is no other rank."""
    if group is None:
        found = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    elif isinstance(group, dist.ProcessGroup):
        found = group
    elif hasattr(group, "get_group"):  # a DeviceMesh, whose module takes long to import
        if group.ndim != 1:
            raise ValueError(
                f"group must be a process group or a mesh of one dimension, but got a mesh of "
                f"{group.ndim}. Pass one of its dimensions, as mesh['context']."
            )
        found = group.get_group()
    else:
        raise TypeError(
            f"group must be a process group, a mesh of one dimension or None, but got "
            f"{type(group).__name__}. None stands for all ranks."
        )
    return None if found is None or found.size() == 1 else found


def starts_of(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Starts of packed sequences as integers. The host waits for a tensor that is on a GPU."""
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if (
        not isinstance(values, list)
        or len(values) < 2
        or not all(isinstance(x, int) for x in values)
        or values[0] != 0
        or any(b < a for a, b in itertools.pairwise(values))
    ):
        raise ValueError(
            f"cu_seqlens must be at least two integers that rise from 0 to the number of tokens of "
            f"all ranks, but got {values}. Use the cumulative sum of the lengths, with 0 before it."
        )
    return tuple(values)


def check_end(starts: Tensor | Sequence[int], length: int) -> None:
    """Raises ``ValueError`` unless packed sequences end with the last of ``length`` tokens."""
    if starts[-1] != length:
        raise ValueError(
            f"cu_seqlens must end with the number of tokens of all ranks, {length}, but got "
            f"{int(starts[-1])}. Give padding a sequence of its own."
        )


# Orders remember their calls.
zigzag = functools.lru_cache(maxsize=16)(Zigzag)


def order_of(
    group: dist.ProcessGroup, length: int, cu_seqlens: Tensor | Sequence[int] | None, rows: int = 1
) -> Zigzag:
    """The order of ``cu_seqlens``, or of ``rows`` sequences of ``length`` tokens."""
    if cu_seqlens is not None:
        starts = starts_of(cu_seqlens)
        check_end(starts, length)
        return zigzag(group.size(), starts)
    if length % (2 * group.size()):
        raise ValueError(
            f"the sequence must have a multiple of {2 * group.size()} tokens for {group.size()} "
            f"ranks, but got {length}. Pad it, or pass cu_seqlens, here [0, {length}]: packed "
            f"sequences may have any length."
        )
    return zigzag(group.size(), tuple(i * length for i in range(rows + 1)))


def order_of_rank(
    name: str, n: int, group: dist.ProcessGroup, cu_seqlens: Tensor | Sequence[int] | None,
    rows: int = 1,
) -> Zigzag:  # fmt: skip
    """:func:`order_of` sequences of which this rank has ``n`` tokens in all, those of ``name``."""
    length = n // rows * group.size() if cu_seqlens is None else starts_of(cu_seqlens)[-1]
    order, rank = order_of(group, length, cu_seqlens, rows), group.rank()
    expected = order.length(rank)
    if n != expected:
        raise ValueError(
            f"{name} must have the {expected} tokens of rank {rank}, but got {n}. Pass what "
            f"shard_tokens returns with the same cu_seqlens, or its like."
        )
    return order


def shard_tokens(
    x: Tensor,
    group: Group = None,
    *,
    dim: int = 1,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's tokens of whole sequences: token ids, labels, positions or anything per token.

    Shift labels before: a rank's last token is not followed by its next one. Rotary embeddings need
    :func:`token_positions`.

    Args:
        x: the same on every rank, with the tokens in dimension ``dim``.
        group: a process group, a mesh of one dimension, or None for all ranks.
        dim: of the tokens: 1 for (batch, tokens), 0 for packed tokens.
        cu_seqlens: where packed sequences start, and the number of all tokens. None for a
            sequence in every row, whose length twice the number of ranks must divide.

    Returns:
        A copy with this rank's tokens, or ``x`` itself if there is only one rank. Packed sequences
        of any length: a rank may get up to two tokens more than another.

    Raises:
        ValueError: the tokens cannot be divided, or ``cu_seqlens`` is not what is described above.
        TypeError: not a tensor, or not a group.
    """
    check_tensors(x=x)
    ranks = ranks_of(group)
    if ranks is None:
        return x
    order = order_of(ranks, x.shape[dim], cu_seqlens)
    return x.index_select(dim, own_rows(order, ranks.rank(), x.device))


def token_positions(
    length: int | None = None,
    group: Group = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of this rank's tokens in its sequence, as rotary embeddings need them.

    Args:
        length: of the sequence, over all ranks; None with ``cu_seqlens``.
        group: as for :func:`shard_tokens`, as is ``cu_seqlens``.
        device: of the result.

    Returns:
        (n,) int64.

    Raises:
        ValueError: as by :func:`shard_tokens`.
    """
    if (length is None) == (cu_seqlens is None):
        raise ValueError("length or cu_seqlens must be given, and not both. Pass one of them.")
    starts = (0, length or 0) if cu_seqlens is None else starts_of(cu_seqlens)
    positions = [torch.arange(end - start) for start, end in itertools.pairwise(starts)]
    own = shard_tokens(torch.cat(positions), group, dim=0, cu_seqlens=cu_seqlens)
    return own.to(device)


def unshard_tokens(
    x: Tensor,
    group: Group = None,
    *,
    dim: int = 1,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Whole sequences from the tokens of all ranks: the inverse of :func:`shard_tokens`.

    Collective. It is for logits, losses per token and the like; it has no derivative.

    Args:
        x: this rank's tokens in dimension ``dim``, of one shape and dtype on all ranks but for what
            :func:`shard_tokens` makes unequal.
        group: as for :func:`shard_tokens`, as are ``dim`` and ``cu_seqlens``.

    Returns:
        The whole sequences, on every rank.

    Raises:
        ValueError: ``x`` requires a gradient, or has another number of tokens.
        TypeError: not a tensor, or not a group.
    """
    check_tensors(x=x)
    ranks = ranks_of(group)
    if ranks is None:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x must not require a gradient, which unshard_tokens does not compute, but it does. "
            "Compute the loss from this rank's tokens, or pass x.detach()."
        )
    order = order_of_rank("x", x.shape[dim], ranks, cu_seqlens)
    return gather(ranks, order, x.movedim(dim, 0)).wait().movedim(0, dim)
