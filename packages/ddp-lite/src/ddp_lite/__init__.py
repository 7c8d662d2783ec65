"""Data-parallel training in four documented steps: naive, flat, overlapped, bucketed."""

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
from ddp_lite.stats import SynchronizationStats
from ddp_lite.wrappers import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

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
