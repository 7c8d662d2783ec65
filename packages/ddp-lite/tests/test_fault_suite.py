"""No fault hangs, diverges silently, or aborts a rank that did nothing wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    """Ranks import the suite by its path, and so does this file."""
    path = Path(__file__).with_name("fault_suite.py")
    spec = importlib.util.spec_from_file_location("fault_suite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fault_suite"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


suite = _load()
#: One fault of each kind, spread over the wrappers.
SAMPLE = [
    ("is killed between backward and the optimizer", "NaiveDDP", 2),
    ("is interrupted in backward", "OverlapDDP", 2),
    ("zeroes the gradients after backward", "BucketedDDP", 2),
    ("has another learning rate", "FlatDDP", 2),
    ("all run two backwards in two threads", "BucketedDDP", 2),
    ("all wrap two models that share a trunk", "OverlapDDP", 2),
    ("leaves with exit code 1", "BucketedDDP", 4),
    ("is killed in backward", suite.BY_COPIES, 4),
    ("runs one backward more", suite.BY_COPIES, 2),
]


def check(fault: str, wrapper: str, ranks: int) -> None:
    found = suite.inject(fault, wrapper, ranks)
    print(found)
    assert found.verdict in ("error", "unharmed"), found


@pytest.mark.parametrize(("fault", "wrapper", "ranks"), SAMPLE)
def test_a_sample_of_faults(fault: str, wrapper: str, ranks: int) -> None:
    check(fault, wrapper, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", suite.WORLD_SIZES)
@pytest.mark.parametrize("wrapper", suite.OURS)
@pytest.mark.parametrize("fault", suite.NAMES)
def test_every_fault(fault: str, wrapper: str, ranks: int) -> None:
    check(fault, wrapper, ranks)


def test_the_suite_sees_torch_s_wrapper_diverge() -> None:
    """What the suite is there to find: torch's wrapper does not compare weights."""
    found = suite.inject("has another learning rate", suite.TORCHS, 2, timeout_s=suite.HUNG_S)
    assert found.verdict == "silently diverged"
