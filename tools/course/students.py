"""Runs the checks of :mod:`tools.course.student_checks` and says in a sentence what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.course import student_checks as checks

from bench_harness.ranks import launch_each

_RANKS = 2
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: what is checked; "harder" checks ask more than the assignment does.
        call: the function, with its settings bound.
        ranks: whether it runs on every rank of a process group.
    """

    name: str
    call: Callable[..., str | None]
    ranks: bool


def every() -> list[Check]:
    """All checks, those of the assignment before harder ones of the same subject."""
    found = []
    for kind in ("pytorch", "triton"):
        for name, queries, keys, causal in (
            ("forward and backward", 128, 128, False),
            ("causal", 128, 128, True),
            ("harder: ragged lengths", 100, 70, False),
            ("harder: ragged lengths, causal", 70, 70, True),
        ):
            call = partial(checks.attention, kind=kind, queries=queries, keys=keys, causal=causal)
            found.append(Check(name=f"attention in {kind}, {name}", call=call, ranks=False))
    sizes: tuple[tuple[str, float | str | None], ...] = (
        ("single parameters", "single"),
        ("one bucket", None),
        ("buckets of 0.0001 MB", 0.0001),
        ("uneven buckets of 0.001 MB", 0.001),
    )
    for name, size in sizes:
        for late in (False, True):
            call = partial(checks.data_parallel, bucket_size_mb=size, late=late)
            full = f"{'harder: ' * late}data parallelism, {name}{', a late rank' * late}"
            found.append(Check(name=full, call=call, ranks=True))
    for harder in (False, True):
        call = partial(checks.sharded_optimizer, harder=harder)
        name = "harder: sharded optimizer, later group and changed rate"
        found.append(Check(name=name if harder else "sharded optimizer", call=call, ranks=True))
    found.append(Check(name="fully sharded", call=checks.fully_sharded, ranks=True))
    return found


def check(adapters: Path, only: Sequence[str] = ()) -> int:
    """Prints a line for each check and returns 1 if one found something wrong.

    Args:
        adapters: a file like the assignment's tests/adapters.py.
        only: parts of names of checks; all if empty.
    """
    path = adapters.resolve()
    if not path.is_file():
        print(f"tools.course: adapters must be a file, but got {adapters}. Name tests/adapters.py.")
        return 2
    chosen = [one for one in every() if not only or any(text in one.name for text in only)]
    wrong = 0
    for one in chosen:
        verdict, sentence = run(one, path)
        wrong += verdict == "wrong"
        print(f"{verdict:7} {one.name}{': ' * bool(sentence)}{sentence}", flush=True)
    print(f"{len(chosen)} checks, {wrong} found something wrong.")
    return 1 if wrong else 0


def run(one: Check, path: Path) -> tuple[str, str]:
    """A verdict, "ok", "wrong" or "skipped", and the sentence that explains it."""
    if not one.ranks:
        return _called(one.call, path)
    outcomes = launch_each(
        _on_rank, _RANKS, str(path), one.call, collective_timeout_s=_SECONDS / 2, timeout_s=_SECONDS
    )
    told = [outcome.value for outcome in outcomes if outcome.ok]
    for verdict, sentence in told:
        if verdict != "ok":
            return verdict, sentence
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is None:
        return "ok", ""
    if failed.killed:
        return "wrong", (
            f"Rank {failed.rank} still waits after {_SECONDS:g} s: a collective is called on one "
            "rank only, or in another order than on the others."
        )
    last = (failed.error or "").strip().splitlines()
    return "wrong", f"Rank {failed.rank} fails: {last[-1][:300] if last else 'it ended early'}"


def _on_rank(rank: int, _world_size: int, _device: Any, path: str, call: Callable[..., Any]) -> Any:
    return _called(partial(call, rank, _RANKS), Path(path))


def _called(call: Callable[..., str | None], path: Path) -> tuple[str, str]:
    """What :func:`run` returns, of one process."""
    import torch

    torch.set_num_threads(1)
    try:
        sentence = call(checks.load(path))
    except checks.Absent as absent:
        return "skipped", f"{absent}."
    return ("ok", "") if sentence is None else ("wrong", sentence)
