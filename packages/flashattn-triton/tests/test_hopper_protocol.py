"""The Hopper tier's kernels, run on the host on random schedules; see gluon_simulator.

Launches are made for meta tensors, as for a GPU of few multiprocessors. Everything is computed in
fp64, so that results are the definition's, or wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_triton import triton_versions

pytest.importorskip("triton")
if triton_versions.refusal() is not None:
    pytest.skip(str(triton_versions.refusal()), allow_module_level=True)

from flashattn_triton.hopper import (
    backward,
    backward_common,
    backward_kernel,
    backward_wide,
    configs,
    forward,
    forward_kernel,
    key_pass,
    query_pass,
    schedule,
    scores,
    turns,
)
from flashattn_triton.hopper.configs import backward_config, forward_widths
from flashattn_triton.hopper.launch import edges
from flashattn_triton.hopper.schedule import FIELDS, packed_tiles_kernel
from flashattn_triton.launch import Launch
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import Problem, new_problem
from flashattn_triton.triton_versions import TileView
from gluon_grid import Grid
from gluon_simulator import (
    WARP,
    Descriptor,
    Machine,
    PackedDescriptor,
    Pointer,
    SimulationError,
    Tensor,
    load,
)

#: By the width of tiles of Q and K.
BACKWARD_MODULES = {
    64: backward_kernel,
    128: backward_kernel,
    192: backward_wide,
}
WIDE = [(192, 128), (256, 256)]


def run(
    launch: Launch,
    module: ModuleType,
    memory: Sequence[Any],
    seed: int,
    changes: dict[str, Any],
) -> None:
    """All programs of one launch on ``memory``, contiguous arrays.

    One after another; those that add in a fixed order, which wait for others, at the same time.
    """
    parameters: list[Any] = []
    for like, array in zip(launch.parameters.values(), memory, strict=True):
        if isinstance(like, TileView):
            dtype = "float32" if like.dtype == torch.float32 else "half"
            if len(like.shape) == 5:
                parameters.append(PackedDescriptor(array, like.block, dtype))
            else:
                parameters.append(Descriptor(array.reshape(like.shape), like.block, dtype))
        else:
            parameters.append(None if like is None else Pointer(array.reshape(-1)))

    programs = range(launch.grid[0])
    ordered = getattr(launch.constants.get("OPTIONS"), "ordered", False)
    together = len(programs) if ordered else 1
    grid = Grid(together)

    def run_one(program: int) -> None:
        machine = Machine(seed, program, launch.grid[0], grid if together > 1 else None)
        kernel = load(module, machine, **changes)[launch.kernel.__name__]
        try:
            kernel(*parameters, *launch.numbers.values(), **launch.constants)
        finally:
            grid.ended()

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(run_one, programs))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arrays and results by the definition; the letters are the kernels'."""

    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int]
    head_dim: int
    value_dim: int | None = None  # as head_dim
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16  # of inputs, to the launchers
    options: Problem

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of Q, K, V, dO."""
        width, value_width = self.head_dim, self.value_dim or self.head_dim
        widths = (width, width, value_width, value_width)
        return [
            (self.batch, self.heads[side], self.lengths[side], x)
            for side, x in zip((0, 1, 1, 0), widths, strict=True)
        ]

    def inputs(self, seed: int) -> list[Any]:
        """Q, K, V, dO."""
        generator = np.random.default_rng(seed)
        return [generator.standard_normal(shape) for shape in self.shapes]

    def meta(self) -> list[torch.Tensor]:
        """Q, K and V."""
        return [torch.empty(x, dtype=self.dtype, device="meta") for x in self.shapes[:3]]

    def stored_tiles(self, queries: int) -> Any:
        """Which tiles of so many queries the program that comes first or alone stores.

        That is one that sees the first 128 keys alone, of short causal problems of more than 64
        columns, unless gradients are deterministic.
        """
        seen = np.broadcast_to(self.seen(), self.lengths)

        def tiles_that_see(keys: Any) -> Any:
            padded = np.zeros(-(-len(keys) // queries) * queries, dtype=bool)
            padded[: len(keys)] = keys.any(1)
            return padded.reshape(-1, queries).any(1)

        stored = tiles_that_see(seen)
        if not self.options.deterministic:
            stored &= ~tiles_that_see(seen[:, 128:])
            stored &= self.options.band == (None, 0) and self.head_dim > 64
            if seen.shape[1] > 128:  # all programs come to the last tile
                stored[-1] = False
        return stored

    def seen(self) -> Any:
        """(N_q, N_k)."""
        (n_queries, n_keys), (left, right) = self.lengths, self.options.band
        offset, band = edges(n_queries, n_keys, self.options)
        last = np.arange(n_queries)[:, None] + offset
        keys = np.arange(n_keys)
        return (keys <= (n_keys if right is None else last)) & (
            keys >= (0 if left is None else last - band)
        )

    def scores(self, q: Any, k: Any) -> tuple[Any, Any]:
        """Scores before the mask, and their derivatives by the products of Q and K."""
        scale, cap = self.options.scale, self.options.softcap
        s = q @ k.swapaxes(2, 3) * scale
        if cap is None:
            return s, scale
        t = np.tanh(s / cap)
        return cap * t, scale * (1 - t * t)

    def probabilities(self, q: Any, k: Any) -> tuple[Any, Any]:
        """P and L, for keys that are repeated already."""
        s, _ = self.scores(q, k)
        s = np.where(self.seen(), s, -np.inf)
        largest = s.max(3, keepdims=True, initial=-np.inf)
        largest[np.isneginf(largest)] = 0.0
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(s - largest).sum(3)) + largest[..., 0]
        return np.exp(s - np.where(np.isneginf(lse), 0.0, lse)[..., None]), lse

    def repeated(self, x: Any) -> Any:
        return np.repeat(x, self.heads[0] // self.heads[1], axis=1)

    def summed(self, x: Any) -> Any:
        """Gradients of repeated keys as those of keys."""
        return x.reshape(
            self.batch, self.heads[1], self.heads[0] // self.heads[1], *x.shape[2:]
        ).sum(2)


def check_forward(
    problem: Case, seed: int, in_fp32: bool = False, negative: bool = False, **changes: Any
) -> None:
    """With ``negative``, all scores are, if the scale is not."""
    q, k, v, do = problem.inputs(seed)
    if negative:
        q, k = abs(q), -abs(k)
    p, lse = problem.probabilities(q, problem.repeated(k))
    out, rows = np.full(do.shape, np.nan), np.full(lse.shape, np.nan)
    options = replace(problem.options, out_dtype=torch.float32 if in_fp32 else None)
    launch = forward.HopperForwardCall(*problem.meta(), options).launch
    run(launch, forward_kernel, [q, k, v, out, rows, None, None], seed, changes)
    close(rows, lse)
    close(out, p @ problem.repeated(v))


def check_backward(
    problem: Case, seed: int, schedule: int | None = None, adds: bool = False, **changes: Any
) -> Any:
    """Returns the sum of dQ. ``schedule``: the seed of the partitions' order, if another."""
    q, k, v, do = problem.inputs(seed)
    scale = problem.options.scale
    head_dims = problem.head_dim, problem.value_dim or problem.head_dim
    width, _ = forward_widths(head_dims)
    keys, values = map(problem.repeated, (k, v))
    p, lse = problem.probabilities(q, keys)
    delta = (p @ values * do).sum(3)
    ds = p * (do @ values.swapaxes(2, 3) - delta[..., None]) * problem.scores(q, keys)[1]

    queries = backward_config(head_dims, problem.options).queries
    n_queries = q.shape[2]
    n_padded = -(-n_queries // queries) * queries
    # In parts, as the kernel that comes before has it; far where P is to be 0.
    added = np.zeros((*q.shape[:2], n_padded, 2))
    factor = problem.options.softcap or scale
    added[..., 0] = far = -np.sign(factor) * 2.0**120
    added[:, :, :n_queries, 0] = np.where(np.isneginf(lse), far, -lse / factor)
    added[:, :, :n_queries, 1] = -delta
    parts = np.array((0.5, 0.25, 0.25, 0, 0, 0, 0, 0))
    statistics = added[..., None] * parts
    dq_sum = np.zeros((*q.shape[:2], n_padded, width))
    dk, dv = (np.full(x.shape, 1.0 if adds else np.nan) for x in (k, v))
    meta_do = torch.empty(do.shape, dtype=torch.bfloat16, device="meta")
    meta_lse = torch.empty(do.shape[:3], device="meta")
    tensors = (*problem.meta(), meta_do, meta_lse, meta_do, None)
    into = [x.float() for x in problem.meta()] if adds else []
    call = backward.HopperBackwardCall(tensors, problem.options, into=into)
    turns = counters(dq_sum, queries)
    schedule = seed if schedule is None else schedule
    if width == 256:
        dq_sum = np.full(q.shape, np.nan)
        run(call.main, key_pass, [q, k, v, do, statistics, dk, dv, None], schedule, changes)
        run(call.last, query_pass, [q, k, v, do, statistics, dq_sum, None], schedule, changes)
        close(dq_sum, ds @ keys)
    else:
        if width <= 128:
            in_tiles = dq_sum.reshape(*q.shape[:2], -1, queries, width)
            in_tiles[:, :, problem.stored_tiles(queries)] = np.nan
        if width > 128:
            turns = turns[1:] if problem.options.deterministic else None
        memory = [q, k, v, do, statistics, dq_sum, dk, dv, None, turns]
        run(call.main, BACKWARD_MODULES[width], memory, schedule, changes)
        dq = in_order(dq_sum)[:, :, :n_queries, : problem.head_dim]
        close(dq * scale, ds @ keys)
    close(dk - adds, problem.summed(ds.swapaxes(2, 3) @ q))
    close(dv - adds, problem.summed(p.swapaxes(2, 3) @ do))
    return dq_sum


def counters(dq_sum: Any, queries: int) -> Any:
    """Zeros that count tiles of keys that are begun, and who has added to each tile of dQ."""
    return np.zeros(1 + dq_sum.size // dq_sum.shape[-1] // queries, dtype=np.int64)


def in_order(dq_sum: Any) -> Any:
    """dQ / scale as rows: each (64, 64) block of the sum lies as wgmma leaves it in registers."""
    # Blocks of rows and of columns, c // 8, r // 16, r % 8, c % 8 // 2, r % 16 // 8, c % 2.
    width = dq_sum.shape[-1]
    blocks = dq_sum.reshape(-1, width // 64, 8, 4, 8, 4, 2, 2).transpose(0, 3, 6, 4, 1, 2, 5, 7)
    return blocks.reshape(dq_sum.shape)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def problem_of(lengths: tuple[int, int], head_dim: int, **chosen: Any) -> Case:
    names = ("heads", "batch", "value_dim", "dtype")
    shape = {name: chosen.pop(name) for name in names if name in chosen}
    options = new_problem(head_dim=head_dim, **chosen)
    return Case(lengths=lengths, head_dim=head_dim, options=options, **shape)


PROBLEMS: dict[str, dict[str, Any]] = {
    "one step": {"lengths": (64, 128)},
    "two steps": {"lengths": (130, 128)},
    "three steps": {"lengths": (300, 128)},
    "many steps, offset walks": {"lengths": (650, 300)},
    "grouped, one step a head": {"heads": (4, 1), "lengths": (60, 100)},
    "grouped, offset walks": {"heads": (4, 2), "lengths": (260, 129), "batch": 2},
    "causal": {"lengths": (400, 400), "causal": True},
    "causal, programs without queries": {"lengths": (100, 400), "causal": True},
    "bottom-right, queries without keys": {"lengths": (400, 200), "causal": "bottom-right"},
    "bottom-right, a row whose keys end with a tile": {
        "lengths": (257, 256),
        "causal": "bottom-right",
    },
    "bottom-right, grouped": {"heads": (4, 2), "lengths": (333, 411), "causal": "bottom-right"},
    "window": {"heads": (2, 1), "lengths": (500, 500), "causal": True, "window": (100, None)},
    "window, both edges": {"lengths": (400, 500), "window": (40, 90)},
    "window, of one key": {"lengths": (300, 300), "window": (0, 0)},
    "window, its left edge alone": {"lengths": (300, 200), "window": (70, None)},
    "negative scale": {"lengths": (200, 200), "causal": True, "scale": -0.3},
    "longer than the short configurations": {"lengths": (1100, 200)},
    "longer than those, causal": {"lengths": (1100, 300), "causal": True},
}
# Backward, deterministic gradients.
ORDERED: dict[str, dict[str, Any]] = {
    "full, grouped": {"heads": (2, 1), "lengths": (200, 300)},
    "full, in a ring": {"heads": (2, 1), "lengths": (1000, 400)},
    "full, in a ring, ragged": {"lengths": (1050, 300)},
    "full, in a ring of ten": {"lengths": (1160, 1250)},
    "full, in rings, few programs": {"heads": (2, 2), "lengths": (900, 400)},
    "causal": {"lengths": (400, 400), "causal": True},
    "causal, last heads backwards": {
        "heads": (4, 2),
        "lengths": (400, 400),
        "batch": 2,
        "causal": True,
    },
    "more keys than queries": {"lengths": (100, 400), "causal": True},
    "more keys, last heads backwards": {"heads": (2, 2), "lengths": (100, 400), "causal": True},
    "bottom-right, last heads backwards": {
        "heads": (3, 3),
        "lengths": (300, 400),
        "causal": "bottom-right",
    },
    "fewer, last heads backwards": {
        "heads": (2, 2),
        "lengths": (400, 200),
        "causal": "bottom-right",
    },
    "fewer, bottom-right": {"lengths": (400, 200), "causal": "bottom-right"},
    "bottom-right": {"lengths": (200, 330), "causal": "bottom-right", "heads": (2, 1)},
    "window": {"lengths": (400, 400), "causal": True, "window": (100, None)},
    "window, both edges": {"lengths": (300, 400), "window": (40, 90)},
}


@pytest.fixture(autouse=True)
def _few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(configs, "ROWS_AT_ONCE", 3 * 128)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_on_random_schedules(name: str, head_dim: int) -> None:
    seed = list(PROBLEMS).index(name)
    check_forward(problem_of(head_dim=head_dim, **PROBLEMS[name]), seed)


@pytest.mark.parametrize("head_dims", [(40, 40), (96, 96), (192, 128), (256, 200)], ids=str)
@pytest.mark.parametrize("name", ["grouped, offset walks", "causal", "window, both edges"])
def test_forward_in_fp32(name: str, head_dims: tuple[int, int]) -> None:
    head_dim, value_dim = head_dims
    problem = problem_of(head_dim=head_dim, value_dim=value_dim, **PROBLEMS[name])
    check_forward(problem, list(PROBLEMS).index(name), in_fp32=True)


@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128), (136, 72)], ids=str)
@pytest.mark.parametrize("name", ["grouped, offset walks", "causal", "window, both edges"])
def test_forward_of_wide_heads(name: str, head_dims: tuple[int, int]) -> None:
    head_dim, value_dim = head_dims
    problem = problem_of(head_dim=head_dim, value_dim=value_dim, **PROBLEMS[name])
    check_forward(problem, list(PROBLEMS).index(name))


