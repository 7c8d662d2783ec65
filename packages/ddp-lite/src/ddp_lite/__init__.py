"""Data-parallel training in four documented steps: naive, flat, overlapped, bucketed."""

from ddp_lite.base import DataParallelBase
from ddp_lite.bucketed import BucketedDDP
from ddp_lite.buckets import Bucket
from ddp_lite.errors import (
    MissingGradientError,
    ModelMismatchError,
    PeerFailureError,
    StepMismatchError,
    SynchronizationError,
    UnfinishedSynchronizationError,
)
from ddp_lite.flat import FlatDDP
from ddp_lite.naive import NaiveDDP
from ddp_lite.observers import SynchronizationStats
from ddp_lite.overlap import OverlapDDP

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
