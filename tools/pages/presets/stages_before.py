"""Another version of shard-optim, ``shard_before``, as optimizers that train-step can name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from shard_before import ShardedOptimizer  # type: ignore[import-not-found]
from torch import nn

_made = itertools.count()


def stage1(params: Iterable[nn.Parameter], **arguments: Any) -> Any:
    """AdamW whose state is in shards."""
    params = list(params)
    fused = params[0].is_cuda
    return ShardedOptimizer(params, torch.optim.AdamW, lr=1e-4, fused=fused, **arguments)


def stage2(params: Iterable[nn.Parameter], *, reduce_gradients: bool, overlap: str) -> Any:
    """AdamW whose state and gradients are in shards.

    The first one of a process is plain: the proof averages its gradients by hand.
    """
    if next(_made) == 0:
        plain: Any = torch.optim.AdamW(params, lr=1e-4)
        plain.attach = lambda module: module
        return plain
    return stage1(params, reduce_gradients=reduce_gradients, overlap=overlap)
