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

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.bucket_layout import MIB
from shard_optim.optimizer_class import as_groups, default_settings, settings_of


class OffloadedOptimizer(Optimizer):
    """Wraps ``optimizer_cls`` so that its state rests in host memory between steps.

    For parameters on one device: ``ShardedOptimizer(offload_state=True)`` updates its shards by it,
    after ``check_offload``. The result is that of ``optimizer_cls`` bit for bit, and so are state
    dicts and checkpoints. Only state with more than one element travels; counts of steps stay where
    the class keeps them.

    Args:
        params: as for any optimizer.
        optimizer_cls: a class that updates each parameter independently of the others.
        chunk_size_mb: parameters that are updated at once, in MB (1024² bytes); a larger parameter
            is a chunk of its own.
        kwargs: for the class.

    Raises:
        ValueError: if parameters are on several devices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        chunk_size_mb: float = 64,
        **kwargs: Any,
    ) -> None:
        groups = as_groups(params)
        self.optimizer_cls = optimizer_cls
        self._kwargs = kwargs
        self._chunk_bytes = chunk_size_mb * MIB
        self._copies: _Copies | None = None
        # Steps one chunk at a time, over groups and state that it is lent for that.
        self._inner = optimizer_cls([settings_of(groups[0]) | {"params": []}], **kwargs)
        super().__init__(groups, default_settings(optimizer_cls, groups, kwargs))

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state by parameter, in host memory. Reading it waits until it has arrived there."""
        if self._copies is not None:
            self._copies.synchronize()
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._state = state

    def step(self, closure: None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; ``kwargs`` are for the class's ``step``."""
        changed = [settings_of(group) for group in self.param_groups]
        for chunk in self._chunks():
            members = [param for several in chunk for param in several]
            if self._copies is None:
                self._copies = _Copies(members[0].device)
            resting = list(self._large_state(members))
            arrived = self._copies.fetch([host for _, _, host in resting])
            for (state, key, _), tensor in zip(resting, arrived, strict=True):
                state[key] = tensor
            try:
                self._update(chunk, changed, kwargs)
            finally:
                host_of = {(id(state), key): host for state, key, host in resting}
                leaving = []
                for state, key, tensor in list(self._large_state(members)):
                    host = host_of.get((id(state), key))
                    state[key] = _host_like(tensor) if host is None else host
                    leaving.append((tensor, state[key]))
                self._copies.store(leaving)
        if self._copies is not None:
            self._copies.let_go(0)
        for group, settings in zip(self.param_groups, changed, strict=True):
            group.update(settings)

    def _update(
        self,
        chunk: Sequence[Sequence[Tensor]],
        changed: list[dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> None:
        """The wrapped class's step; takes note of hyperparameters that it changes."""
        self._inner.state = self._state
        self._inner.param_groups = [
            settings_of(group) | {"params": list(several)}
            for group, several in zip(self.param_groups, chunk, strict=True)
        ]
        self._inner.step(**kwargs)
        for number, local in enumerate(self._inner.param_groups):
            if local["params"]:
                changed[number] = settings_of(local)

    def _large_state(
        self, params: Iterable[Tensor]
    ) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """The state that travels, as (the parameter's state, its key there, the tensor)."""
        for param in params:
            state = self._state.get(param, {})
            for key, value in state.items():
                if _travels(value):
                    yield state, key, value

    def _chunks(self) -> list[list[list[Tensor]]]:
        """Parameters with gradients, as chunks of one list per parameter group."""
        chunks: list[list[list[Tensor]]] = []
        room = 0.0
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not chunks or param.nbytes > room:
                    chunks.append([[] for _ in self.param_groups])
                    room = self._chunk_bytes
                chunks[-1][number].append(param)
                room -= param.nbytes
        return chunks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at any time, on the device of the others."""
        super().add_param_group(param_group)
        devices = {param.device for group in self.param_groups for param in group["params"]}
        if len(devices) > 1:
            self.param_groups.pop()
            raise ValueError(
                "parameters must be on one device to have their state offloaded, but got "
                f"{sorted(map(str, devices))}. Make one optimizer for each device."
            )
        group = self.param_groups[-1]
        # Some classes make their state at construction.
        own = settings_of(group) | {"params": group["params"]}
        made = self.optimizer_cls([own], **self._kwargs).state
        self._state.update(made)
        for state, key, tensor in list(self._large_state(made)):
            state[key] = _host_like(tensor).copy_(tensor)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict of ``optimizer_cls`` over the same parameters, into host memory."""
        resident = {
            number: {key: value for key, value in state.items() if not _travels(value)}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": resident})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if _travels(value):
                    dtype = param.dtype if param.is_floating_point() else value.dtype
                    host = _host_like(value, dtype=dtype, pinned=param.is_cuda)
                    self._state[param][key] = host.copy_(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What the base class's loading ends with: the wrapped class completes older states."""
        self._inner.__setstate__(state)
        self._state, self.param_groups = self._inner.state, self._inner.param_groups


def check_offload(kwargs: Mapping[str, Any]) -> None:
    """Refuses what offloading cannot be combined with, beside what ``check_class`` refuses.

    Raises:
        ValueError: naming the remedy.
    """
    if kwargs.get("capturable"):
        raise ValueError(
            "capturable must be False where optimizer state is offloaded, but got True: a captured "
            "graph would use memory that other state has taken since. Leave capturable out."
        )


class _Copies:
    """Copies of state in both directions, each on a stream of its own.

    State on the device is allocated and freed in the order of the current stream, which waits for
    its copy first. During a step that happens one chunk later, so that the wait costs nothing. The
    memory thus does not depend on how far the host runs ahead.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._to_device = torch.cuda.Stream(device) if cuda else None
        self._to_host = torch.cuda.Stream(device) if cuda else None
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def let_go(self, keep: int) -> None:
        """Frees the state of all but the last ``keep`` chunks on the device.

        The current stream waits until it has been stored.
        """
        while len(self._leaving) > keep:
            stored, _ = self._leaving.popleft()
            torch.cuda.current_stream(self._device).wait_event(stored)

    def fetch(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device of state in host memory; the current stream waits for them."""
        self.let_go(1)
        arriving = [torch.empty_like(host, device=self._device) for host in hosts]
        if self._to_device is None:
            for tensor, host in zip(arriving, hosts, strict=True):
                tensor.copy_(host)
            return arriving
        current = torch.cuda.current_stream(self._device)
        self._to_device.wait_stream(current)  # which may still use the memory for something else
        with torch.cuda.stream(self._to_device):
            for tensor, host in zip(arriving, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        current.wait_stream(self._to_device)
        return arriving

    def store(self, leaving: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Starts copying state to host memory.

        Args:
            leaving: each tensor on the device, and the one in host memory that takes its values.
        """
        if self._to_host is None:
            for tensor, host in leaving:
                host.copy_(tensor)
            return
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            for tensor, host in leaving:
                host.copy_(tensor, non_blocking=True)
            stored = torch.cuda.Event()
            stored.record()
        self._leaving.append((stored, [tensor for tensor, _ in leaving]))

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
