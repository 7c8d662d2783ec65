"""The Hopper tier's kernels, compiled for sm_90a without a GPU: ptxas has nothing to complain of.

The compiler runs in other processes, because Triton's interpreter, which the tests use where there
is no GPU, replaces it in this one. With the installed Triton they start when tests are collected;
the other versions are installed into a temporary folder first.
``pytest -m nightly -s`` prints a table of what they spill.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from background import Background
from flashattn_triton import triton_versions
from flashattn_triton.hopper.configs import backward_config, forward_config, forward_widths
from flashattn_triton.problem import new_problem
from triton_wheels import RELEASES, install

SCRIPT = Path(__file__).with_name("compile_hopper.py")
SHARED_MEMORY = 227 * 1024  # of one block on sm_90
# All wgmma run one after another: an accumulator is read, or set, while products are in flight, or
# ptxas finds too few registers for those in flight.
SERIALISED = {"C7512", "C7514", "C7515"}
# The shipped table says how many bytes a thread may spill, and loops over whole tiles may spill
# nothing. Compilers of newer versions do not keep to that for some kernels: bytes in all, accesses
# to spilled registers in a step of the loop. See results/triton_versions.md.
MORE_SPILLS = {
    ("3.7", "forward", 64, "causal"): (36, 0),
    ("3.7", "forward", 64, "window"): (140, 0),
    ("3.7", "forward", 192, "window"): (232, 0),
    ("3.7", "forward", 256, "causal"): (36, 0),
    ("3.7", "forward", 256, "causal, packed"): (24, 0),
    ("3.7", "forward", 256, "full"): (36, 0),
    ("3.7", "forward", 256, "window"): (212, 0),
    ("3.8", "forward", 64, "causal"): (36, 0),
    ("3.8", "forward", 64, "window"): (140, 0),
    ("3.8", "forward", 256, "causal"): (36, 0),
    ("3.8", "forward", 256, "causal, packed"): (24, 0),
    ("3.8", "forward", 256, "full"): (56, 0),
    ("3.8", "forward", 256, "window"): (240, 0),
    ("3.9", "forward", 64, "causal, soft-cap"): (28, 0),
    ("3.9", "forward", 64, "window"): (140, 0),
    ("3.9", "forward", 256, "causal"): (56, 0),
    ("3.9", "forward", 256, "causal, packed"): (24, 0),
    ("3.9", "forward", 256, "full"): (56, 0),
    ("3.9", "forward", 256, "window"): (176, 0),
    ("3.6", "backward", 256, "window, packed, ordered, soft-cap"): (152, 0),
    ("3.7", "backward", 64, "causal"): (120, 0),
    ("3.7", "backward", 64, "window"): (164, 0),
    ("3.7", "backward", 128, "window"): (32, 0),
    ("3.7", "backward", 256, "window, packed, ordered, soft-cap"): (136, 0),
    ("3.8", "backward", 256, "window, packed, ordered, soft-cap"): (96, 0),
    ("3.9", "backward", 128, "causal, soft-cap"): (268, 0),
    ("3.9", "backward", 128, "window, soft-cap"): (172, 0),
    ("3.9", "backward", 256, "causal, packed"): (660, 3),
    ("3.9", "backward", 256, "window, packed, ordered, soft-cap"): (1652, 0),
    # dK and dV added to fp32 tensors.
    ("3.6", "backward", 64, "causal, added"): (196, 0),
    ("3.6", "backward", 64, "causal, packed, added"): (164, 0),
    ("3.6", "backward", 128, "causal, added"): (204, 0),
    ("3.6", "backward", 128, "causal, packed, added"): (188, 0),
    ("3.7", "backward", 64, "causal, added"): (232, 0),
    ("3.7", "backward", 64, "causal, packed, added"): (200, 0),
    ("3.7", "backward", 128, "causal, added"): (228, 0),
    ("3.7", "backward", 128, "causal, packed, added"): (212, 0),
    ("3.8", "backward", 64, "causal, added"): (232, 0),
    ("3.8", "backward", 64, "causal, packed, added"): (192, 0),
    ("3.8", "backward", 128, "causal, added"): (228, 0),
    ("3.8", "backward", 128, "causal, packed, added"): (204, 0),
    ("3.9", "backward", 64, "causal, added"): (256, 0),
    ("3.9", "backward", 64, "causal, packed, added"): (140, 0),
    ("3.9", "backward", 128, "causal, added"): (180, 0),
    ("3.9", "backward", 128, "causal, packed, added"): (112, 0),
    # Additions in order.
    ("3.6", "backward", 128, "full, ordered"): (8, 0),
    ("3.7", "backward", 128, "full, ordered"): (8, 0),
    # dK and dV take two thirds of the registers.
    ("3.6", "backward", 192, "causal"): (648, 9),
    ("3.6", "backward", 192, "causal, ordered"): (620, 11),
    ("3.6", "backward", 192, "causal, packed"): (452, 6),
    ("3.6", "backward", 192, "causal, soft-cap"): (872, 14),
    ("3.7", "backward", 192, "causal"): (648, 8),
    ("3.7", "backward", 192, "causal, ordered"): (636, 10),
    ("3.7", "backward", 192, "causal, packed"): (436, 6),
    ("3.7", "backward", 192, "causal, soft-cap"): (788, 12),
    ("3.7", "backward", 192, "full"): (152, 1),
    ("3.8", "backward", 192, "causal"): (480, 6),
    ("3.8", "backward", 192, "causal, ordered"): (388, 6),
    ("3.8", "backward", 192, "causal, packed"): (424, 9),
    ("3.8", "backward", 192, "causal, soft-cap"): (688, 11),
    ("3.9", "backward", 192, "causal"): (544, 8),
    ("3.9", "backward", 192, "causal, ordered"): (592, 10),
    ("3.9", "backward", 192, "causal, packed"): (432, 9),
    ("3.9", "backward", 192, "causal, soft-cap"): (948, 22),
}

_spec = importlib.util.spec_from_file_location("compile_hopper", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
_script = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _script  # where dataclasses look their module up
_spec.loader.exec_module(_script)
SINKS = [_script.Request(width, "bf16", {"causal": True}, sinks=True) for width in (64, 128)]
REQUESTS = [dataclasses.asdict(request) for request in (*_script.shipped(), *SINKS)]


def config_of(row: dict[str, Any]) -> Any:
    given = {name: x for name, x in row["options"].items() if name != "out_dtype"}
    options = new_problem(head_dim=row["head_dim"], **given)
    if row["direction"] == "backward":
        return backward_config(head_dims_of(row), options)
    n_queries = row["lengths"][0]
    batch, heads = 1 if row["sequences"] else 2, 4  # as compile_hopper.launch has them
    return forward_config(head_dims_of(row), n_queries, options, batch * heads * n_queries)


def head_dims_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["head_dim"], row["value_dim"] or row["head_dim"]


def width_of(row: dict[str, Any]) -> int:
    return forward_widths(head_dims_of(row))[0]


PARTS = (REQUESTS[::2], REQUESTS[1::2])
COMPILING = Background(SCRIPT, PARTS)
OTHERS = [release for release in RELEASES if release != triton.__version__]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3000),
    pytest.mark.xdist_group("hopper_compile"),
]


@pytest.fixture(scope="module", params=["installed", *OTHERS])
def rows(request: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """One for each kernel with matrix products; the others take and give what these need."""
    if request.param == "installed":
        refusal = triton_versions.refusal()
        if refusal is not None:
            pytest.skip(refusal)
        found = COMPILING.rows()
    else:
        compiling = Background(SCRIPT, PARTS, install(request.param, tmp_path_factory.mktemp("_")))
        try:
            found = compiling.rows()
        finally:
            compiling.stop()
    two_passes = [r for r in REQUESTS if r["direction"] == "backward" and width_of(r) == 256]
    assert len(found) == len(REQUESTS) + len(two_passes)
    assert len({row["triton"] for row in found}) == 1
    print(f"\n{report(found)}")
    return found


def mask_of(row: dict[str, Any]) -> str:
    if "window" in row["options"]:
        return "window"
    return "causal" if row["options"]["causal"] else "full"


def allowed(row: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a thread may spill, and accesses to them in a step over a whole tile."""
    version = row["triton"].rpartition(".")[0]
    added = ", packed" if row["sequences"] else ""
    added += ", added" if row["adds"] else ""
    added += ", fp32" if row["options"].get("out_dtype") else ""
    added += ", ordered" if row["options"].get("deterministic") else ""
    added += ", soft-cap" if row["options"].get("softcap") else ""
    kind = (version, row["direction"], width_of(row), mask_of(row) + added)
    return MORE_SPILLS.get(kind, (config_of(row).spills, 0))


