"""Which ranks hold a shard each, and which hold the same shard.

With a two-dimensional mesh parameters are cut over its last dimension only, such as the GPUs of one
node, where gathers are fast. Gradients are reduce-scattered there, and the shards all-reduced
across the first dimension, over which everything is replicated (hybrid sharding).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.ranks import Ranks, all_gather_json, name_ranks, resolve_group
from shard_optim.communication import CollectiveError
from shard_optim.json_messages import decode, encode


class Mesh:
    """The ranks that train one model or optimizer, which owns this. Collective to build.

    Its collectives raise ``CollectiveError`` if a peer died or timed out.

    Args:
        shards: the group of ranks that together hold every parameter once.
        replicas: that of the ranks that hold the same shard as this one; None if there is no other.
        everyone: all of them, by their numbers in the default group.
        device, owner: as for ``Ranks``.
    """

    def __init__(
        self,
        shards: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        everyone: list[int],
        *,
        device: torch.device,
        owner: str,
    ) -> None:
        self.shards = Ranks(shards, device, owner, error=CollectiveError)
        self.replicas = None
        if replicas is not None:
            self.replicas = Ranks(replicas, device, owner, error=CollectiveError)
        self.everyone = everyone
        # Random, the same on all of these ranks and of no other mesh.
        self.name = str(self.gather("the naming of the ranks", secrets.token_hex(4))[0])

    @property
    def number(self) -> int:
        """This rank's position in ``everyone``."""
        return self.everyone.index(dist.get_rank())

    @property
    def levels(self) -> list[Ranks]:
        """Ranks such that a broadcast from the first of each in turn reaches all ranks."""
        return [self.shards] if self.replicas is None else [self.replicas, self.shards]

    @property
    def first(self) -> bool:
        """Whether this rank is the first one of every level."""
        return all(ranks.rank == 0 for ranks in self.levels)

    @property
    def first_replica(self) -> bool:
        """Whether this rank is one of those that together hold the first copy of everything."""
        return self.replicas is None or self.replicas.rank == 0

    def broadcast(self, what: str, values: Tensor) -> None:
        """Overwrites a tensor with the first rank's."""
        for ranks in self.levels:
            ranks.together(what, ranks.overwrite_with_rank_0, [values])

    def broadcast_json(self, what: str, value: Any) -> Any:
        """The first rank's JSON value, held once, unlike gathered ones."""
        text = bytearray(json.dumps(value if self.first else None).encode())
        size = torch.tensor([len(text)], device=self.shards.device)
        self.broadcast(what, size)
        text = text.ljust(int(size))[: int(size)]  # memory that both torch and Python can use
        values = torch.frombuffer(text, dtype=torch.uint8)
        sent = values.to(self.shards.device)
        self.broadcast(what, sent)
        values.copy_(sent)
        return json.loads(text)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's JSON value, in the order of ``everyone``; tuples have become lists."""
        everyone: list[Any] = [value]
        for ranks in reversed(self.levels):
            gathered = ranks.together(what, all_gather_json, everyone, ranks.control)
            everyone = [each for several in gathered for each in several]
        return everyone

    def agree(self, facts: Sequence[str], *, must: str, remedy: str) -> None:
        """Raises ModelMismatchError on every rank unless facts, general ones first, are equal."""
        pairs = [(name, text) for name, _, text in (fact.partition(" ") for fact in facts)]
        words = "the comparison of what the ranks make"
        gather = partial(self.gather, words)
        self.shards.agree(pairs, must=must, remedy=remedy, gather=gather)


def attempt(call: Callable[[], Any]) -> list[Any]:
    """What ``call`` raises or returns, as JSON for other ranks: see ``outcomes``."""
    try:
        return ["", "", encode(call())]
    except Exception as error:  # noqa: BLE001 - raised by ``outcomes``, on every rank
        return [type(error).__name__, str(error), None]


def outcomes(what: str, attempts: Sequence[Sequence[Any]]) -> list[Any]:
    """What each rank's attempt returned. Every rank has the same attempts, so all raise or none.

    Errors of arguments or files that failed ranks have in common are raised, else CollectiveError.
    """
    failed = {rank: (kind, text) for rank, (kind, text, _) in enumerate(attempts) if kind}
    for known in (FileExistsError, FileNotFoundError, TypeError, ValueError):
        if failed and all(kind == known.__name__ for kind, _ in failed.values()):
            text = next(text for _, text in failed.values())
            alone = len(failed) < len(attempts)
            raise known(f"{text} (on {name_ranks([*failed])})" if alone else text)
    if failed:
        shown = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in failed.items())
        raise CollectiveError(
            f"every rank must succeed in {what}, but some failed: {shown}. Earlier checkpoints are "
            "untouched. Fix the cause and try again"
        )
    return [decode(value) for *_, value in attempts]


def on_every_rank(
    what: str, call: Callable[[], Any], gather: Callable[[str, Any], list[Any]]
) -> list[Any]:
    """Runs ``call`` on every rank; returns all results, or raises on all as ``outcomes`` does.

    ``gather``, given words for errors and a JSON value, returns every rank's.
    """
    return outcomes(what, gather(what, attempt(call)))


def resolve_mesh(process_group: Any, *, device: torch.device, owner: str) -> Mesh:
    """The ranks of a group, of a mesh of one or two dimensions, or of the default group.

    RuntimeError without a process group; TypeError or ValueError for what is none of these.
    """
    if not isinstance(process_group, (dist.ProcessGroup, DeviceMesh, type(None))):
        raise TypeError(
            "process_group must be a process group that this rank belongs to, or a device mesh, "
            f"but got {process_group!r}. Pass what torch.distributed.new_group() returned on the "
            "ranks of the group, or leave it out for the default group."
        )
    if isinstance(process_group, DeviceMesh) and process_group.ndim > 2:
        raise ValueError(
            "process_group must be a device mesh of one dimension, or of two to replicate over the "
            f"first and shard over the second, but got {process_group.ndim} dimensions. Pass a "
            "part of the mesh."
        )
    before = f"a {owner} is made"
    if not isinstance(process_group, DeviceMesh) or process_group.ndim == 1:
        group = resolve_group(process_group, before=before)
        ranks = dist.get_process_group_ranks(group)
        return Mesh(group, None, ranks, device=device, owner=owner)
    resolve_group(None, before=before)
    shards, replicas = process_group.get_group(1), process_group.get_group(0)
    others = None if replicas.size() == 1 else replicas
    everyone = process_group.mesh.flatten().tolist()
    return Mesh(shards, others, everyone, device=device, owner=owner)
