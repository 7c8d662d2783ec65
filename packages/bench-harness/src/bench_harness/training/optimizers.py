"""Optimizers of a variant, over the parameters of a model or over the shards of a sharded one.

Each function takes the constructor, what it is for, and arguments. Those that it names are this
package's own; the others are passed on. :mod:`bench_harness.training.constructors` says which
short name means which function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from bench_harness.training.constructors import Call, construct
from bench_harness.training.wrappers import peer_copies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters that an optimizer is made for.

    Attributes:
        module: the model, or the wrapper that holds shards.
        matrices: of :func:`matrix_names`.
        capturable: whether AdamW's step may be recorded in a CUDA graph.
    """

    module: nn.Module
    device: torch.device
    matrices: set[str] = field(default_factory=set)
    capturable: bool = False

    def settings(self, lr: float, fused: bool | None) -> dict[str, Any]:
        """Arguments of torch's optimizers; one kernel for all parameters by default on CUDA."""
        return {"lr": lr, "fused": self.device.type == "cuda" if fused is None else fused}


def matrix_names(blocks: Iterable[nn.Module], module: nn.Module) -> set[str]:
    """Names of the matrices in a model's blocks, which Muon updates; ask before sharding."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    return {name for name, p in module.named_parameters() if id(p) in inside}


def state_bytes(optimizer: Call, module: nn.Module, matrices: set[str]) -> int:
    """Bytes of the state that an optimizer keeps for a whole model with fp32 state.

    An imported one is taken to keep two moments, as AdamW does.

    Args:
        matrices: of :func:`matrix_names`.
    """

    def moments(name: str) -> int:
        if optimizer.name == "sgd":
            return 1 if optimizer.get("momentum") else 0
        return 1 if optimizer.name == "muon" and name in matrices else 2

    return sum(4 * moments(name) * p.numel() for name, p in module.named_parameters())


def make_optimizer(optimizer: Call, over: Parameters) -> Any:
    """An optimizer over the parameters of a model, or over the shards of a sharded one."""
    return construct(
        "optimizer", optimizer, over.module.parameters() if ":" in optimizer.name else over
    )


def plain(
    cls: type[torch.optim.Optimizer],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
    **arguments: Any,
) -> Any:
    """One of torch's optimizers.

    Args:
        fused: one kernel for all parameters; None means on CUDA only.
        offload_state: the state rests in host memory, by :class:`shard_optim.ShardedOptimizer`.
    """
    arguments |= over.settings(lr, fused)
    if over.capturable:
        arguments["capturable"] = True
    if offload_state:
        from shard_optim import ShardedOptimizer

        arguments["offload_state"] = True
        return ShardedOptimizer(over.module.parameters(), cls, **arguments)
    return cls(over.module.parameters(), **arguments)


def basics(cls: Callable[..., Any], over: Parameters, *, lr: float = 1e-4, **arguments: Any) -> Any:
    """The optimizer of basics-model."""
    return cls(over.module.parameters(), lr=lr, **arguments)


def muon(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
) -> MuonAndAdamW:
    """:class:`torch.optim.Muon` for the matrices of the blocks, AdamW for everything else.

    Under ``fully-sharded``, :class:`shard_optim.ShardedOptimizer` updates each matrix whole.
    """
    return MuonAndAdamW(over.module, over.matrices, **over.settings(lr, fused))


def zero_redundancy(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
    **arguments: Any,
) -> Any:
    """AdamW in :class:`torch.distributed.optim.ZeroRedundancyOptimizer`."""
    arguments |= over.settings(lr, fused)
    return cls(over.module.parameters(), torch.optim.AdamW, **arguments)


def sharded(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    communication: Literal["peer-copy"] | None = None,
    **arguments: Any,
) -> Any:
    """AdamW in :class:`shard_optim.ShardedOptimizer`.

    Args:
        communication: "peer-copy" is :class:`ddp_lite.peer.PeerCopies`.
    """
    arguments |= over.settings(lr, fused)
    copies = peer_copies() if communication == "peer-copy" else None
    return cls(over.module.named_parameters(), torch.optim.AdamW, communication=copies, **arguments)


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
            muon = shard_optim.ShardedOptimizer(inside, torch.optim.Muon, partition="whole", **how)
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
