"""Optimizer state that rests in host memory and visits the device a chunk at a time.

A step goes through the parameters in chunks. For each chunk:

1. **Fetch.** Its state is copied from pinned host memory to the device, on a stream of its own.
2. **Update.** The wrapped class steps the parameters of the chunk, on the current stream.
3. **Store.** The state is copied back, on a second stream, while the next chunk is fetched: the two
   directions of a PCI Express or NVLink-C2C connection are independent.

The device holds the state of two chunks at most. The host never waits for a copy, except when
somebody reads the state. On a CPU the same code copies between ordinary memory, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_lite.ranks import MEBIBYTE
from shard_optim.bucket_plan import split_by_size
from shard_optim.parameter_groups import all_params
from shard_optim.shard_update import settings_of


def offloaded(optimizer_cls: type[Optimizer], *, chunk_size_mb: float = 64) -> type[Optimizer]:
    """A subclass whose state rests in host memory between steps, with the same results bit for bit.

    For parameters on one device: ``ShardedOptimizer(offload_state=True)`` updates its shards by it,
    ``chunk_size_mb`` (1024² bytes) at once, after ``check_offload``. State dicts and checkpoints
    are those of the class. Only state with more than one element travels; counts of steps stay
    where the class keeps them.
    """
    size = {"_chunk_bytes": chunk_size_mb * MEBIBYTE}
    return type(optimizer_cls.__name__, (_Offloaded, optimizer_cls), size)


class _Offloaded(Optimizer):
    """Comes before an optimizer class, whose ``step`` it calls for a chunk of the parameters."""

    _chunk_bytes: float
    _copies: _Copies | None = None
    _stepping = False

    def __init__(self, params: Iterable[Any], **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        for state, key, tensor in self._large_state(all_params(self.param_groups)):
            state[key] = _host_like(tensor).copy_(tensor)  # some classes make it at construction

    @property
    def state(self) -> Any:
        """The state by parameter, in host memory. Reading it waits until it has arrived there."""
        if self._copies is not None and not self._stepping:
            self._copies.synchronize()
        return self.__dict__["state"]  # where the base class's loading puts it too

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def step(self, closure: None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; ``kwargs`` are for the class's ``step``."""
        groups, self._stepping = self.param_groups, True
        changed = list(map(settings_of, groups))
        try:
            for chunk in self._chunks():
                self._step_chunk(groups, chunk, changed, kwargs)
            if self._copies is not None:
                self._copies.let_go(0)
        finally:
            self.param_groups, self._stepping = groups, False
        for group, settings in zip(groups, changed, strict=True):
            group.update(settings)

    def _step_chunk(
        self,
        groups: Sequence[dict[str, Any]],
        chunk: Sequence[Sequence[Tensor]],
        changed: list[dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> None:
        """One chunk's step; takes note of hyperparameters that the class changes."""
        members = [param for several in chunk for param in several if param.grad is not None]
        if self._copies is None:
            self._copies = _Copies(all_params(groups)[0].device)
        resting = self._large_state(members)
        arrived = self._copies.fetch([host for _, _, host in resting])
        for (state, key, _), tensor in zip(resting, arrived, strict=True):
            state[key] = tensor
        self.param_groups = [
            settings_of(group) | {"params": list(several)}
            for group, several in zip(groups, chunk, strict=True)
        ]
        try:
            super().step(**kwargs)
        finally:
            host_of = {(id(state), key): host for state, key, host in resting}
            leaving = []
            for state, key, tensor in self._large_state(members):
                host = host_of.get((id(state), key))
                state[key] = _host_like(tensor) if host is None else host
                leaving.append((tensor, state[key]))
            self._copies.store(leaving)
        for number, local in enumerate(self.param_groups):
            if local["params"]:
                changed[number] = settings_of(local)

    def _large_state(self, params: Iterable[Tensor]) -> list[tuple[dict[str, Any], str, Tensor]]:
        """The state that travels, as (the parameter's state, its key there, the tensor)."""
        states = (self.__dict__["state"].get(param, {}) for param in params)
        return [(s, key, value) for s in states for key, value in s.items() if _travels(value)]

    def _chunks(self) -> Iterator[list[list[Tensor]]]:
        """All parameters, as chunks of one list per parameter group."""
        groups = self.param_groups
        members = [(number, p) for number, group in enumerate(groups) for p in group["params"]]
        sizes = [0 if param.grad is None else param.nbytes for _, param in members]
        for run in split_by_size(sizes, self._chunk_bytes):
            chunk: list[list[Tensor]] = [[] for _ in groups]
            for number, param in (members[at] for at in run):
                chunk[number].append(param)
            yield chunk

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at any time, on the device of the others."""
        super().add_param_group(param_group)
        devices = {param.device for param in all_params(self.param_groups)}
        if len(devices) > 1:
            self.param_groups.pop()
            raise ValueError(
                "parameters must be on one device to have their state offloaded, but got "
                f"{sorted(map(str, devices))}. Make one optimizer for each device."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of the class over the same parameters, into host memory."""
        resident = {
            number: {key: value for key, value in state.items() if not _travels(value)}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": resident})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, all_params(self.param_groups), strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if _travels(value):
                    own = getattr(self, "moments_dtype", param.dtype)  # AdamW of this package
                    dtype = own if param.is_floating_point() else value.dtype
                    host = _host_like(value, dtype=dtype, pinned=param.is_cuda)
                    self.state[param][key] = host.copy_(value)


def check_offload(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for what offloading cannot be combined with."""
    if kwargs.get("capturable"):
        raise ValueError(
            "capturable must be False where optimizer state is offloaded, but got True: a captured "
            "graph would use memory that other state has taken since. Leave capturable out."
        )


class _Copies:
    """Copies of state in both directions, each on a stream of its own.

    The current stream frees state on the device after its copy, a chunk later, when the wait costs
    nothing: memory does not depend on how far the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._to_device = torch.cuda.Stream(device) if cuda else None
        self._to_host = torch.cuda.Stream(device) if cuda else None
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def let_go(self, keep: int) -> None:
        """Frees all but the last ``keep`` chunks' state, when the current stream has stored it."""
        while len(self._leaving) > keep:
            stored, _ = self._leaving.popleft()
            torch.cuda.current_stream(self._device).wait_event(stored)

    def fetch(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device of state in host memory; the current stream waits for them."""
        self.let_go(1)
        arriving = [torch.empty_like(host, device=self._device) for host in hosts]
        # The memory may still be used for something else.
        self._copy(self._to_device, zip(arriving, hosts, strict=True))
        if self._to_device is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        return arriving

    def store(self, leaving: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Starts copying state, each tensor into the one in host memory beside it."""
        self._copy(self._to_host, ((host, tensor) for tensor, host in leaving))
        if self._to_host is not None:
            stored = self._to_host.record_event()
            self._leaving.append((stored, [tensor for tensor, _ in leaving]))

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Copies each second tensor into the first, after what the current stream has queued."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # none on a CPU
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Makes the host wait until all state has arrived in its memory."""
        if self._to_host is not None:
            self._to_host.synchronize()


def _travels(value: Any) -> bool:
    """Whether a piece of state is large enough to be worth a copy."""
    return isinstance(value, Tensor) and value.numel() > 1


def _host_like(
    tensor: Tensor, *, dtype: torch.dtype | None = None, pinned: bool | None = None
) -> Tensor:
    """Host memory for a tensor; pinned if copies from and to a GPU are to overlap."""
    pinned = tensor.is_cuda if pinned is None else pinned
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pinned)
