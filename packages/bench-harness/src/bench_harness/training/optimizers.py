"""From the settings of an optimizer to an optimizer over a model's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bench_harness.training import settings as of
from bench_harness.training.peer import peer_copies

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a setting names."""
    return None if name is None else _DTYPES[name]


def matrix_names(blocks: Iterable[nn.Module], module: nn.Module) -> set[str]:
    """Names of the matrices in a model's blocks, which Muon updates; ask before sharding."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    return {name for name, p in module.named_parameters() if id(p) in inside}


def state_bytes(arguments: of.Arguments, module: nn.Module, matrices: set[str]) -> int:
    """Bytes of the state that an optimizer keeps for a whole model with fp32 state.

    An imported one is taken to keep two moments, as AdamW does.

    Args:
        matrices: of :func:`matrix_names`.
    """

    def moments(name: str) -> int:
        if isinstance(arguments, of.SGD):
            return 1 if arguments.momentum else 0
        return 1 if isinstance(arguments, of.Muon) and name in matrices else 2

    return sum(4 * moments(name) * p.numel() for name, p in module.named_parameters())


def make_optimizer(
    arguments: of.Arguments,
    module: nn.Module,
    device: torch.device,
    matrices: set[str],
    *,
    capturable: bool = False,
) -> Any:
    """An optimizer over the parameters of a model, or over the shards of a sharded one.

    Args:
        matrices: of :func:`matrix_names`.
        capturable: whether AdamW's step may be recorded in a CUDA graph.
    """
    parameters = module.parameters()
    if isinstance(arguments, of.Imported):
        from bench_harness.workload import imported

        return imported(arguments.name, "optimizer")(parameters, **dict(arguments.arguments))
    if isinstance(arguments, of.BasicsAdamW):
        import basics_model

        return basics_model.AdamW(parameters, lr=arguments.lr)
    assert isinstance(arguments, of.TorchOptimizer)
    fused = device.type == "cuda" if arguments.fused is None else arguments.fused
    shared: dict[str, Any] = {"lr": arguments.lr, "fused": fused}
    if isinstance(arguments, of.ZeroRedundancy):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **shared)
    if isinstance(arguments, of.Sharded):
        from shard_optim import ShardedOptimizer

        return ShardedOptimizer(
            module.named_parameters(),
            torch.optim.AdamW,
            partition=arguments.partition,
            bucket_size_mb=arguments.bucket_size_mb,
            master_dtype=dtype_of(arguments.master_dtype),
            reduce_gradients=arguments.reduce_gradients,
            overlap=arguments.overlap,
            communication=peer_copies() if arguments.communication == "peer-copy" else None,
            offload_state=arguments.offload_state,
            **shared,
        )
    if isinstance(arguments, of.Muon):
        return MuonAndAdamW(module, matrices, **shared)
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    if isinstance(arguments, of.SGD):
        cls, shared["momentum"] = torch.optim.SGD, arguments.momentum
    elif capturable:
        shared["capturable"] = True
    if arguments.offload_state:
        from shard_optim import OffloadedOptimizer

        return OffloadedOptimizer(parameters, cls, **shared)
    return cls(parameters, **shared)


def optimizer_by_name(name: str, module: nn.Module, device: torch.device) -> Any:
    """An unsharded optimizer with its default arguments, of :data:`workload.OPTIMIZERS`."""
    return make_optimizer(of.OPTIMIZERS[name](), module, device, set())


class MuonAndAdamW:
    """Muon for the matrices of a model's blocks, and AdamW for everything else.

    Args:
        module: the model. If it is sharded, each matrix is updated whole, by the rank that owns it.
        matrices: names of those that Muon updates.
        lr: learning rate of both; Muon's is adjusted to updates of AdamW's size.
        fused: AdamW in one kernel.
    """

    def __init__(self, module: nn.Module, matrices: set[str], *, lr: float, fused: bool) -> None:
        import shard_optim

        named = dict(module.named_parameters())
        inside = [p for name, p in named.items() if name in matrices]
        how: dict[str, Any] = {"lr": lr, "adjust_lr_fn": "match_rms_adamw"}
        muon: torch.optim.Optimizer
        if isinstance(module, shard_optim.FullyShardedDataParallel):
            muon = shard_optim.WholeMatrixOptimizer(inside, torch.optim.Muon, **how)
        else:
            muon = torch.optim.Muon(inside, **how)
        others = [p for name, p in named.items() if name not in matrices]
        self._both = (muon, torch.optim.AdamW(others, lr=lr, fused=fused))

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of both by parameter."""
        return {key: value for each in self._both for key, value in each.state.items()}

    def step(self) -> None:
        """Updates all parameters."""
        for each in self._both:
            each.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drops or clears all gradients."""
        for each in self._both:
            each.zero_grad(set_to_none=set_to_none)
