"""The Hopper tier's kernels, compiled for sm_90a without a GPU: ptxas has nothing to complain of.

The compiler runs in other processes, because Triton's interpreter, which the tests use where there
is no GPU, replaces it in this one. They start when tests are collected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from background import Background
from flashattn_triton import triton_versions
from flashattn_triton.hopper.configs import backward_config, forward_config
from flashattn_triton.options import resolve_options

SCRIPT = Path(__file__).with_name("compile_hopper.py")
SHARED_MEMORY = 227 * 1024  # of one block on sm_90
# All wgmma run one after another: an accumulator is read, or set, while products are in flight.
SERIALISED = {"C7512", "C7514", "C7515"}

REQUESTS = [
    {"head_dim": d, "dtype": dtype, "options": options, "lengths": lengths, "direction": direction}
    for direction in ("forward", "backward")
    for d in (64, 128)
    for dtype, options, lengths in (
        ("bf16", {"causal": False}, (4096, 4096)),
        ("bf16", {"causal": True}, (4096, 4096)),
        ("bf16", {"causal": "bottom-right"}, (4096, 5000)),
        ("fp16", {"causal": True}, (4000, 2000)),
        ("bf16", {"causal": True, "scale": -0.5}, (4096, 4096)),
        ("bf16", {"causal": True, "window": (500, None)}, (4096, 4096)),
        ("bf16", {"window": (500, 300)}, (4096, 4000)),
        ("bf16", {"window": (500, None)}, (4096, 4000)),
    )
]
# Kernels depend on lengths where there are other configurations for short sequences.
REQUESTS += [
    {"head_dim": 64, "dtype": "bf16", "options": {"causal": causal}, "lengths": (1000, n_keys)}
    for causal in (False, True, "bottom-right")
    for n_keys in (500, 2000)
]
# Tiles are as wide as the next of the two head_dims above.
REQUESTS += [
    {"head_dim": d, "dtype": "fp16", "options": {"causal": False}, "direction": direction}
    for d in (40, 120)
    for direction in ("forward", "backward")
]


def config_of(row: dict[str, Any]) -> Any:
    options = resolve_options(head_dim=row["head_dim"], **row["options"])
    if row["direction"] == "backward":
        return backward_config(row["head_dim"], options)
    return forward_config(row["head_dim"], row["lengths"][0], options)


COMPILING = Background(SCRIPT, (REQUESTS[::2], REQUESTS[1::2]))
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """One for each kernel with matrix products; the others take and give what these need."""
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    found = COMPILING.rows()
    assert len(found) == len(REQUESTS)
    return found


@pytest.mark.slow
def test_products_are_not_serialised(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert not SERIALISED & set(row["warnings"]), row


@pytest.mark.slow
def test_shared_memory_suffices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY, row


@pytest.mark.slow
def test_spills_are_those_of_the_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["spills"] <= config_of(row).spills, row


@pytest.mark.slow
def test_the_forward_loop_over_whole_tiles_does_not_spill(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["direction"] == "forward":
            consumers = config_of(row).consumers
            # A diagonal that is not aligned has a loop of its own, with at most one iteration,
            # before that loop, and a window's left edge has one after it.
            loops_of_one, rest = divmod(len(row["loops"]), consumers)
            after = int("window" in row["options"])
            assert not rest, row
            assert loops_of_one in (1 + after, 2 + after), row
            assert not any(row["loops"][loops_of_one - 1 - after :: loops_of_one]), row


@pytest.mark.slow
def test_the_backward_loop_without_a_mask_does_not_spill(rows: list[dict[str, Any]]) -> None:
    """Of a consumer's loops it is the last, unless a window's left edge follows."""
    for row in rows:
        if row["direction"] == "backward" and "window" not in row["options"]:
            per_consumer, rest = divmod(len(row["loops"]), 2)
            assert not rest, row
            assert not any(row["loops"][per_consumer - 1 :: per_consumer]), row