def unmasked_loops(row: dict[str, Any], what: str = "loops") -> list[int]:
    """``what`` of each consumer's loop over whole tiles: accesses to spilled registers, or "steps".

    Forward, a window's left edge has a loop after it. Backward, the loop without a mask is the
    last, unless a window's left edge follows; of the widest heads dQ has a left edge before the
    others, and of dK and dV all loops count, of which one consumer has more.
    """
    if row["kernel"] == "key_pass_kernel":
        return list(row[what])
    after = int("window" in row["options"])
    consumers = config_of(row).consumers if row["direction"] == "forward" else 2
    loops_of_one, rest = divmod(len(row[what]), consumers)
    assert not rest, row
    if row["direction"] == "forward":
        assert loops_of_one == 1 + after, row
    which = after if row["kernel"] == "query_pass_kernel" else loops_of_one - 1 - after
    return list(row[what][which::loops_of_one])


def report(rows: list[dict[str, Any]]) -> str:
    """A line of a table: the most that kernels of a kind spill, in all and in loops.

    Of dense batches, with dQ added up in any order.
    """
    plain = {"causal", "window", "scale", "softcap"}
    rows = [r for r in rows if not (r["sequences"] or r["adds"] or r["options"].keys() - plain)]
    columns = []
    for direction in ("forward", "backward"):
        kinds = [(width, mask) for width in (64, 128) for mask in ("full", "causal", "window")]
        for what in (lambda row: [row["spills"]], unmasked_loops):
            most = [
                max(
                    n
                    for row in rows
                    if row["direction"] == direction and (width_of(row), mask_of(row)) == kind
                    for n in what(row)
                )
                for kind in kinds
            ]
            columns.append(", ".join(map(str, most)))
    warnings = sorted({code for row in rows for code in row["warnings"]})
    return " | ".join(["", rows[0]["triton"], ", ".join(warnings) or "none", *columns, ""]).strip()


