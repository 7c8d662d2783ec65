"""The Hopper tier's backward kernel, run on the host on random schedules; see gluon_simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashattn_triton.hopper import eligibility

pytest.importorskip("triton")
if eligibility.triton_refusal() is not None:
    pytest.skip(str(eligibility.triton_refusal()), allow_module_level=True)

from gluon_simulator import Descriptor, Machine, Pointer, load

from flashattn_triton.hopper import backward_kernel
from flashattn_triton.hopper.configs import backward_config
from flashattn_triton.hopper.launch import edges
from flashattn_triton.options import resolve_options

LOG2_E = 1.4426950408889634
KEYS = 128


def dense(q: Any, k: Any, v: Any, do: Any, seen: Any, scale: float) -> tuple[Any, ...]:
    """(statistics L and delta, dQ, dK, dV) of (B, H, N, D) arrays, by the definition."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.where(seen, q @ k.swapaxes(2, 3) * scale, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s).sum(3))
    lse[np.isneginf(lse)] = np.inf  # as the kernel that comes before says it
    p = np.exp(s - lse[..., None])
    delta = (p @ v * do).sum(3)
    ds = p * (do @ v.swapaxes(2, 3) - delta[..., None]) * scale
    dk, dv = (
        x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
        for x in (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do)
    )
    return lse, delta, ds @ k, dk, dv


def simulate(
    seed: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    batch: int = 1,
    changes: dict[str, Any] | None = None,
    **chosen: Any,
) -> None:
    """Runs every program of one problem and compares dQ, dK and dV with the definition's."""
    options = resolve_options(head_dim=head_dim, **chosen)
    queries = backward_config(head_dim, options).queries
    (n_heads, kv_heads), (n_queries, n_keys) = heads, lengths
    random = np.random.default_rng(seed)
    q, do = random.standard_normal((2, batch, n_heads, n_queries, head_dim))
    k, v = random.standard_normal((2, batch, kv_heads, n_keys, head_dim))
    offset, band = edges(n_queries, n_keys, options)
    last = np.arange(n_queries)[:, None] + offset
    seen = np.ones((n_queries, n_keys), bool)
    if options.band[1] is not None:
        seen &= np.arange(n_keys) <= last
    if options.band[0] is not None:
        seen &= np.arange(n_keys) >= last - band
    lse, delta, *expected = dense(q, k, v, do, seen, options.scale)

    n_padded = -(-n_queries // queries) * queries
    statistics = np.zeros((2, batch, n_heads, n_padded))
    statistics[0] = -np.inf
    statistics[..., :n_queries] = np.stack((-lse * LOG2_E, -delta))
    dq_sum = np.zeros(batch * n_heads * n_padded * head_dim)
    dk, dv = np.full((2, *k.shape), np.nan)
    for program in range(-(-n_keys // KEYS) * kv_heads * batch):
        functions = load(backward_kernel, Machine(seed, program), **changes or {})
        functions["hopper_backward_kernel"](
            Descriptor(q, (1, 1, queries, head_dim)),
            Descriptor(k, (1, 1, KEYS, head_dim)),
            Descriptor(v, (1, 1, KEYS, head_dim)),
            Descriptor(do, (1, 1, queries, head_dim)),
            Descriptor(statistics.reshape(-1, queries), (1, queries), "float32"),
            Pointer(dq_sum),
            Descriptor(dk, (1, 1, KEYS // 2, head_dim)),
            Descriptor(dv, (1, 1, KEYS // 2, head_dim)),
            *(n_queries, n_keys, kv_heads, n_heads // kv_heads, offset, band),
            *(options.scale, options.scale * LOG2_E),
            RAGGED=n_keys % KEYS != 0,
            is_causal=options.band[1] is not None,
            HAS_LEFT=options.band[0] is not None,
        )
    dq = options.scale * in_rows(dq_sum, head_dim).reshape(batch, n_heads, n_padded, head_dim)
    for actual, e in zip((dq[:, :, :n_queries], dk, dv), expected, strict=True):
        np.testing.assert_allclose(actual, e, rtol=0, atol=1e-9)


def in_rows(total: Any, head_dim: int) -> Any:
    """(rows, D) of sums whose (64, 64) blocks lie as wgmma leaves them in registers."""
    # Axes: block of rows, of columns, c // 8, r // 16, r % 8, c % 8 // 2, r % 16 // 8, c % 2.
    blocks = total.reshape(-1, head_dim // 64, 8, 4, 8, 4, 2, 2)
    return blocks.transpose(0, 3, 6, 4, 1, 2, 5, 7).reshape(-1, head_dim)


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
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_on_random_schedules(name: str, head_dim: int) -> None:
    for seed in range(2):
        simulate(seed, **({"heads": (1, 1), "head_dim": head_dim} | PROBLEMS[name]))


@pytest.mark.parametrize(
    "changes",
    [
        {"DS_BUFFERS": 2},  # what the slower consumer reads is written
        {"DS_WRITTEN": 0},  # dS and dO have the same barriers
        {"_ds_written": lambda consumer, steps: 4 + consumer},  # one barrier each
        {"fence_async_shared": lambda: None},
    ],
    ids=["two tiles of dS", "shared barriers", "one barrier each", "no fence"],
)
def test_the_simulation_finds_what_is_wrong(changes: dict[str, Any]) -> None:
    def all_schedules() -> None:
        for seed in range(40):
            simulate(seed, (1, 1), (650, 128), 64, changes=changes)

    with pytest.raises(AssertionError):
        all_schedules()
