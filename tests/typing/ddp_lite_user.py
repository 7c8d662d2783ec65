"""A user's program on every public name of ddp-lite, for type checkers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite import (
    Bucket,
    BucketedDDP,
    DataParallelBase,
    FlatDDP,
    MissingGradientError,
    ModelMismatchError,
    NaiveDDP,
    OverlapDDP,
    PeerFailureError,
    StepMismatchError,
    SynchronizationError,
    SynchronizationStats,
    UnfinishedSynchronizationError,
)
from ddp_lite.hooks import CommHook
from ddp_lite.peer import PeerCopyAverage


def wrappers(
    module: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh, hook: CommHook
) -> list[str]:
    made: list[DataParallelBase] = [
        NaiveDDP(module),
        FlatDDP(module, process_group=group, missing_gradients="zeros"),
        OverlapDDP(module, process_group=mesh, missing_gradients="error", auto_finish=True),
        BucketedDDP(module, 25.0, last_bucket_size_mb=None, copy=True),
        BucketedDDP(module, "auto", process_group=group, missing_gradients="skip-if-all"),
        BucketedDDP(module, None, wire_dtype=torch.bfloat16, rebucket=True, auto_finish=False),
        BucketedDDP(module, bucket_size_mb=100, comm_hook=None),
        BucketedDDP(module, comm_hook=hook),
        BucketedDDP(module, comm_hook=PeerCopyAverage(group)),
        BucketedDDP(module, comm_hook="collectives"),
    ]
    return [wrapper.explain() for wrapper in made]


def step(wrapped: BucketedDDP) -> nn.Module:
    try:
        with wrapped.no_sync():
            wrapped.forward(torch.zeros(1))
        with wrapped.different_weights():
            wrapped.forward(torch.zeros(1))
        with wrapped.join(lambda: None, average_over="active"):
            wrapped.finish_gradient_synchronization()
    except (MissingGradientError, ModelMismatchError, PeerFailureError) as error:
        print(error)
    except (StepMismatchError, UnfinishedSynchronizationError) as error:
        print(error)
    except SynchronizationError as error:
        print(error)
    wrapped.sync_buffers()
    stats: SynchronizationStats | None = wrapped.stats()
    if stats is not None:
        print(stats.bytes, stats.exposed_wait_ms)
    buckets: tuple[Bucket, ...] | list[Bucket] = wrapped.buckets
    print([name for bucket in buckets for name in bucket.names])
    return wrapped.detach()