#: Of fp64, powers of two overflow where a score is larger than the first ones by 1,024.
OVERFLOWING = 400.0
WITHOUT_REPETITION = {"_any_overflowed": lambda *arguments: False}
overflows = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


@overflows
@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), *WIDE], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [
        {"lengths": (650, 300)},
        {"heads": (4, 2), "lengths": (333, 411), "causal": "bottom-right"},
        {"lengths": (500, 600), "window": (400, 90)},
    ],
    ids=str,
)
def test_rows_that_overflow(chosen: dict[str, Any], head_dims: tuple[int, int]) -> None:
    """Tiles come once more in any round, also the last ones."""
    head_dim, value_dim = head_dims
    chosen = chosen | {"value_dim": value_dim, "scale": OVERFLOWING}
    problem = problem_of(head_dim=head_dim, **chosen)
    for seed in range(2):
        check_forward(problem, seed)
    with pytest.raises(AssertionError):
        check_forward(problem, 0, **WITHOUT_REPETITION)


def exp2_of_fp32(x: Tensor) -> Tensor:
    """As the special function unit: no result is below 2^-126, but 0."""
    y = np.exp2(x.value.astype(np.float32))
    return Tensor(np.where(y < 2.0**-126, 0.0, y), x.type.layout)


@overflows
@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 30.0, 200.0])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"causal": True}, {"causal": True, "window": (400, None)}, {"window": (300, 90)}],
    ids=str,
)
def test_rows_that_overflow_fp32(chosen: dict[str, Any], factor: float, head_dim: int) -> None:
    """Scores of the first keys, which come last, are larger by any number of powers of two."""
    problem = problem_of((900, 900), head_dim, **chosen)
    q, k, v, do = problem.inputs(0)
    k[:, :, :300] *= factor
    p, lse = problem.probabilities(q, k)
    out, rows = np.full(do.shape, np.nan), np.full(lse.shape, np.nan)
    launch = forward.HopperForwardCall(*problem.meta(), problem.options).launch
    run(launch, forward_kernel, [q, k, v, out, rows, None, None], 0, {"exp2": exp2_of_fp32})
    np.testing.assert_allclose(rows, lse, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(out, p @ v, rtol=0, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("name", ["causal", "bottom-right, grouped", "negative scale"])
def test_maxima_of_fp16(name: str, head_dim: int) -> None:
    """Scores are compared as integers, which finds those above 0."""
    chosen = PROBLEMS[name] | {"dtype": torch.float16}
    problem = problem_of(head_dim=head_dim, **chosen)
    check_forward(problem, list(PROBLEMS).index(name))
    check_forward(problem, list(PROBLEMS).index(name), negative=True)


def rounded_to_fp16(x: Tensor, dtype: Any, layout: Any) -> Tensor:
    return Tensor(x.value.astype(np.float16).astype(np.float64), layout)


@overflows
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (400, 90)}], ids=str)
@pytest.mark.parametrize("scale", [3.0, 20.0])
def test_negative_scores_of_fp16(options: dict[str, Any], scale: float) -> None:
    """Of them, comparisons of integers find the smallest."""
    problem = problem_of((650, 650), 64, dtype=torch.float16, scale=scale, **options)
    q, k, v, do = problem.inputs(0)
    q, k = abs(q), -abs(k)
    q[:, :, ::2] *= -1.0  # not the scores of these rows, which come again beside others
    p, lse = problem.probabilities(q, k)

    def outputs(**changes: Any) -> Any:
        out, rows = np.full(do.shape, np.nan), np.full(lse.shape, np.nan)
        launch = forward.HopperForwardCall(*problem.meta(), problem.options).launch
        changes |= {"exp2": exp2_of_fp32, "to_operand": rounded_to_fp16}
        run(launch, forward_kernel, [q, k, v, out, rows, None, None], 0, changes)
        return out, rows

    out, rows = outputs()
    np.testing.assert_allclose(rows, lse, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(out, p @ v, rtol=0, atol=5e-3)
    assert not np.isfinite(outputs(**WITHOUT_REPETITION)[0]).all()


@overflows
@pytest.mark.parametrize("n_keys", [129, 400])
def test_one_tile_that_overflows(n_keys: int) -> None:
    """It is due in the round after the last, with a slot of Q that was never filled."""
    problem = problem_of((100, n_keys), 64, scale=OVERFLOWING)
    check_forward(problem, 0)
    with pytest.raises(AssertionError):
        check_forward(problem, 0, **WITHOUT_REPETITION)


@overflows
def test_rows_beside_one_that_overflows() -> None:
    """Their output and logsumexp are the same numbers as without it."""
    problem = problem_of((200, 500), 64)
    outputs = []
    for factor in (1.0, 1e4):
        q, k, v, do = problem.inputs(0)
        q[0, 0, 70] *= factor
        out, rows = np.full(do.shape, np.nan), np.full(do.shape[:3], np.nan)
        launch = forward.HopperForwardCall(*problem.meta(), problem.options).launch
        run(launch, forward_kernel, [q, k, v, out, rows, None, None], 0, {})
        outputs.append((np.delete(out, 70, 2), np.delete(rows, 70, 2), out[0, 0, 70]))
    for before, beside in zip(outputs[0][:2], outputs[1][:2], strict=True):
        np.testing.assert_array_equal(beside, before)
    assert np.isfinite(outputs[1][2]).all()


@pytest.mark.parametrize("head_dim", [72, 96])
@pytest.mark.parametrize("name", ["grouped, offset walks", "causal", "window, both edges"])
def test_columns_that_are_not_in_use(name: str, head_dim: int) -> None:
    """Of tiles of 128 columns, 80 or 96 are multiplied."""
    problem = problem_of(head_dim=head_dim, **PROBLEMS[name])
    seed = list(PROBLEMS).index(name)
    check_forward(problem, seed)
    check_backward(problem, seed)


@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize("head_dim", [80, 96, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_long_configurations(name: str, head_dim: int) -> None:
    check_forward(problem_of(head_dim=head_dim, **PROBLEMS[name]), list(PROBLEMS).index(name))


@pytest.mark.parametrize("head_dims", [(96, 96), (128, 128), *WIDE], ids=str)
@pytest.mark.parametrize("name", ["grouped, offset walks", "causal", "window, both edges"])
def test_soft_caps(name: str, head_dims: tuple[int, int]) -> None:
    """The scale's sign is the tanh's, not the exponentials'."""
    head_dim, value_dim = head_dims
    chosen = PROBLEMS[name] | {"softcap": 3.0, "scale": -0.2, "value_dim": value_dim}
    problem = problem_of(head_dim=head_dim, **chosen)
    exact = {"tanh": lambda x: Tensor(np.tanh(x.value), x.type.layout)}
    seed = list(PROBLEMS).index(name)
    check_forward(problem, seed, **exact)
    check_backward(problem, seed, **exact)


def test_tanh() -> None:
    x = np.concatenate((np.linspace(-0.3, 0.3, 1001), np.linspace(-50, 50, 1001), [-1e5, 1e5]))
    with np.errstate(over="ignore"):
        found = load(scores, Machine(0, 0))["tanh"](Tensor(x)).value
    np.testing.assert_allclose(found, np.tanh(x), rtol=1e-8, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_backward_on_random_schedules(name: str, head_dim: int) -> None:
    seed = list(PROBLEMS).index(name)
    check_backward(problem_of(head_dim=head_dim, **PROBLEMS[name]), seed)


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("name", ["grouped, offset walks", "causal", "window, both edges"])
def test_gradients_of_keys_are_added(name: str, head_dim: int) -> None:
    check_backward(problem_of(head_dim=head_dim, **PROBLEMS[name]), 0, adds=True)


@pytest.mark.parametrize(
    ("name", "head_dim", "value_dim"),
    [
        *((name, *x) for name in PROBLEMS for x in WIDE),
        *(("causal", 136, 72), ("bottom-right, grouped", 200, 144), ("two steps", 40, 248)),
    ],
)
def test_backward_of_wide_heads(name: str, head_dim: int, value_dim: int) -> None:
    problem = problem_of(head_dim=head_dim, value_dim=value_dim, **PROBLEMS[name])
    check_backward(problem, list(PROBLEMS).index(name))


@pytest.mark.parametrize(
    ("head_dims", "name"),
    [
        pytest.param(
            head_dims,
            name,
            marks=[pytest.mark.nightly] if "ten" in name and head_dims in WIDE else [],
        )
        for head_dims in [(64, 64), (128, 128), *WIDE]
        for name in ORDERED
    ],
    ids=str,
)
def test_ordered_backward_on_random_schedules(
    name: str, head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rings of five or ten; or so few programs that they go from ring to ring, or that the last head
    # alone is walked backwards.
    at_once = 3 if "backwards" in name else 4 if "few" in name else 20
    monkeypatch.setattr(forward, "multiprocessors", lambda device: at_once)
    head_dim, value_dim = head_dims
    problem = problem_of(
        head_dim=head_dim, value_dim=value_dim, deterministic=True, **ORDERED[name]
    )
    check_backward(problem, list(ORDERED).index(name))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), *WIDE], ids=str)
@pytest.mark.parametrize("name", ["full, in a ring", "causal", "window"])
def test_no_schedule_changes_ordered_gradients(name: str, head_dims: tuple[int, int]) -> None:
    head_dim, value_dim = head_dims
    problem = problem_of(
        head_dim=head_dim, value_dim=value_dim, deterministic=True, **ORDERED[name]
    )
    first, *others = (check_backward(problem, 0, schedule) for schedule in range(3))
    for other in others:
        np.testing.assert_array_equal(first, other)


# ---- packed sequences ----------------------------------------------------------------------------

PACKED: dict[str, dict[str, Any]] = {
    "full": {"lengths": [(70, 70), (130, 200)]},
    "causal, grouped, equal": {"lengths": [(1, 1), (150, 150)], "heads": (2, 1), "causal": True},
    "bottom-right": {"lengths": [(60, 200), (140, 60)], "causal": "bottom-right"},
    "empty": {"lengths": [(0, 0), (0, 70), (65, 0), (128, 128)], "causal": True},
    "window": {"lengths": [(200, 200), (70, 70)], "causal": True, "window": (40, None)},
    "ordered": {"lengths": [(70, 0), (300, 300), (1, 140)], "causal": True, "deterministic": True},
    "rings": {"lengths": [(800, 400), (300, 300), (1, 900)], "deterministic": True},
    "spare": {"lengths": [(70, 70), (130, 40)], "heads": (4, 2), "spare": (140, 200)},
    "spare keys": {"lengths": [(70, 70)], "causal": True, "deterministic": True, "spare": (0, 9)},
    "spare queries": {"lengths": [(5, 5)], "causal": "bottom-right", "spare": (77, 0)},
}


class PackedProblem:
    """Sequences in arrays of tokens. ``spare``: queries and keys that none owns, which are NaN."""

    def __init__(self, problems: list[Case], spare: tuple[int, int], seed: int) -> None:
        self.problems = problems
        self.spare = spare
        self.inputs = [problem.inputs(seed + i) for i, problem in enumerate(problems)]
        self.starts = [
            np.cumsum([0, *(p.lengths[side] for p in problems)]).tolist() for side in (0, 1)
        ]
        starts = [torch.tensor(x, dtype=torch.int32) for x in self.starts]
        if self.starts[0] == self.starts[1]:  # as one tensor
            starts[1] = starts[0]
        self.given = Given(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
        longest = max(p.lengths[0] for p in problems), max(p.lengths[1] for p in problems)
        self.options = replace(problems[0].options, longest=longest)

    def tokens(self, which: int) -> Any:
        """(T, H, D) of Q, K, V or dO."""
        own = np.concatenate([inputs[which][0].swapaxes(0, 1) for inputs in self.inputs])
        spare = self.spare[1 if which in (1, 2) else 0]
        return np.pad(own, ((0, spare), (0, 0), (0, 0)), constant_values=np.nan)

    def like(self, which: int) -> Any:
        """NaN in the shape of Q, K, V or dO."""
        return np.full_like(self.tokens(which), np.nan)

    def meta(self) -> list[torch.Tensor]:
        """Q, K, V, dO: (1, H, T, D)."""
        shapes = [self.tokens(which).shape for which in range(4)]
        tensors = [torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes]
        return [x.transpose(0, 1).unsqueeze(0) for x in tensors]

    def of(self, sequence: int, side: int, memory: Any) -> Any:
        """(1, H, N, D): one sequence's tokens."""
        first, last = (self.starts[side][sequence + i] for i in (0, 1))
        return memory[first:last].swapaxes(0, 1)[None]

    def table(self, tiles: Any) -> Any:
        """What :func:`packed_tiles_kernel` writes, (queries, keys): the interpreter runs it."""
        constants = dict(tiles.launch.constants)
        both = torch.full((2 + sum(tiles.most), FIELDS.value), -1, dtype=torch.int32)
        starts = self.given.cu_seqlens_q, self.given.cu_seqlens_k
        packed_tiles_kernel[tiles.launch.grid](
            *starts, both, *tiles.launch.numbers.values(), **constants
        )
        return np.split(both.numpy(), [1 + tiles.most[0]])


def packed_problem(name: str, head_dims: tuple[int, int], seed: int) -> PackedProblem:
    head_dim, value_dim = head_dims
    chosen = PACKED[name] | {"value_dim": value_dim}
    lengths, spare = chosen.pop("lengths"), chosen.pop("spare", (0, 0))
    return PackedProblem([problem_of(x, head_dim, **chosen) for x in lengths], spare, seed)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not active")


@interpreted
@pytest.mark.parametrize(
    ("name", "head_dims", "in_fp32"),
    [
        *((name, x, False) for name in PACKED for x in ((64, 64), (128, 128), *WIDE)),
        *((name, (96, 96), True) for name in ("bottom-right", "empty", "spare")),
    ],
    ids=str,
)
def test_packed_forward_on_random_schedules(
    name: str, head_dims: tuple[int, int], in_fp32: bool
) -> None:
    seed = list(PACKED).index(name)
    packed = packed_problem(name, head_dims, seed)
    options = replace(packed.options, out_dtype=torch.float32 if in_fp32 else None)
    call = forward.HopperForwardCall(*packed.meta()[:3], options, packed.given)
    q, k, v, out = packed.tokens(0), packed.tokens(1), packed.tokens(2), packed.like(3)
    lse = np.full((packed.problems[0].heads[0], len(q)), np.nan)
    memory = [q, k, v, out, lse, packed.table(call.tiles)[0], None]
    run(call.launch, forward_kernel, memory, seed, {})
    for i, problem in enumerate(packed.problems):
        one_q, one_k, one_v, _ = packed.inputs[i]
        p, expected = problem.probabilities(one_q, problem.repeated(one_k))
        close(lse[None, :, packed.starts[0][i] : packed.starts[0][i + 1]], expected)
        close(packed.of(i, 0, out), p @ problem.repeated(one_v))
    first = packed.starts[0][-1]
    assert (out[first:] == 0).all()
    assert np.isneginf(lse[:, first:]).all()


@interpreted
@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("name", PACKED)
def test_packed_long_configurations(name: str, head_dim: int) -> None:
    test_packed_forward_on_random_schedules(name, (head_dim, head_dim), in_fp32=False)


@interpreted
@pytest.mark.parametrize(
    ("name", "head_dims", "adds"),
    [
        *((name, x, False) for name in PACKED for x in ((64, 64), (128, 128), *WIDE)),
        *((name, (96, 96), True) for name in ("bottom-right", "empty", "ordered", "spare")),
    ],
    ids=str,
)
def test_packed_backward_on_random_schedules(
    name: str, head_dims: tuple[int, int], adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 20)  # rings of five, nine or ten
    seed = list(PACKED).index(name)
    packed = packed_problem(name, head_dims, seed)
    width, _ = forward_widths(head_dims)
    scale, heads = packed.options.scale, packed.problems[0].heads[0]
    queries = backward_config(head_dims, packed.options).queries
    meta_q, meta_k, meta_v, meta_do = packed.meta()
    meta_lse = torch.empty(meta_do.shape[:3], device="meta")
    tensors = (meta_q, meta_k, meta_v, meta_do, meta_lse, meta_do, None)
    into = [x.float() for x in (meta_q, meta_k, meta_v)] if adds else []
    call = backward.HopperBackwardCall(tensors, packed.options, packed.given, into)
    n_queries, ends = len(packed.tokens(0)), [starts[-1] for starts in packed.starts]
    tiles = n_queries // queries + len(packed.problems) + 1
    # Whatever no sequence owns is NaN.
    statistics = np.full((tiles * heads * queries, 2, 8), np.nan)
    dq_sum = np.full((tiles * heads * queries, width), np.nan)
    owned, expected = [], []
    for i, problem in enumerate(packed.problems):
        q, k, v, do = packed.inputs[i]
        keys, values = map(problem.repeated, (k, v))
        p, lse = problem.probabilities(q, keys)
        delta = (p @ values * do).sum(3)
        ds = p * (do @ values.swapaxes(2, 3) - delta[..., None]) * scale
        expected.append((ds @ keys, problem.summed(ds.swapaxes(2, 3) @ q),
                         problem.summed(p.swapaxes(2, 3) @ do)))  # fmt: skip
        n = q.shape[2]
        n_padded = max(-(-n // queries), 1) * queries
        first = (packed.starts[0][i] // queries + i) * heads * queries
        rows = slice(first, first + heads * n_padded)
        added = np.zeros((heads, n_padded, 2))
        added[..., 0] = far = -np.sign(scale) * 2.0**120
        added[:, :n, 0] = np.where(np.isneginf(lse), far, -lse / scale)
        added[:, :n, 1] = -delta
        parts = added[..., None] * np.array((0.5, 0.25, 0.25, 0, 0, 0, 0, 0))
        statistics[rows] = parts.reshape(-1, 2, 8)
        in_tiles = dq_sum[rows].reshape(heads, -1, queries, width)
        in_tiles[:] = 0.0
        if packed.options.deterministic and width <= 128:
            in_tiles[:, problem.stored_tiles(queries)] = np.nan
        dq_sum[rows] = in_tiles.reshape(dq_sum[rows].shape)
        owned.append(rows)
    first = (ends[0] // queries + len(packed.problems)) * heads * queries
    spare = max(-(-packed.spare[0] // queries), min(packed.spare[1], 1)) * heads * queries
    rows = slice(first, first + spare)
    dq_sum[rows] = statistics[rows] = 0.0
    statistics[rows, 0, 0] = far
    dk, dv = (np.ones_like(packed.like(i)) if adds else packed.like(i) for i in (1, 2))
    inputs = [packed.tokens(which) for which in range(4)]
    assert call.tiles is not None
    of_queries, of_keys = packed.table(call.tiles)
    if width == 256:
        run(call.main, key_pass, [*inputs, statistics, dk, dv, of_keys], seed, {})
        dq_of_tokens = packed.like(0)
        run(call.last, query_pass, [*inputs, statistics, dq_of_tokens, of_queries], seed, {})
        dqs = [packed.of(i, 0, dq_of_tokens) for i in range(len(owned))]
        assert (dq_of_tokens[ends[0] :] == 0).all()
    else:
        memory = [*inputs, statistics, dq_sum, dk, dv, of_keys]
        turns = counters(dq_sum, queries)
        if width > 128:
            turns = turns[1:] if packed.options.deterministic else None
        memory.append(turns)
        run(call.main, BACKWARD_MODULES[width], memory, seed, {})
        dqs = [
            scale * in_order(dq_sum[rows]).reshape(1, heads, -1, width)[:, :, :n, : head_dims[0]]
            for rows, n in zip(owned, (p.lengths[0] for p in packed.problems), strict=True)
        ]
        assert (dq_sum[first : first + spare] == 0).all()
    dk, dv = dk - adds, dv - adds
    for i, dq in enumerate(dqs):
        close(dq, expected[i][0])
        close(packed.of(i, 1, dk), expected[i][1])
        close(packed.of(i, 1, dv), expected[i][2])
    assert (dk[ends[1] :] == 0).all()
    assert (dv[ends[1] :] == 0).all()


NOTHING: Any = lambda *arguments: None  # noqa: E731


def _has_tile_already(q_full: Any, records: Any, round_index: int, options: Any) -> bool:
    """What the producer wrote so far, in place of what it has written when it says so."""
    first_row: Any = records.index(round_index % options.q_slots).load(None).value[0]
    return first_row != forward_kernel.NO_TILE.value


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        (check_backward, {"DS_BUFFERS": 2}),  # what the slower consumer reads is written
        (check_backward, {"DS_WRITTEN": 0}),  # dS and dO have the same barriers
        (check_backward, {"ds_written": lambda consumer, steps: 4 + consumer}),
        (check_backward, {"fence_async_shared": NOTHING}),
        (check_backward, {"tma": SimpleNamespace(store_wait=NOTHING)}),
        (check_forward, {"fence_async_shared": NOTHING}),
        (check_forward, {"_scheduler_barrier_wait": NOTHING}),
        (check_forward, {"_wait_for_release": NOTHING}),
        (check_forward, {"_has_tile": _has_tile_already}),
    ],
    ids=[
        "two tiles of dS",
        "shared",
        "one barrier each",
        "no fence",
        "no wait for stores",
        "forward",
        "no scheduler barrier",
        "no wait for releases",
        "no wait for the next tile",
    ],
)
def test_the_simulation_finds_what_is_wrong(
    check: Callable[..., None], changes: dict[str, Any]
) -> None:
    def all_schedules() -> None:
        for seed in range(40):
            check(problem_of((650, 400), 64), seed, **changes)

    with pytest.raises(AssertionError):
        all_schedules()


def test_the_simulation_finds_releases_while_products_are_in_flight() -> None:
    with pytest.raises(SimulationError, match="has a product in flight"):
        check_forward(problem_of((650, 400), 64), 0, wait_for_columns=lambda accs, pending: accs)


@pytest.mark.parametrize(
    "changes",
    [
        {"P_WRITTEN": 4},  # and P_READ have the same barrier
        {"fence_async_shared": NOTHING},
        {"_wait": NOTHING},
        {"start_dp": lambda v, do, statistics, columns, layout: Tensor(v.array @ do.array.T)},
    ],
    ids=["one barrier", "no fence", "no wait for keys", "without delta"],
)
def test_the_simulation_finds_what_is_wrong_in_two_passes(changes: dict[str, Any]) -> None:
    def all_schedules() -> None:
        for seed in range(10):
            check_backward(problem_of((400, 200), 256), seed, **changes)

    with pytest.raises(AssertionError):
        all_schedules()


def test_the_simulation_finds_programs_that_do_not_signal() -> None:
    problem = problem_of((200, 300), 64, deterministic=True)
    with pytest.raises(SimulationError, match="a predecessor that never signals"):
        check_backward(problem, 0, signal_successors=NOTHING)


def test_no_program_takes_two_tiles_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others begin when one, at the end of its tile of keys, takes another or waits for them."""
    take, wait = Machine.atomic_add, Machine.wait_until_reached
    may_begin = threading.Event()

    def take_late(machine: Machine, pointer: Pointer, x: int) -> Any:
        assert machine.program == 0 or may_begin.wait(60)
        taken = take(machine, pointer, x)
        if taken > 0:
            may_begin.set()
        return taken

    def wait_for_others(machine: Machine, counter: Pointer, n: int) -> None:
        may_begin.set()
        wait(machine, counter, n)

    monkeypatch.setattr(forward, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(Machine, "atomic_add", take_late)
    monkeypatch.setattr(Machine, "wait_until_reached", wait_for_others)
    problem = problem_of((500, 200), 64, deterministic=True)
    check_backward(problem, 0)
    may_begin.clear()
    with pytest.raises(SimulationError, match="a predecessor that never signals"):
        check_backward(problem, 0, wait_until_reached=NOTHING)


def _dawdle(machine: Machine, counter: Pointer, n_signals: int, index: int, threads: int) -> None:
    """Programs add in an order that changes from run to run."""
    time.sleep(random.choice((0, 0.1)))
    for barrier in (index, index + 1):
        machine.named_arrive(barrier, threads, WARP)


def test_the_simulation_finds_additions_that_are_not_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, "wait_for_predecessors", _dawdle)

    def all_schedules() -> None:
        problem = problem_of((400, 400), 64, causal=True, deterministic=True)
        for seed in range(10):
            check_backward(problem, 0, seed)

    with pytest.raises(AssertionError):
        all_schedules()


def key_tiles_in_order(
    heads: int,
    tiles: int,
    programs: int,
    at_once: int,
    *,
    ordered: bool = False,
    packed: bool,
    has_left: bool = False,
    ring: int = 0,
) -> list[tuple[int, int]]:
    """(key head, tile of keys) of each program of a backward kernel, of 64 keys a tile.

    The head is negative if the program walks backwards.
    """
    options = SimpleNamespace(
        packed=packed, ordered=ordered, at_once=at_once, ring=ring, has_left=has_left, padding=64
    )
    # Of a packed batch, two sequences of the same length.
    table = np.zeros((1 + 2 * tiles, FIELDS.value), dtype=int)
    for tile in range(2 * tiles):
        sequence = tile // tiles
        end = (sequence + 1) * tiles * 64
        table[1 + tile] = [sequence * tiles, end, tiles * 64, end, tiles * 64, 1, 0, sequence]
    sizes = (tiles * 64, tiles * 64, heads, 1, 0)
    found = []
    for program in range(programs):
        functions = load(schedule, Machine(0, 0))
        first_key, head, sequence, order, *_ = functions["key_tile_at"](
            program, programs, (sizes, Pointer(table.reshape(-1)), 0), 64, options
        )
        sign = -1 if at_once > 0 and order else 1
        found.append((sign * (int(sequence) * heads + int(head)), int(first_key) // 64))
    return found


def test_last_heads_are_computed_together_where_their_tiles_differ() -> None:
    """All begin their longest tiles first, and the shortest ones fill what is left."""
    one_by_one = [(head, tile) for head in range(8) for tile in range(3)]
    assert key_tiles_in_order(4, 3, 24, 0, packed=False) == one_by_one
    last_first = [(head, 2 - tile) for head, tile in one_by_one]
    assert key_tiles_in_order(4, 3, 24, 0, ordered=True, packed=False) == last_first
    together = [(head, tile) for tile in range(3) for head in (6, 7)]
    assert key_tiles_in_order(4, 3, 24, 7, packed=False) == [*one_by_one[:18], *together]
    every = [(head, tile) for tile in range(3) for head in range(8)]
    assert key_tiles_in_order(4, 3, 24, 1000, packed=False) == every


def test_last_heads_are_walked_backwards_where_programs_add_in_order() -> None:
    """With the longest tiles first, and so that predecessors come first all the same."""
    first = [(head + i, 2 - tile) for head in (0, 2, 4) for tile in range(3) for i in range(2)]
    last = [(-head, tile) for tile in range(3) for head in (6, 7)]
    assert key_tiles_in_order(4, 3, 24, 7, ordered=True, packed=False) == [*first, *last]
    uneven = [
        (head, 2 - tile) for heads in ((0, 1, 2), (3, 4)) for tile in range(3) for head in heads
    ]
    last = [(-head, tile) for tile in range(3) for head in (5, 6, 7)]
    assert key_tiles_in_order(4, 3, 24, 9, ordered=True, packed=False) == [*uneven, *last]
    every = [(head, 2 - tile) for tile in range(3) for head in range(8)]
    assert key_tiles_in_order(4, 3, 24, 1000, ordered=True, packed=False) == every


def test_programs_of_ordered_windows_take_groups_of_heads_of_one_size() -> None:
    """Six heads at once, of two steps for each tile, would leave two: so it is twice four."""
    groups = [(head + i, 2 - tile) for head in (0, 4) for tile in range(3) for i in range(4)]
    found = key_tiles_in_order(4, 3, 24, 13, ordered=True, packed=False, has_left=True)
    assert found == groups


def test_first_rings_come_before_second_ones_of_as_many_heads_as_fill_the_gpu() -> None:
    """Nine tiles of queries and keys: rings of five programs and four, twice five at a time."""
    expected = [
        (head + i, first + j)
        for head in (0, 2, 4, 6)
        for first, count in ((0, 5), (5, 4))
        for i in range(2)
        for j in range(count)
    ]
    assert key_tiles_in_order(4, 9, 72, 0, ordered=True, packed=False, ring=5) == expected
    together = [(head, first + j) for first, count in ((0, 5), (5, 4)) for head in range(6)
                for j in range(count)]  # fmt: skip
    assert key_tiles_in_order(3, 9, 54, 0, ordered=True, packed=False, ring=15) == together


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False, "has_left": False, "ring": 3},
        {"is_causal": False, "has_left": False, "ring": 33},
        {"is_causal": True, "has_left": False, "at_once": 8},
        {"is_causal": True, "has_left": True, "at_once": 8},
        {"is_causal": False, "has_left": True},
    ],
    ids=str,
)
def test_each_program_has_its_own_turn_and_the_first_one_stores(
    options: dict[str, Any], queries: int
) -> None:
    pick, keys, n_heads = random.Random(queries), 128, 3
    usual = {"ordered": True, "packed": False, "padding": queries, "ring": 0, "at_once": 0}
    given = SimpleNamespace(**(usual | options))
    common, order = load(backward_common, Machine(0, 0)), load(turns, Machine(0, 0))
    for _ in range(40):
        n_queries, n_keys = (pick.choice([1, 128, 129, 300, pick.randint(1, 1500)]) for _ in "qk")
        offset, band = pick.choice([0, n_keys - n_queries]), pick.choice([0, 127, 400])
        n_programs = n_heads * -(-n_keys // keys)
        sizes = (n_queries, n_keys, n_heads, 1, offset)
        found: dict[tuple[int, int], dict[int, bool]] = {}
        for program in range(n_programs):
            work = (sizes, None, band)
            place = common["key_tile_at"](program, n_programs, work, keys, given)
            own, walked, tiles = common["work_of_tile"](place, work, keys, queries, given)
            storing = common["steps_that_store"](own, walked, tiles, keys, queries, given)
            tile, head = walked[0], own[1]
            for step in range(int(walked[3])):
                turn = order["predecessors"](tile, own, walked, tiles, keys, queries, given)
                turns_of_tile = found.setdefault((int(head), int(tile)), {})
                assert int(turn) not in turns_of_tile
                turns_of_tile[int(turn)] = bool(step < storing)
                tile, head = order["next_query_tile"](tile, head, walked)
        assert len(found) <= n_heads * -(-n_queries // queries)
        for turns_of_tile in found.values():
            assert sorted(turns_of_tile) == list(range(len(turns_of_tile)))
            assert [turn for turn, stores in turns_of_tile.items() if stores] == [0]


def test_heads_of_a_packed_sequence_are_computed_together_if_all_run_at_once() -> None:
    one_by_one = [(head, tile) for head in range(8) for tile in range(3)]
    assert key_tiles_in_order(4, 3, 24, 11, packed=True) == one_by_one
    first = [(head, tile) for tile in range(3) for head in range(4)]
    second = [(head + 4, tile) for head, tile in first]
    assert key_tiles_in_order(4, 3, 24, 12, packed=True) == [*first, *second]


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({"causal": True}, 132),
        ({"window": (None, 3)}, 132),
        ({}, 0),
        ({"causal": True, "window": (500, None)}, 0),
        ({"causal": True, "deterministic": True}, 264),
        ({"causal": True, "window": (500, None), "deterministic": True}, 264),
        ({"deterministic": True}, 0),
    ],
    ids=str,
)
def test_only_the_order_under_a_causal_mask_changes(
    options: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 132)
    q = torch.empty(1, 2, 200, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 2, 200, device="meta")
    problem = new_problem(head_dim=64, **options)
    call = backward.HopperBackwardCall((q, q, q, q, lse, q, None), problem)
    assert call.main.constants["OPTIONS"].at_once == at_once
