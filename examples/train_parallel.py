"""How the ranks of ``train_lm.py`` share a step: replicas of the model, or shards of it.

Every class has the same methods. ``state`` and ``load`` are those of the plain model and the plain
optimizer, so a run may continue with another class.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_settings import SHARDED_PARAMETERS, Settings

from basics_model import TransformerLM
from ddp_lite import BucketedDDP, DataParallelBase, FlatDDP, NaiveDDP, OverlapDDP
from ddp_lite.peer import PeerCopies, PeerCopyAverage, PeerMemory, choose_communication
from shard_optim import (
    AdamW,
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load_full_state,
)

#: State dicts of the model and of the optimizer, on rank 0's CPU; two empty ones elsewhere.
State = tuple[dict[str, Any], dict[str, Any]]


class Parallelism(Protocol):
    """What a training loop needs of the ranks' division of the work."""

    @property
    def module(self) -> nn.Module:
        """What forward calls, on every rank the same number of times."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Over what this rank updates."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Within it, a backward pass is not the last one of an update."""

    def finish(self) -> None:
        """Makes averaged gradients usable; called after the last backward pass."""

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradients by their norm over the whole model, which it returns."""

    def state(self) -> State:
        """Copies of parameters and optimizer state; a collective call."""

    def load(self, optimizer: Mapping[str, Any]) -> None:
        """Loads rank 0's optimizer state; a collective call. The model was loaded before."""

    def explain(self) -> str:
        """What travels between ranks, in one line."""


def make_parallelism(settings: Settings, model: TransformerLM) -> Parallelism:
    """What ``settings.wrapper`` names, around a model whose weights on rank 0 count."""
    if settings.wrapper == "stage-2":
        return ShardedGradients(settings, model)
    if settings.wrapper in SHARDED_PARAMETERS:
        return ShardedParameters(settings, model)
    return Replicas(settings, model)


def _update_rule(settings: Settings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments."""
    arguments = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.moments == "bf16":
        return AdamW, arguments
    # None: the fastest form that the device has
    return torch.optim.AdamW, arguments | {"fused": settings.fused or None}


def _on_cpu(value: Any) -> Any:
    """A copy of nested state with all of its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


class Replicas:
    """Every rank holds the whole model, and a wrapper of ``ddp_lite`` averages the gradients.

    With ``settings.sharded``, each rank updates, and keeps optimizer state for, a share of it.
    """

    def __init__(self, settings: Settings, model: TransformerLM) -> None:
        self.model = model
        classes = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP}
        self.module: DataParallelBase
        if settings.wrapper in classes:
            self.module = classes[settings.wrapper](model)
        elif settings.wrapper == "peer-copy":
            group = dist.group.WORLD
            assert group is not None
            self.module = BucketedDDP(
                model, comm_hook=PeerCopyAverage(group), missing_gradients="zeros"
            )
        else:
            self.module = BucketedDDP(model, bucket_size_mb=settings.bucket_size_mb)
        update, arguments = _update_rule(settings)
        self.optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(model.parameters(), update, **arguments)
            if settings.sharded
            else update(model.parameters(), **arguments)
        )

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are added up on each rank, and averaged once."""
        return self.module.no_sync()

    def finish(self) -> None:
        """Waits for the averages."""
        self.module.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> Tensor:
        """Every rank holds all gradients."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def state(self) -> State:
        """Of the replica on rank 0, and of all ranks' shares of the optimizer's state."""
        if isinstance(self.optimizer, ShardedOptimizer):
            whole = full_state(self.model, self.optimizer) or {"model": {}, "optimizer": {}}
            return whole["model"], whole["optimizer"]
        if dist.get_rank() != 0:
            return {}, {}
        return _on_cpu(self.model.state_dict()), _on_cpu(self.optimizer.state_dict())

    def load(self, optimizer: Mapping[str, Any]) -> None:
        """Rank 0's optimizer state; the wrapper has given its weights to the others."""
        if isinstance(self.optimizer, ShardedOptimizer):
            load_full_state({"optimizer": optimizer}, optimizer=self.optimizer)
            return
        given = [optimizer]
        dist.broadcast_object_list(given, src=0)
        self.optimizer.load_state_dict(dict(given[0]))

    def explain(self) -> str:
        """What the wrapper says of itself."""
        return self.module.explain()


