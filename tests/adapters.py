"""The names that tests from outside call, each a thin step over the packages' public interfaces."""

from collections.abc import Iterable
from typing import Any

import torch

from ddp_lite import BucketedDDP, OverlapDDP
from flashattn_triton import FlashAttention2PyTorch, FlashAttention2Triton
from shard_optim import FullyShardedDataParallel, ShardedOptimizer


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """Tiled FlashAttention-2 in plain PyTorch: ``.apply(Q, K, V, is_causal)``."""
    return FlashAttention2PyTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton: ``.apply(Q, K, V, is_causal)``."""
    return FlashAttention2Triton


get_flash_autograd_function_triton = get_flashattention_autograd_function_triton


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Wraps ``module`` so that each parameter's gradient is all-reduced during backward."""
    return OverlapDDP(module)


def ddp_individual_parameters_on_after_backward(
    ddp_model: OverlapDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Waits for the gradients, between backward and the optimizer step."""
    ddp_model.finish_gradient_synchronization()


get_ddp = get_ddp_individual_parameters
ddp_on_after_backward = ddp_individual_parameters_on_after_backward


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float | None) -> torch.nn.Module:
    """Wraps ``module`` so that gradients are all-reduced in buckets during backward."""
    return BucketedDDP(module, bucket_size_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(
    ddp_model: BucketedDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Waits for the gradients, between backward and the optimizer step."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(
    ddp_model: BucketedDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Called before each batch; the wrapper keeps its own books, so there is nothing to reset."""


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """An ``optimizer_cls`` whose state is sharded over the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Wraps ``module`` so that each rank holds a shard of every matrix (ZeRO stage 3)."""
    return FullyShardedDataParallel(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(
    fsdp_model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Waits for the gradients, between backward and the optimizer step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    """All parameters, whole, under the unwrapped module's names. Every rank calls it."""
    return fsdp_model.full_parameters()
