"""Communication between ranks: what they agree on, and tensors on their way.

Every pass begins with a collective of two numbers per rank: a hash of what is asked for, and one of
``cu_seqlens``. All ranks make it, whatever they ask for, so that none waits for another one's
transfer. On a GPU the numbers are compared there: the host waits for them only the first time that
something is asked for. After that a difference is an assertion on the GPU, on every rank.

Tensors are on their way while the caller computes, who then waits for them. On a GPU no host waits:
NCCL moves them on a stream of its own, and ``wait`` makes the current stream wait for it.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton.context_parallel.zigzag import Zigzag, on_device

Result = TypeVar("Result")
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
    _pause_before_exit()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLostError(
            f"every rank must take part in {what}, but it failed on rank {group.rank()} of "
            f"{group.size()}: {error}. A rank is lost or makes other calls: restart all ranks."
        ) from error


@functools.cache
def _pause_before_exit() -> None:
    """Gives gloo's threads a moment before the interpreter finalises; works once per process.

    A transfer keeps a Python object of torch's, which the thread of gloo that carried it out
    releases later. If the program is about to exit by then, the interpreter ends that thread, and
    the process aborts after all its work is done (seen with torch 2.15).
    """
    atexit.register(time.sleep, 0.1)


def _difference(group: dist.ProcessGroup, facts: Sequence[int], starts: Sequence[int]) -> str:
    """Which facts differ, and on which ranks."""
    # Every rank has stored its own facts before it sends their hash.
    found = [dict(ast.literal_eval(_store(group).get(str(x)).decode())) for x in facts]
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


# -- tensors on their way --------------------------------------------------------------------------


class UnderWay(Generic[Result]):
    """A result that communication of ``what``, in words, is still to bring.

    ``start`` begins it and returns what is to be waited for; ``finish`` makes the result
    afterwards. ``sent``: tensors that must live until then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        what: str,
        start: Callable[[], Sequence[Any]],
        finish: Callable[[], Result],
        sent: object,
    ) -> None:
        self._group, self._what, self._finish, self._sent = group, what, finish, sent
        with lost_ranks_named(group, what):
            self._works = start()

    def wait(self) -> Result:
        """The result, once it is there."""
        with lost_ranks_named(self._group, self._what):
            for work in self._works:
                work.wait()
        return self._finish()


def gather(group: dist.ProcessGroup, order: Zigzag, own: Tensor) -> UnderWay[Tensor]:
    """Tokens of all ranks: (n, ...) of each to (tokens, ...), as the sequences are packed."""
    missing = order.longest - len(own)
    padded = F.pad(own, (0, 0) * (own.dim() - 1) + (0, missing)) if missing else own.contiguous()
    sent = on_wire(group, padded)
    found = sent.new_empty(group.size() * order.longest, *own.shape[1:])
    rows = gathered_rows(order, own.device)
    return UnderWay(
        group,
        "the gathering of tokens",
        lambda: [dist.all_gather_into_tensor(found, sent, group=group, async_op=True)],
        lambda: found.to(own.device).index_select(0, rows),
        sent,
    )


def sum_of_own(group: dist.ProcessGroup, order: Zigzag, x: Tensor) -> UnderWay[Tensor]:
    """Sums of the ranks' (tokens, ...), of which each rank gets (n, ...), its own tokens."""
    sent = on_wire(group, x.index_select(0, scattered_rows(order, x.device)))
    found = sent.new_empty(order.longest, *x.shape[1:])
    n = order.length(group.rank())
    return UnderWay(
        group,
        "the sum of the gradients of keys",
        lambda: [dist.reduce_scatter_tensor(found, sent, group=group, async_op=True)],
        lambda: found[:n].to(x.device),
        sent,
    )


@functools.lru_cache(maxsize=16)
def gathered_rows(order: Zigzag, device: torch.device) -> Tensor:
    """For each token of the packed sequences, its row among those gathered from all ranks."""
    found = torch.empty(order.starts[-1], dtype=torch.int64)
    for rank in range(order.world_size):
        first = rank * order.longest
        found[own_rows(order, rank)] = torch.arange(first, first + order.length(rank))
    return found.to(device)


@functools.lru_cache(maxsize=16)
def scattered_rows(order: Zigzag, device: torch.device) -> Tensor:
    """For each row that is scattered to the ranks, its row in the packed sequences.

    Every rank has as many rows as the one with most tokens; the first row stands for those missing.
    """
    found = torch.zeros(order.world_size, order.longest, dtype=torch.int64)
    for rank in range(order.world_size):
        found[rank, : order.length(rank)] = own_rows(order, rank)
    return found.flatten().to(device)


@functools.lru_cache(maxsize=64)
def own_rows(order: Zigzag, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """For each token of a rank, its row in the packed sequences."""
    spans = torch.tensor(order.spans(rank))
    lengths = spans[:, 1] - spans[:, 0]
    ends = lengths.cumsum(0)
    shifts = torch.repeat_interleave(spans[:, 0] - ends + lengths, lengths)
    return (torch.arange(int(ends[-1])) + shifts).to(device)
