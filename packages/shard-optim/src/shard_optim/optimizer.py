"""An optimizer whose state lives on 1/world_size of the ranks.

ZeRO stage 1 of Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), around any
``torch.optim.Optimizer`` class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.agreement import check_agreement
from shard_optim.buckets import Bucket, Shard, check_layout, flat_gradient
from shard_optim.collectives import resolve_group
from shard_optim.partition import PARTITIONS, Partition, plan_buckets
from shard_optim.support import check_elementwise_state, check_supported

MIB = 1024**2

# What vectorised loads, cuBLAS and Hopper's tensor memory accelerator need at least.
ALIGNMENT_BYTES = 16


class ShardedOptimizer(Optimizer):
    """Wraps ``optimizer_cls`` so that each rank updates, and keeps state for, 1/world_size.

    One step is three phases:

    1. **Gradients.** Every rank hands its part of each gradient to its local optimizer. Gradients
       must already be equal on all ranks (averaged by a data-parallel wrapper).
    2. **Local step.** ``optimizer_cls`` steps this rank's shards. No communication.
    3. **All-gather.** Each bucket's owners send their updated elements to everyone, in place.

    A real ``torch.optim.Optimizer``: ``param_groups`` hold the whole parameters and keep identity,
    so learning-rate schedulers, hooks and ``zero_grad`` work; hyperparameters are read from them
    at every step. ``state`` maps each parameter that this rank owns part of to that part's state.

    Parameters become views of flat buffers (see ``buckets.py``), so construct this after moving
    the model to its device and dtype. A parameter that is frozen at construction takes no space
    in them until the first step that finds it trainable.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs, or groups of either.
            The same on every rank, with the same values.
        optimizer_cls: the class to shard.
        process_group: the data-parallel ranks; None means the default group.
        partition: "flat" gives every rank an equal contiguous slice of each bucket, for optimizers
            that treat every element alike; "whole" gives ranks whole parameters, for optimizers
            that look at shapes.
        bucket_size_mb: size of one all-gather in MB (1024² bytes).
        master_dtype: if given, parameters of another floating dtype are updated through copies of
            this dtype (1/world_size of them per rank) and rounded back after each step.
        kwargs: for ``optimizer_cls``: its defaults, and foreach, fused or capturable.

    Raises:
        RuntimeError: without a process group, or if ranks disagree (every rank raises).
        ValueError: for an unknown partition, or one that ``optimizer_cls`` cannot work under.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        partition: Partition = "flat",
        bucket_size_mb: float = 100.0,
        master_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if partition not in PARTITIONS:
            raise ValueError(f"partition must be one of {PARTITIONS}, got {partition!r}")
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb must be positive, got {bucket_size_mb}")
        check_supported(optimizer_cls, partition, kwargs)
        self.process_group = resolve_group(process_group)
        self.optimizer_cls = optimizer_cls
        self.partition: Partition = partition
        self.rank = dist.get_rank(self.process_group)
        self.world_size = self.process_group.size()
        self.buckets: list[Bucket] = []
        self._bucket_bytes = bucket_size_mb * MIB
        self._master_dtype = master_dtype
        self._frozen: list[int] = []
        self._local: Optimizer | None = None
        self._state_checked = False

        groups = _as_groups(params)
        super().__init__(groups, _defaults_of(optimizer_cls, groups, kwargs))
        self._agree(self.param_groups)
        self._local = optimizer_cls(
            self._local_groups(self._shard(range(len(self.all_params())))), **kwargs
        )
        self._expose_state()

    # --- parameters and groups -------------------------------------------------------------

    def all_params(self) -> list[Tensor]:
        """Every parameter over all groups, in order: position is its key in a state dict."""
        return [param for group in self.param_groups for param in group["params"]]

    def name_of(self, index: int) -> str:
        """The parameter's name if groups carry names, else its number, group and shape."""
        for number, group in enumerate(self.param_groups):
            if index < len(group["params"]):
                if "param_names" in group:
                    return str(group["param_names"][index])
                shape = tuple(group["params"][index].shape)
                return f"parameter {index} of group {number} with shape {shape}"
            index -= len(group["params"])
        raise IndexError(f"no parameter has number {index}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at any time. Every rank must add the same group.

        Raises:
            RuntimeError: on every rank, if the groups differ between ranks.
            ValueError: for a parameter listed twice or of an unsupported memory layout.
        """
        first = len(self.all_params())
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, first)
            if self._local is not None:
                self._agree([group])
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        if self._local is not None:
            shards = self._shard(range(first, first + len(group["params"])))
            self._local.add_param_group(self._local_groups(shards)[-1])
            self._expose_state()

    def _check_group(self, group: dict[str, Any], first: int) -> None:
        params = group["params"]
        if len({id(param) for param in params}) != len(params):
            raise ValueError(
                "each parameter may be listed once, but a group lists one twice; "
                "pass module.parameters(), which yields tied parameters once"
            )
        for index, param in enumerate(params, start=first):
            check_layout(param, self.name_of(index))

    def _agree(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises on every rank unless all ranks describe the same optimizer."""
        lines = [
            f"{self.optimizer_cls.__module__}.{self.optimizer_cls.__qualname__}, "
            f"partition {self.partition}, {len(self.param_groups)} groups"
        ]
        for number, group in enumerate(groups, start=len(self.param_groups) - len(groups)):
            settings = {key: value for key, value in group.items() if key != "params"}
            names = settings.pop("param_names", [""] * len(group["params"]))
            lines += [f"group {number}: {key} = {value}" for key, value in sorted(settings.items())]
            lines += [
                f"group {number}: parameter {position} {name} {tuple(param.shape)} {param.dtype} "
                f"{param.device.type} {'trainable' if param.requires_grad else 'frozen'}"
                for position, (param, name) in enumerate(zip(group["params"], names, strict=True))
            ]
        params = [param for group in groups for param in group["params"]]
        device = params[0].device if params else torch.device("cpu")
        check_agreement(lines, group=self.process_group, device=device)

    def _shard(self, indices: Iterable[int]) -> list[Shard]:
        """Places the trainable ones of these parameters in new buckets; returns our shards."""
        params = self.all_params()
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for index in indices:
            if params[index].requires_grad:
                kinds[params[index].dtype, params[index].device].append(index)
            else:
                self._frozen.append(index)
        added = []
        for (dtype, _), members in kinds.items():
            plans = plan_buckets(
                [params[index].numel() for index in members],
                world_size=self.world_size,
                partition=self.partition,
                bucket_numel=max(1, int(self._bucket_bytes / dtype.itemsize)),
                alignment=max(1, ALIGNMENT_BYTES // dtype.itemsize),
            )
            for plan in plans:
                chosen = [members[position] for position in plan.members]
                added.append(
                    Bucket(
                        [params[index] for index in chosen],
                        indices=chosen,
                        names=[self.name_of(index) for index in chosen],
                        plan=plan,
                        shaped=self.partition == "whole",
                        master_dtype=self._master_dtype,
                        group=self.process_group,
                    )
                )
        self.buckets += added
        return [shard for bucket in added for shard in bucket.shards]

    def _shards(self) -> list[Shard]:
        return [shard for bucket in self.buckets for shard in bucket.shards]

    def _local_groups(self, shards: Sequence[Shard]) -> list[dict[str, Any]]:
        """Our groups with shards in place of parameters, in the parameters' order."""
        by_param = {id(shard.param): shard.tensor for shard in shards}
        return [
            _settings(group)
            | {"params": [by_param[id(p)] for p in group["params"] if id(p) in by_param]}
            for group in self.param_groups
        ]

    def _adopt_unfrozen(self) -> None:
        """Gives parameters that became trainable a place; the same on every rank."""
        params = self.all_params()
        thawed = [index for index in self._frozen if params[index].requires_grad]
        if not thawed:
            return
        assert self._local is not None
        self._frozen = [index for index in self._frozen if index not in thawed]
        added = self._local_groups(self._shard(thawed))
        for group, extra in zip(self._local.param_groups, added, strict=True):
            group["params"].extend(extra["params"])

    # --- step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters on all ranks.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients on.
            kwargs: passed to the local optimizer's ``step``.

        Returns:
            What the closure returned, or None.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._local is not None
        self.wait()
        self._adopt_unfrozen()
        shards = self._shards()
        self._attach_gradients(shards)
        self._push_settings()
        self._local.step(**kwargs)
        self._pull_settings()
        for shard in shards:
            shard.tensor.grad = None
        self._check_state(shards)
        for bucket in self.buckets:
            bucket.write_back_masters()
        self._expose_state()
        for bucket in self.buckets:
            bucket.launch_gather()
        self.wait()
        return loss

    def wait(self) -> None:
        """Waits until every parameter holds its updated values.

        On CUDA the current stream waits, not the host.
        """
        for bucket in self.buckets:
            bucket.wait_gather()

    def _attach_gradients(self, shards: Sequence[Shard]) -> None:
        """Hands each shard its part of the parameter's gradient: a view, or a master's copy."""
        for shard in shards:
            grad = flat_gradient(shard.param, shard.name)
            if grad is None:
                shard.tensor.grad = None
                continue
            part = grad.narrow(0, shard.span.start, shard.span.length)
            if self.partition == "whole":
                part = part.as_strided(shard.view.size(), shard.view.stride())
            shard.tensor.grad = part.to(shard.tensor.dtype)

    def _check_state(self, shards: Sequence[Shard]) -> None:
        """Once state exists: does an unknown class really work under a flat partition?"""
        assert self._local is not None
        if self.partition == "flat" and not self._state_checked and self._local.state:
            for shard in shards:
                check_elementwise_state(self._local, shard)
            self._state_checked = True

    def _push_settings(self) -> None:
        assert self._local is not None
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(_settings(group))

    def _pull_settings(self) -> None:
        """Some optimizers count or adapt in their groups while stepping."""
        assert self._local is not None
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update(_settings(local))

    def _expose_state(self) -> None:
        """Shows the local state under the parameters' identity."""
        assert self._local is not None
        self.state.clear()
        for shard in self._shards():
            if shard.tensor in self._local.state:
                self.state[shard.param] = self._local.state[shard.tensor]


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Normalises the constructor's argument to a list of groups, without copying parameters."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one tensor")
    items = list(params)
    if not items:
        raise ValueError("a sharded optimizer needs at least one parameter, got an empty list")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    return [dict(group) for group in items]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _defaults_of(
    optimizer_cls: type[Optimizer], groups: Sequence[dict[str, Any]], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The class's hyperparameters with their defaults, from an instance over one element."""
    placeholder = torch.nn.Parameter(torch.zeros(1, 1))
    return optimizer_cls([_settings(groups[0]) | {"params": [placeholder]}], **kwargs).defaults
