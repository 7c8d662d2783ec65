"""Data-parallel training in four documented steps: naive, flat, overlapped, bucketed."""

from typing import TYPE_CHECKING, Any

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket
from ddp_lite.errors import (
    MissingGradientError,
    ModelMismatchError,
    PeerFailureError,
    StepMismatchError,
    SynchronizationError,
    UnfinishedSynchronizationError,
)
from ddp_lite.wrappers import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

if TYPE_CHECKING:
    from ddp_lite.stats import SynchronizationStats

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketedDDP",
    "DataParallelBase",
    "FlatDDP",
    "MissingGradientError",
    "ModelMismatchError",
    "NaiveDDP",
    "OverlapDDP",
    "PeerFailureError",
    "StepMismatchError",
    "SynchronizationError",
    "SynchronizationStats",
    "UnfinishedSynchronizationError",
]


def __getattr__(name: str) -> Any:
    if name == "SynchronizationStats":  # loaded by those who ask for statistics
        from ddp_lite.stats import SynchronizationStats

        return SynchronizationStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