@pytest.mark.slow
def test_products_are_not_serialised(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert not SERIALISED & set(row["warnings"]), row


@pytest.mark.slow
def test_loads_stay_before_the_arrival_that_frees_what_they_read(
    rows: list[dict[str, Any]],
) -> None:
    for row in rows:
        if row["kernel"] == "key_pass_kernel":
            first, of_loop = row["loads"]
            assert first == of_loop > 0, row


@pytest.mark.slow
def test_shared_memory_suffices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY, row


@pytest.mark.slow
def test_spills_are_those_of_the_table(rows: list[dict[str, Any]]) -> None:
    worse = [row for row in rows if row["spills"] > allowed(row)[0]]
    assert not [(r["direction"], r["head_dim"], r["options"], r["spills"]) for r in worse]


@pytest.mark.slow
def test_the_loop_over_whole_tiles_spills_no_more_than_said(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        of_window = row["direction"] == "backward" and "window" in row["options"]
        if not of_window or width_of(row) <= 128:
            assert max(unmasked_loops(row)) <= allowed(row)[1], row


@pytest.mark.slow
def test_values_are_released_before_half_of_the_exponentials(rows: list[dict[str, Any]]) -> None:
    """In forward steps over whole tiles, where ptxas once left the release behind all of them.

    P·V in order begins after them, and that of 256 columns takes longer. A soft-cap has as much to
    do before them. Under Triton 3.9 only kernels that wait for both products first are sure to
    release V early.
    """
    checked = 0
    for row in rows:
        if row["direction"] == "backward" or row["options"].get("softcap"):
            continue
        config = config_of(row)
        late = config.in_order or width_of(row) > 192
        if row["triton"].startswith("3.9."):
            late = not config.products_first
        if not late:
            checked += 1
            assert min(unmasked_loops(row, "after")) >= 0.5, row
    assert checked


@pytest.mark.slow
def test_a_mask_takes_at_most_half_as_many_instructions_again(rows: list[dict[str, Any]]) -> None:
    """In a step of the backward kernel, where comparisons in PTX keep LLVM from packing bits."""
    for row in rows:
        if row["kernel"] == "hopper_backward_kernel":
            assert max(row["steps"]) <= 1.5 * min(row["steps"]), row


@pytest.mark.slow
def test_a_mask_leaves_the_steps_over_whole_tiles_as_they_are(rows: list[dict[str, Any]]) -> None:
    """Under Triton 3.9 those of 192 columns once had 688 instructions under a causal mask, not 597.

    Compared with kernels of the same head_dim without a mask. Soft-caps and additions in order have
    instructions of their own.
    """
    kernels = {"hopper_backward_kernel", "wide_backward_kernel"}
    steps: dict[int, dict[str, list[int]]] = {}
    for row in rows:
        if row["kernel"] in kernels and row["options"].keys() <= {"causal", "window", "scale"}:
            of_head = steps.setdefault(row["head_dim"], {})
            of_head.setdefault(mask_of(row), []).extend(unmasked_loops(row, "steps"))
    compared = [of_head for of_head in steps.values() if len(of_head) > 1 and "full" in of_head]
    assert len(compared) >= 3, "head_dim 64, 128 and 192"
    for of_head in compared:
        longest = max(n for of_mask in of_head.values() for n in of_mask)
        assert longest <= 1.1 * min(of_head["full"]), of_head
