"""The data-parallel wrappers that bench_ddp.py compares, each by a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddp_lite.peer import PeerCopyAverage

NEED_CUDA = (
    "default-high-priority",
    "default-16-ctas",
    "inplace-250-high-priority",
    "inplace-250-16-ctas",
    "default-peer-copy",
    "peer-copy-100",
    "peer-copy-250",
)

Build = Callable[[nn.Module, "Groups"], nn.Module]


class Groups:
    """Process groups that variants may choose from, made on first use (on all ranks alike)."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.default = dist.group.WORLD
        self._special: dict[tuple[bool, int | None], dist.ProcessGroup] = {}

    def nccl(self, *, high_priority: bool, max_ctas: int | None) -> dist.ProcessGroup:
        """A group with NCCL on a high-priority stream, or limited to so many thread blocks."""
        key = (high_priority, max_ctas)
        if key not in self._special:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
            if max_ctas is not None:
                options.config.max_ctas = max_ctas
            self._special[key] = dist.new_group(pg_options=options)
        return self._special[key]


def torch_ddp(**kwargs: Any) -> Build:
    """Torch's own wrapper."""
    return lambda module, groups: DistributedDataParallel(module, **kwargs)


def bucketed(**kwargs: Any) -> Build:
    """Our bucketed wrapper on the default group."""
    return lambda module, groups: BucketedDDP(module, **kwargs)


def peer_copies(**kwargs: Any) -> Build:
    """The bucketed wrapper with copies between NVLink peers instead of NCCL."""

    def build(module: nn.Module, groups: Groups) -> nn.Module:
        hook = PeerCopyAverage(groups.default)
        return BucketedDDP(module, comm_hook=hook, missing_gradients="zeros", **kwargs)

    return build


def tuned_nccl(*, high_priority: bool = False, max_ctas: int | None = None, **kwargs: Any) -> Build:
    """The bucketed wrapper on a group with other NCCL settings."""

    def build(module: nn.Module, groups: Groups) -> nn.Module:
        group = groups.nccl(high_priority=high_priority, max_ctas=max_ctas)
        return BucketedDDP(module, process_group=group, **kwargs)

    return build


VARIANTS: dict[str, Build] = {
    "no-communication": lambda module, groups: module,
    "torch-25": torch_ddp(bucket_cap_mb=25),
    "torch-25-views": torch_ddp(bucket_cap_mb=25, gradient_as_bucket_view=True),
    "torch-25-views-static": torch_ddp(
        bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True
    ),
    "torch-25-static": torch_ddp(bucket_cap_mb=25, static_graph=True),
    "torch-100": torch_ddp(bucket_cap_mb=100),
    "torch-100-views": torch_ddp(bucket_cap_mb=100, gradient_as_bucket_view=True),
    "torch-100-views-static": torch_ddp(
        bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True
    ),
    "torch-100-static": torch_ddp(bucket_cap_mb=100, static_graph=True),
    "naive": lambda module, groups: NaiveDDP(module),
    "flat": lambda module, groups: FlatDDP(module),
    "overlap": lambda module, groups: OverlapDDP(module),
    "default": bucketed(),
    "inplace-25": bucketed(bucket_size_mb=25),
    "inplace-100": bucketed(bucket_size_mb=100),
    "inplace-250": bucketed(bucket_size_mb=250),
    "inplace-500": bucketed(bucket_size_mb=500),
    "inplace-1000": bucketed(bucket_size_mb=1000),
    "inplace-250-last-10": bucketed(bucket_size_mb=250, last_bucket_size_mb=10),
    "inplace-250-last-250": bucketed(bucket_size_mb=250, last_bucket_size_mb=None),
    "inplace-250-high-priority": tuned_nccl(bucket_size_mb=250, high_priority=True),
    "inplace-250-16-ctas": tuned_nccl(bucket_size_mb=250, max_ctas=16),
    "copy-100": bucketed(bucket_size_mb=100, copy=True),
    "copy-250": bucketed(bucket_size_mb=250, copy=True),
    "default-peer-copy": peer_copies(),
    "default-high-priority": tuned_nccl(high_priority=True),
    "default-16-ctas": tuned_nccl(max_ctas=16),
    "default-bf16-wire": bucketed(wire_dtype=torch.bfloat16),
    "default-copy": bucketed(copy=True),
    "peer-copy-100": peer_copies(bucket_size_mb=100),
    "peer-copy-250": peer_copies(bucket_size_mb=250),
    "bf16-wire-100": bucketed(bucket_size_mb=100, wire_dtype=torch.bfloat16),
    "bf16-wire-250": bucketed(bucket_size_mb=250, wire_dtype=torch.bfloat16),
}
# What a cell measures when --variants does not say; the first cell has the full comparison.
SHORT = ("no-communication", "torch-25", "torch-100-views", "torch-100-views-static", "default")
FULL = (
    *SHORT,
    "torch-25-views",
    "torch-25-views-static",
    "naive",
    "flat",
    "overlap",
    "inplace-100",
    "inplace-250",
    "inplace-500",
    "default-copy",
    "default-high-priority",
    "default-16-ctas",
    "default-bf16-wire",
    "default-peer-copy",
    "peer-copy-250",
)
