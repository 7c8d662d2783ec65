"""Changes that every rank must make alike, compared through the process group's store.

A rank that has made a change leaves a report in the store, and waits for the reports of the other
ranks. A collective cannot compare changes, because a rank that has made none is running the
collectives of its training step. That rank waits there until the group's timeout, and then finds
the report.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# How many changes the ranks of a group have compared: between changes, equal on all of them.
_comparisons: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

_REMEDY = (
    "Change requires_grad of the same parameters on every rank, before the same forward, and "
    "restart from the last checkpoint."
)
_MOST_NAMES = 8

# A store does not answer at all if the process that hosts it has stopped.
_SECONDS_TO_LOOK = 5.0
_SECONDS_BETWEEN_LOOKS = 0.005


def agree_on_trainable(
    frozen: Sequence[str], thawed: Sequence[str], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Waits until every rank has frozen and unfrozen the same parameters as this one.

    Args:
        frozen: names of the parameters that no longer require gradients.
        thawed: names of those that require gradients again.
        group: the ranks.
        device: where the group's collectives run, whose timeout holds here too.

    Raises:
        RuntimeError: if another rank changed other parameters, or none within the timeout.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":  # whose other ranks do not exist
        return
    number = _comparisons.setdefault(group, 0)
    store, rank = group.get_group_store(), group.rank()
    keys = _keys(group, number)
    facts = "\n".join([*frozen, "", *thawed])
    own = f"{hashlib.sha256(facts.encode()).hexdigest()} {_in_words(frozen, thawed)}"
    store.set(keys[rank], own)
    timeout: timedelta = group._get_backend(device).options._timeout
    deadline = time.monotonic() + timeout.total_seconds()
    # Store.wait() would keep other threads, such as NCCL's watchdog, from using the store.
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    reports = _reports(group, keys)
    if len(reports) == len(keys):
        _comparisons[group] = number + 1
    if len(reports) < len(keys) or set(reports.values()) != {own}:
        raise RuntimeError(
            f"requires_grad must be changed alike on every rank, but {_by_rank(group, reports)}. "
            f"{_REMEDY}"
        )
    if number > 0:  # every rank has read the reports before these
        store.delete_key(_keys(group, number - 1)[rank])


def pending_change(group: dist.ProcessGroup) -> str | None:
    """Describes a change that another rank waits for this rank to make, or returns None.

    Such a change explains why a collective of this rank has failed.
    """
    if group not in _comparisons:
        return None
    reports: dict[int, str] = {}

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store went with the rank that hosted it
            reports.update(_reports(group, _keys(group, _comparisons[group])))

    looking = threading.Thread(target=look, daemon=True, name="shard_optim pending change")
    looking.start()
    looking.join(_SECONDS_TO_LOOK)
    if not reports or group.rank() in reports:
        return None
    return f"Before this step {_by_rank(group, dict(reports))}. {_REMEDY}"


def expect_changes(group: dist.ProcessGroup) -> None:
    """From now on ``pending_change`` looks for reports in this group's store."""
    _comparisons.setdefault(group, 0)


def _keys(group: dist.ProcessGroup, number: int) -> list[str]:
    return [f"shard_optim/trainable/{number}/{rank}" for rank in range(group.size())]


def _reports(group: dist.ProcessGroup, keys: Sequence[str]) -> dict[int, str]:
    """The reports that are there, by rank of the group."""
    store = group.get_group_store()
    return {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}


def _in_words(frozen: Sequence[str], thawed: Sequence[str]) -> str:
    parts = []
    for verb, names in (("froze", frozen), ("unfroze", thawed)):
        if names:
            more = len(names) - _MOST_NAMES
            listed = [*names[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])]
            parts.append(f"{verb} {', '.join(listed)}")
    return " and ".join(parts)


def _by_rank(group: dist.ProcessGroup, reports: Mapping[int, str]) -> str:
    """Which ranks changed what: ``rank 0 froze a, and ranks 1, 2 changed nothing``."""
    ranks_by_report: dict[str, list[int]] = {}
    for position, rank in enumerate(dist.get_process_group_ranks(group)):
        report = reports.get(position, "- changed nothing")
        ranks_by_report.setdefault(report, []).append(rank)
    parts = []
    for report, ranks in ranks_by_report.items():
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        parts.append(f"{who} {report.split(' ', 1)[1]}")  # without the digest
    return ", and ".join(parts)
