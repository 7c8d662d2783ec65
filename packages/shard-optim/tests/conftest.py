"""Runs many checks of a test file on one set of ranks: starting ranks costs more than most checks.

A test file lists its checks in ``CHECKS``: an id, the function, its further arguments. Each is
called as ``function(rank, world_size, *arguments)`` on every rank, one after the other.
"""

import traceback
from pathlib import Path

import pytest

import ranks


def run_checks(rank, world_size, path, checks):
    module = ranks._load(Path(path))
    errors = {}
    for name, function, arguments in checks:
        try:
            getattr(module, function)(rank, world_size, *arguments)
        except Exception:  # noqa: BLE001 - reported under the check's own name
            errors[name] = traceback.format_exc()
    return errors


@pytest.fixture(scope="module")
def errors_on_two_ranks(request):
    """What every check of the module raised on any of two ranks, by the check's id."""
    checks = [(name, f.__name__, arguments) for name, f, arguments in request.module.CHECKS]
    path = str(request.path)
    outcomes = ranks.run_ranks(run_checks, 2, path, checks, timeout=240.0)
    return {
        name: "\n".join(
            f"rank {outcome.rank}: {outcome.value[name]}"
            for outcome in outcomes
            if name in outcome.value
        )
        for name, _, _ in checks
    }