class ShardedGradients:
    """Whole parameters, gradients and optimizer state in shards (ZeRO stage 2)."""

    def __init__(self, settings: Settings, model: TransformerLM) -> None:
        self.module: nn.Module = model
        for parameter in model.parameters():  # the optimizer does not hand them out
            dist.broadcast(parameter.detach(), 0)
        update, arguments = _update_rule(settings)
        self.optimizer = ShardedOptimizer(
            model.parameters(),
            update,
            reduce_gradients=True,
            overlap="next-forward",
            **arguments,
        )
        self.optimizer.attach(model)

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients are added up on each rank, and averaged once."""
        return self.optimizer.no_sync()

    def finish(self) -> None:
        """Nothing: the optimizer's step waits for the averages."""

    def clip(self, max_norm: float) -> Tensor:
        """By the norm over all shards."""
        return self.optimizer.clip_grad_norm_(max_norm)

    def state(self) -> State:
        """Of the whole parameters on rank 0, and of all ranks' shares of the optimizer's state."""
        whole = full_state(self.module, self.optimizer) or {"model": {}, "optimizer": {}}
        return whole["model"], whole["optimizer"]

    def load(self, optimizer: Mapping[str, Any]) -> None:
        """Rank 0's optimizer state."""
        load_full_state({"optimizer": optimizer}, optimizer=self.optimizer)

    def explain(self) -> str:
        """The stage in words."""
        return (
            f"ZeRO stage 2 on {dist.get_world_size()} ranks: gradients are averaged in shards "
            "during backward, and updated parameters are gathered under the next forward"
        )


class ShardedParameters:
    """Parameters, gradients and optimizer state in shards (ZeRO stage 3)."""

    def __init__(self, settings: Settings, model: TransformerLM) -> None:
        bf16 = torch.bfloat16 if settings.precision == "bf16" else None
        self.kept = settings.wrapper == "stage-3-kept"
        memory, self._communication = _shared_memory(settings, model)
        #: Called after every replay of a recorded update, so that a lost rank is named.
        self.after_replay = None if memory is None else memory.watch
        self.module = FullyShardedDataParallel(
            model,
            compute_dtype=bf16,
            reshard_after_forward=not self.kept,
            communication=None if memory is None else PeerCopies(memory),
        )
        update, arguments = _update_rule(settings)
        self.optimizer: torch.optim.Optimizer = update(self.module.parameters(), **arguments)
        if settings.max_norm == 0 and settings.accumulate == 1:
            self.module.update_in_backward(self.optimizer)

    def accumulating(self) -> AbstractContextManager[None]:
        """Every backward pass adds to the shards: whole gradients would not fit."""
        return nullcontext()

    def finish(self) -> None:
        """Waits for the averages."""
        self.module.finish_gradient_synchronization()

    def clip(self, max_norm: float) -> Tensor:
        """By the norm over all shards."""
        return self.module.clip_grad_norm_(max_norm)

    def state(self) -> State:
        """Gathered one tensor at a time on rank 0's CPU."""
        whole = full_state(self.module, self.optimizer) or {"model": {}, "optimizer": {}}
        for group in whole["optimizer"].get("param_groups", []):  # as of an unrecorded update
            group["lr"] = float(group["lr"])
            if "capturable" in group:
                group["capturable"] = False
        return whole["model"], whole["optimizer"]

    def load(self, optimizer: Mapping[str, Any]) -> None:
        """Rank 0's optimizer state, of which every rank takes its share."""
        load_full_state({"optimizer": optimizer}, optimizer=self.optimizer)

    def explain(self) -> str:
        """The stage in words."""
        gathers = "once a step" if self.kept else "for forward and again for backward"
        return (
            f"ZeRO stage 3 on {dist.get_world_size()} ranks: parameters, gradients and optimizer "
            f"state in shards, each block gathered {gathers}{self._communication}"
        )


def _shared_memory(settings: Settings, model: TransformerLM) -> tuple[PeerMemory | None, str]:
    """What copies between GPUs need, None for NCCL, and what to say of it. Collective.

    Raises:
        ValueError: on every rank, if there must be copies, but these GPUs cannot make them.
    """
    group = dist.group.WORLD
    if settings.communication == "nccl" or group is None:
        return None, ""
    if settings.communication == "auto":
        numel = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        choice = choose_communication(group, numel * (2 if settings.precision == "bf16" else 4))
        if choice.name != "peer-copy":
            return None, f", over NCCL ({choice.reason})"
    try:
        return PeerMemory(group), ", by copies between GPUs"
    except RuntimeError as error:  # too little memory, or a container that forbids sharing it
        if settings.communication == "auto":
            return None, f", over NCCL ({error})"
        raise ValueError(f"--communication peer-copy: {error}") from None
