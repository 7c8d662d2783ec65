"""Mistakes in calls of ddp-lite: type checkers refuse the marked lines and no others."""

from torch import nn

from ddp_lite import BucketedDDP, NaiveDDP


def mistakes(module: nn.Module) -> None:
    BucketedDDP(module, bucket_cap_mb=25)  # refused
    BucketedDDP(module, device_ids=[0])  # refused
    BucketedDDP(module, "automatic")  # refused
    BucketedDDP(module, missing_gradients="ignore")  # refused
    BucketedDDP(module, wire_dtype="bfloat16")  # refused
    BucketedDDP(module, comm_hook="nccl")  # refused
    NaiveDDP(module, find_unused_parameters=True)  # refused
    NaiveDDP(module, missing_gradients=None)  # refused
    BucketedDDP(module).join()  # refused
