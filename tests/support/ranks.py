"""Runs functions of test files on several ranks, over the launcher of bench-harness.

Every wait has a deadline; a rank's traceback, what it printed, and the stacks of one that is killed
because it is still running reach the test. Ranks live on when another one fails.

Ranks treat warnings as the test does that launches them: as errors, but for those that
``pyproject.toml`` or a mark of the test excepts.

Ranks on CPU are forked from a server process that has torch imported already, which makes a
two-rank test start in about a tenth of a second. Ranks on GPUs are started afresh: CUDA cannot be
used in a process whose parent has asked for it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import multiprocessing.forkserver
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from bench_harness.process import PRELOAD
from bench_harness.ranks import RankOutcome, launch_each

# Test files import pytest and what they test, which takes longer than the start of a rank and most
# checks.
_PRELOAD = [*PRELOAD, "pytest", "ddp_lite", "shard_optim", "ranks"]


class RanksFailed(AssertionError):  # noqa: N818 - a failed assertion, named as one
    """At least one rank raised, died, or outlived the timeout."""


def start_server() -> None:
    """Starts the server that ranks on CPU are forked from; returns while it is importing torch."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 120.0,
    collective_timeout: float = 60.0,
    check: bool = True,
) -> list[RankOutcome]:
    """Calls ``function(rank, world_size, *args)`` on every rank of a new process group.

    Args:
        function: a module-level function of a test file.
        args: picklable; tensors should be small.
        backend: "gloo" on CPU; "nccl" also makes rank r use ``cuda:r``.
        timeout: seconds until ranks still running are killed and reported. The default leaves room
            for a machine whose cores are busy with something else.
        collective_timeout: the process group's own timeout in seconds, which its first connections
            need as well. A test of what happens after a timeout shortens it with
            ``set_collective_timeout`` when its ranks have connected.
        check: raise if any rank failed. With False the caller inspects the outcomes (fault tests).

    Returns:
        One outcome per rank, in rank order.

    Raises:
        RanksFailed: with every failed rank's traceback or signal.
    """
    if backend != "nccl":
        start_server()
    filters = [tuple(getattr(part, "pattern", part) for part in each) for each in warnings.filters]
    source = (Path(inspect.getfile(function)).resolve(), function.__qualname__)
    outcomes = launch_each(
        _call,
        world_size,
        source,
        filters,
        args,
        backend=backend,
        timeout_s=timeout,
        collective_timeout_s=collective_timeout,
        start_method="spawn" if backend == "nccl" else "forkserver",
    )
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if check and failed:
        raise RanksFailed("\n\n".join(map(_describe, failed)))
    return outcomes


def run_case(
    function: Callable[..., Any],
    world_size: int,
    cases: Iterable[Any],
    *case: Any,
    backend: str = "gloo",
    timeout: float = 120.0,
) -> list[Any]:
    """One of several cases that share a start of ranks, so that each is a test of its own.

    The first test that asks starts the ranks, which call ``function(rank, world_size, *case)`` for
    one case after the other. A rank that fails in one takes no part in the cases after it.

    Args:
        function: a module-level function of a test file.
        cases: all of them, in this order: names or numbers, or tuples of these.
        case: the one that is asked for.
        backend: see ``run_ranks``, as for ``timeout``, in which all cases must end.
        timeout: see ``backend``.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RanksFailed: with the traceback of each rank on which this case, or one before it, failed.
    """
    tuples = tuple(each if isinstance(each, tuple) else (each,) for each in cases)
    outcomes = _outcomes_of_all(function, world_size, tuples, backend, timeout)
    failed, values = [], []
    for outcome in outcomes:
        found = outcome.value if outcome.ok else {}
        if case not in found:
            before = f"case {list(found)[-1]} failed" if found else _describe(outcome)
            failed.append(f"rank {outcome.rank} never got to this case: {before}")
        elif found[case][1]:
            failed.append(f"rank {outcome.rank}:\n{found[case][1]}")
        else:
            values.append(found[case][0])
    if failed:
        raise RanksFailed("\n\n".join(failed))
    return values


@functools.lru_cache(maxsize=2)  # the tests of a function come one after the other
def _outcomes_of_all(
    function: Callable[..., Any],
    world_size: int,
    cases: tuple[tuple[Any, ...], ...],
    backend: str,
    timeout: float,
) -> list[RankOutcome]:
    source = (Path(inspect.getfile(function)).resolve(), function.__qualname__)
    return run_ranks(
        _all_cases, world_size, source, cases, backend=backend, timeout=timeout, check=False
    )


def _all_cases(
    rank: int, world_size: int, source: tuple[Path, str], cases: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], tuple[Any, str]]:
    """For each case that this rank gets to, the value that it returned, and its traceback."""
    path, name = source
    function = getattr(_load(path), name)
    found: dict[tuple[Any, ...], tuple[Any, str]] = {}
    for case in cases:
        try:
            found[case] = function(rank, world_size, *case), ""
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            found[case] = None, traceback.format_exc()
            break
    return found


def set_collective_timeout(seconds: float) -> None:
    """Changes the default process group's own timeout, on the rank that calls it."""
    import torch.distributed as dist

    # torch 2.15 gave it a public name.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def _describe(outcome: RankOutcome) -> str:
    cause = outcome.error or f"exit code {outcome.exitcode}"
    parts = [f"rank {outcome.rank} after {outcome.seconds:.1f} s: {cause}", outcome.stacks]
    if outcome.output:
        parts += ["--- end of output ---", outcome.output]
    return "\n".join(filter(None, parts))


def _call(
    rank: int,
    world_size: int,
    device: Any,
    source: tuple[Path, str],
    filters: Sequence[tuple[Any, ...]],
    args: tuple[Any, ...],
) -> Any:
    """What each rank runs: the test's function, with the test's treatment of warnings."""
    import torch

    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, message or "", category, module or "", line)
    torch.set_num_threads(1)
    path, name = source
    return getattr(_load(path), name)(rank, world_size, *args)


def _load(path: Path) -> ModuleType:
    """Imports a test file by path: its module name exists only inside pytest's own import mode."""
    name = "rank_" + path.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
