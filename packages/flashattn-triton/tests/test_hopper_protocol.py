"""The Hopper tier's kernels, run on the host on random schedules; see gluon_simulator.

Launches are made for meta tensors, as for a GPU of few multiprocessors. Everything is computed in
fp64, so that results are the definition's, or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_triton import triton_versions

pytest.importorskip("triton")
if triton_versions.refusal() is not None:
    pytest.skip(str(triton_versions.refusal()), allow_module_level=True)

from flashattn_triton.hopper import backward, backward_kernel, forward, forward_kernel
from flashattn_triton.hopper.configs import backward_config, tile_width
from flashattn_triton.hopper.launch import FastLaunch, TileMap, edges
from flashattn_triton.options import AttentionOptions, resolve_options
from gluon_simulator import Descriptor, Machine, Pointer, load


def run(
    launch: FastLaunch,
    module: ModuleType,
    memory: Sequence[Any],
    seed: int,
    changes: dict[str, Any],
) -> None:
    """All programs of one launch, one after another, on ``memory``: contiguous fp64 arrays."""
    parameters: list[Any] = []
    for like, array in zip(launch.parameters, memory, strict=True):
        if isinstance(like, TileMap):
            dtype = "float32" if like.dtype == torch.float32 else "half"
            parameters.append(Descriptor(array.reshape(like.shape), like.block, dtype))
        else:
            parameters.append(Pointer(array.reshape(-1)))
    for program in range(launch.grid[0]):
        functions = load(module, Machine(seed, program, launch.grid[0]), **changes)
        kernel = functions[launch.kernel.__name__]
        kernel(*parameters, *launch.numbers, **launch.constants)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Arrays and results by the definition; the letters are the kernels'."""

    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int]
    head_dim: int
    batch: int = 1
    options: AttentionOptions

    def inputs(self, seed: int) -> list[Any]:
        """Q, K, V, dO."""
        random = np.random.default_rng(seed)
        shapes = [
            (self.batch, *x, self.head_dim) for x in zip(self.heads, self.lengths, strict=True)
        ]
        return [random.standard_normal(shapes[i]) for i in (0, 1, 1, 0)]

    def meta(self) -> list[torch.Tensor]:
        """Q, K and V."""
        shapes = [
            (self.batch, *x, self.head_dim) for x in zip(self.heads, self.lengths, strict=True)
        ]
        return [torch.empty(shapes[i], dtype=torch.bfloat16, device="meta") for i in (0, 1, 1)]

    def seen(self) -> Any:
        """(N_q, N_k)."""
        (n_queries, n_keys), (left, right) = self.lengths, self.options.band
        offset, band = edges(n_queries, n_keys, self.options)
        last = np.arange(n_queries)[:, None] + offset
        keys = np.arange(n_keys)
        return (keys <= (n_keys if right is None else last)) & (
            keys >= (0 if left is None else last - band)
        )

    def probabilities(self, q: Any, k: Any) -> tuple[Any, Any]:
        """P and L, for keys that are repeated already."""
        s = np.where(self.seen(), q @ k.swapaxes(2, 3) * self.options.scale, -np.inf)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(s).sum(3))
        return np.exp(s - np.where(np.isneginf(lse), 0.0, lse)[..., None]), lse

    def repeated(self, x: Any) -> Any:
        return np.repeat(x, self.heads[0] // self.heads[1], axis=1)

    def summed(self, x: Any) -> Any:
        """Gradients of repeated keys as those of keys."""
        return x.reshape(self.batch, self.heads[1], -1, *x.shape[2:]).sum(2)


def check_forward(problem: Problem, seed: int, **changes: Any) -> None:
    q, k, v, _ = problem.inputs(seed)
    p, lse = problem.probabilities(q, problem.repeated(k))
    out, rows = np.full(q.shape, np.nan), np.full(lse.shape, np.nan)
    launch = forward.hopper_forward_call(*problem.meta(), problem.options).launch
    run(launch, forward_kernel, [q, k, v, out, rows], seed, changes)
    close(rows, lse)
    close(out, p @ problem.repeated(v))


def check_backward(problem: Problem, seed: int, **changes: Any) -> None:
    q, k, v, do = problem.inputs(seed)
    scale, width = problem.options.scale, tile_width(problem.head_dim)
    keys, values = map(problem.repeated, (k, v))
    p, lse = problem.probabilities(q, keys)
    delta = (p @ values * do).sum(3)
    ds = p * (do @ values.swapaxes(2, 3) - delta[..., None]) * scale

    queries, n_queries = backward_config(problem.head_dim, problem.options).queries, q.shape[2]
    n_padded = -(-n_queries // queries) * queries
    # In parts, as the kernel that comes before has it; far where P is to be 0.
    added = np.zeros((*q.shape[:2], n_padded, 2))
    added[..., 0] = far = -np.sign(scale) * 2.0**120
    added[:, :, :n_queries, 0] = np.where(np.isneginf(lse), far, -lse / scale)
    added[:, :, :n_queries, 1] = -delta
    parts = np.array((0.5, 0.25, 0.25, 0, 0, 0, 0, 0))
    statistics = added[..., None] * parts
    dq_sum, dk, dv = np.zeros((*q.shape[:2], n_padded, width)), *np.full((2, *k.shape), np.nan)
    meta_q, meta_k, meta_v = problem.meta()
    tensors = [meta_q, meta_k, meta_v, meta_q, meta_q]
    launch = backward._call_for(tensors, None, problem.options).main
    run(launch, backward_kernel, [q, k, v, do, statistics, dq_sum, dk, dv], seed, changes)
    # Each (64, 64) block lies as wgmma leaves it in registers. The axes are blocks of rows and of
    # columns, c // 8, r // 16, r % 8, c % 8 // 2, r % 16 // 8, c % 2.
    blocks = dq_sum.reshape(-1, width // 64, 8, 4, 8, 4, 2, 2).transpose(0, 3, 6, 4, 1, 2, 5, 7)
    dq = blocks.reshape(dq_sum.shape)[:, :, :n_queries, : problem.head_dim]
    close(dq * scale, ds @ keys)
    close(dk, problem.summed(ds.swapaxes(2, 3) @ q))
    close(dv, problem.summed(p.swapaxes(2, 3) @ do))


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def problem_of(lengths: tuple[int, int], head_dim: int, **chosen: Any) -> Problem:
    shape = {name: chosen.pop(name) for name in ("heads", "batch") if name in chosen}
    options = resolve_options(head_dim=head_dim, **chosen)
    return Problem(lengths=lengths, head_dim=head_dim, options=options, **shape)


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
    "bottom-right, grouped": {"heads": (4, 2), "lengths": (333, 411), "causal": "bottom-right"},
    "window": {"heads": (2, 1), "lengths": (500, 500), "causal": True, "window": (100, None)},
    "window, both edges": {"lengths": (400, 500), "window": (40, 90)},
    "window, of one key": {"lengths": (300, 300), "window": (0, 0)},
    "window, its left edge alone": {"lengths": (300, 200), "window": (70, None)},
    "negative scale": {"lengths": (200, 200), "causal": True, "scale": -0.3},
    "longer than the short configurations": {"lengths": (1100, 200)},
    "longer than those, causal": {"lengths": (1100, 300), "causal": True},
}


@pytest.fixture(autouse=True)
def _few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_on_random_schedules(name: str, head_dim: int) -> None:
    seed = list(PROBLEMS).index(name)
    check_forward(problem_of(head_dim=head_dim, **PROBLEMS[name]), seed)


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_backward_on_random_schedules(name: str, head_dim: int) -> None:
    seed = list(PROBLEMS).index(name)
    check_backward(problem_of(head_dim=head_dim, **PROBLEMS[name]), seed)


NOTHING: Any = lambda *arguments: None  # noqa: E731


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        (check_backward, {"DS_BUFFERS": 2}),  # what the slower consumer reads is written
        (check_backward, {"DS_WRITTEN": 0}),  # dS and dO have the same barriers
        (check_backward, {"_ds_written": lambda consumer, steps: 4 + consumer}),
        (check_backward, {"fence_async_shared": NOTHING}),
        (check_forward, {"fence_async_shared": NOTHING}),
        (check_forward, {"_scheduler_barrier_wait": NOTHING}),
    ],
    ids=["two tiles of dS", "shared", "one barrier each", "no fence", "forward", "no turns"],
)
def test_the_simulation_finds_what_is_wrong(
    check: Callable[..., None], changes: dict[str, Any]
) -> None:
    def all_schedules() -> None:
        for seed in range(40):
            check(problem_of((650, 128), 64), seed, **changes)

    with pytest.raises(AssertionError):
        all_schedules()
