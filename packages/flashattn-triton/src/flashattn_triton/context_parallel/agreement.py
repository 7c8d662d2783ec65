"""Errors of ranks that are lost, or that ask for something else than the others.

Every pass begins with a collective of two numbers per rank: a hash of what is asked for, and one of
``cu_seqlens``. All ranks make it, whatever they ask for, so that none waits for another one's
transfer. On a GPU the numbers are compared there: the host waits for them only the first time that
something is asked for. After that a difference is an assertion on the GPU, on every rank.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton.context_parallel.zigzag import on_device

#: Names and values of what is asked for.
Facts = tuple[tuple[str, str], ...]
# Facts that the ranks of a group have agreed on before; emptied when there are too many, on all
# ranks at the same call.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Facts]] = weakref.WeakKeyDictionary()
_LIMIT = 4096


class RankLostError(RuntimeError):
    """A rank has ended, did not come in time, or made other calls than this one."""


def agree(
    group: dist.ProcessGroup, facts: Facts, starts: tuple[int, ...] | None, device: torch.device
) -> None:
    """Compares what the ranks ask for, and where packed sequences start. Collective.

    Raises:
        ValueError: facts or starts differ: on every rank, naming what differs and on which ranks.
        RankLostError: a rank is lost.
        RuntimeError: facts differ that did not before, on GPUs.
    """
    hashes = _hash(facts), 0 if starts is None else _hash(starts)
    agreed = _known.setdefault(group, set())
    is_new = facts not in agreed
    if is_new:  # for the errors of ranks that ask for something else
        _store(group).set(str(hashes[0]), repr(facts))
    own = on_wire(group, on_device(hashes, device, torch.int64))
    found = own.new_empty(group.size() * 2)
    with lost_ranks_named(group, "the agreement on what is computed"):
        dist.all_gather_into_tensor(found, own, group=group)
        known = None if own.is_cuda and not is_new else found.tolist()
    if known is None:
        torch._assert_async(
            (found.view(-1, 2) == own).all(),
            "every rank must attend with the same shapes, mask and cu_seqlens, but they differ. "
            "Make the same calls in the same order on every rank.",
        )
        return
    if known != [*hashes] * group.size():
        raise ValueError(_difference(group, known[::2], known[1::2]))
    if len(agreed) >= _LIMIT:
        agreed.clear()
    agreed.add(facts)


def on_wire(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """``x`` where the group's backend can send it; gloo sends from host memory.

    Ranks that share a GPU need gloo: NCCL refuses them.
    """
    return x.cpu() if x.is_cuda and dist.get_backend(group) == "gloo" else x


@contextlib.contextmanager
def lost_ranks_named(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Says what the ranks did together, where the error of the backend does not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLostError(
            f"every rank must take part in {what}, but it failed on rank {group.rank()} of "
            f"{group.size()}: {error}. A rank is lost or makes other calls: restart all ranks."
        ) from error


def _difference(group: dist.ProcessGroup, facts: Sequence[int], starts: Sequence[int]) -> str:
    """Which facts differ, and on which ranks."""
    found = [dict(_facts_of(group, x)) for x in facts]
    lines = []
    for name in dict.fromkeys(name for of_rank in found for name in of_rank):
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(found):
            ranks.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            lines.append("; ".join(f"{x} on {_named(of)}" for x, of in ranks.items()))
            lines[-1] = f"{name}: {lines[-1]}"
    if len(set(starts)) > 1:
        others = [rank for rank, x in enumerate(starts) if x != starts[0]]
        lines.append(f"cu_seqlens: other values on {_named(others)} than on rank 0")
    return (
        f"every rank must attend with the same shapes, mask and cu_seqlens, but the ranks differ "
        f"in {', and in '.join(lines)}. Pass the same arguments on every rank, and its own tokens."
    )


def _facts_of(group: dist.ProcessGroup, number: int) -> Any:
    """The facts with this hash; every rank has stored its own before it sends the hash."""
    return ast.literal_eval(_store(group).get(str(number)).decode())


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _store(group: dist.ProcessGroup) -> Any:
    store = dist.distributed_c10d._get_default_store()
    prefix = f"flashattn_triton/{group.group_name}"
    return dist.distributed_c10d.PrefixStore(prefix, store)


@functools.lru_cache(maxsize=1024)
def _hash(value: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True)
