"""Buckets of some megabytes: planning over sizes alone. Loaded by ``BucketedDDP``.

A plan is described in ``buckets.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from ddp_lite.buckets import ParameterSpec, one_per_kind
from ddp_lite.ranks import MEBIBYTE


def bytes_from_mb(size_mb: float | str | None, argument: str) -> int | None:
    """Converts a size in MB (1024² bytes) to whole bytes; None, "no limit", stays None.

    Raises:
        ValueError: if the size is not a positive finite number.
    """
    if size_mb is None:
        return None
    if not (isinstance(size_mb, int | float) and math.isfinite(size_mb) and size_mb > 0):
        raise ValueError(
            f"{argument} must be a positive number of MB (1024**2 bytes) or None, but got "
            f"{size_mb!r}. Pass None for one bucket holding everything"
        )
    return max(1, math.floor(size_mb * MEBIBYTE))


def automatic_bucket_bytes(specs: Iterable[ParameterSpec]) -> int:
    """A sixteenth of the gradients, but at least 25 MB.

    Every reduction costs a fixed time, and has to wait for the slower rank; what is reduced last
    has nothing to hide under. LOG.md has the sizes that were measured.
    """
    return max(25 * MEBIBYTE, sum(spec.nbytes for spec in specs) // 16)


def plan_buckets(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int | Literal["auto"] | None,
    last_bucket_bytes: int | None = None,
    *,
    taper: bool = False,
) -> list[tuple[int, ...]]:
    """Fills buckets greedily in the order given, one open bucket per dtype.

    The reduction of the last bucket has nothing left to hide under, so it can have a smaller
    limit of its own: it is filled backwards from the end of the order.

    Args:
        specs: parameters in the order in which their gradients are expected.
        bucket_bytes: most bytes in a bucket; a larger parameter gets a bucket of its own.
            None puts everything of one kind in one bucket, the last included. "auto" stands for
            ``automatic_bucket_bytes``, with ``taper``.
        last_bucket_bytes: most bytes in the bucket that is reduced last, if that is smaller.
        taper: also let no bucket begin that could hold more than half of what is left, so that
            less is on its way when backward ends.

    Returns:
        Groups of parameter indices, ordered by when their last gradient is expected.
    """
    if bucket_bytes == "auto":
        bucket_bytes, taper = automatic_bucket_bytes(specs), True
    if bucket_bytes is None:
        return _by_completion(one_per_kind(specs), specs)
    least = min(bucket_bytes, last_bucket_bytes or bucket_bytes)
    tail = _tail(specs, least)
    head = specs[: len(specs) - len(tail)]
    groups: list[list[int]] = []
    open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
    left = sum(spec.nbytes for spec in specs)
    for spec in head:
        group, room = open_groups.get(spec.dtype, ([], 0))
        if not group or spec.nbytes > room:
            group = []
            groups.append(group)
            room = min(bucket_bytes, max(least, left // 2)) if taper else bucket_bytes
        group.append(spec.index)
        open_groups[spec.dtype] = (group, room - spec.nbytes)
        left -= spec.nbytes
    plan = _by_completion([tuple(group) for group in groups], specs)
    return [*plan, tuple(spec.index for spec in tail)] if tail else plan


def _tail(specs: Sequence[ParameterSpec], limit: int) -> Sequence[ParameterSpec]:
    """The longest end of ``specs`` of one kind within ``limit`` bytes; at least one parameter."""
    used, start = 0, len(specs)
    for spec in reversed(specs):
        same_kind = spec.dtype == specs[-1].dtype
        if start < len(specs) and (not same_kind or used + spec.nbytes > limit):
            break
        used += spec.nbytes
        start -= 1
    return specs[start:]


def _by_completion(
    groups: list[tuple[int, ...]], specs: Sequence[ParameterSpec]
) -> list[tuple[int, ...]]:
    position = {spec.index: order for order, spec in enumerate(specs)}
    return sorted(groups, key=lambda group: max(position[index] for index in group))
