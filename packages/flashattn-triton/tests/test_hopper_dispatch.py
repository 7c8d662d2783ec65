"""Which inputs the Hopper tier takes, and what is said of the others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashattn_triton import dispatch, explain, inputs, triton_versions
from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.hopper import eligibility
from flashattn_triton.hopper.configs import forward_config
from flashattn_triton.problem import Problem, new_problem

PLAIN = Problem(scale=0.125)


def refusal(
    capability: tuple[int, int] = (9, 0),
    dtype: torch.dtype = torch.bfloat16,
    head_dims: tuple[int, int] = (64, 64),
    options: Problem = PLAIN,
) -> str | None:
    return eligibility.refusal(capability, dtype, head_dims, options)


@pytest.fixture
def right_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_versions, "refusal", lambda: None)


@pytest.mark.usefixtures("right_triton")
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("scale", [0.125, -2.0])
@pytest.mark.parametrize("window", [(None, None), (1023, None), (None, 5), (1200, 50)])
def test_what_it_takes(
    head_dim: int, dtype: torch.dtype, causal: Any, scale: float, window: Any
) -> None:
    options = Problem(causal=causal, scale=scale, window=window)
    assert refusal(dtype=dtype, head_dims=(head_dim, head_dim), options=options) is None


@pytest.mark.usefixtures("right_triton")
@pytest.mark.parametrize("window", [(3, None), (0, 5)])
def test_short_windows_of_wide_heads(window: Any) -> None:
    options = Problem(causal="top-left", scale=0.1, window=window)
    assert refusal(head_dims=(72, 72), options=options) is None


@pytest.mark.usefixtures("right_triton")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"options": Problem(scale=1.0, causal="top-left", window=(1022, None))},
            "up to head_dim 64 it takes windows of at least 1024 keys, and this is 1023",
        ),
        (
            {"head_dims": (40, 40), "options": Problem(scale=1.0, window=(100, 300))},
            "up to head_dim 64 .* and this is 401",
        ),
        ({"capability": (8, 0)}, "needs compute capability 9.0, and this is 8.0"),
        ({"capability": (10, 0)}, "needs compute capability 9.0, and this is 10.0"),
        ({"dtype": torch.float32}, "takes float16 and bfloat16, and this is float32"),
        ({"head_dims": (36, 36)}, "takes multiples of 8 from 40 to 256 as head_dim, .* is 36"),
        ({"head_dims": (32, 32)}, "takes multiples of 8 from 40 to 256 as head_dim, .* is 32"),
        ({"head_dims": (132, 132)}, "takes multiples of 8 .* as head_dim, and this is 132"),
        ({"head_dims": (264, 264)}, "takes multiples of 8 .* as head_dim, and this is 264"),
        ({"head_dims": (128, 64)}, r"two head_dims where .* and this is \(128, 64\)"),
        ({"head_dims": (192, 32)}, r"two head_dims where .* and this is \(192, 32\)"),
        ({"options": Problem(scale=1.0, softcap=2.0)}, "no soft-cap"),
        ({"options": Problem(scale=0.0)}, "a scale other than 0"),
    ],
)
def test_what_it_refuses(arguments: dict[str, Any], reason: str) -> None:
    assert re.search(reason, str(refusal(**arguments)))


@pytest.fixture
def on_sm90(right_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as if every CUDA device were an H200."""
    gpu = dispatch.GPU(name="H200", capability=(9, 0), shared_memory=232448)
    monkeypatch.setattr(dispatch, "describe_gpu", lambda index: gpu)


def plan(
    implementation: str = "auto",
    head_dims: tuple[int, int] = (64, 64),
    options: Problem = PLAIN,
    tiling: Tiling | None = None,
) -> dispatch.Plan:
    device = torch.device("cuda", 0)
    problem = replace(options, implementation=implementation, tiling=tiling)
    return dispatch._choose(device, torch.bfloat16, head_dims, problem, ())


@pytest.mark.usefixtures("on_sm90")
@pytest.mark.parametrize("implementation", ["auto", "hopper"])
def test_it_is_chosen(implementation: str) -> None:
    chosen = plan(implementation)
    assert chosen.tier == "hopper"
    assert chosen.hopper_backward


@pytest.mark.usefixtures("on_sm90")
@pytest.mark.parametrize(
    ("options", "by_auto"),
    [
        ({"causal": True}, True),
        ({"causal": "bottom-right"}, True),
        ({}, True),
        ({"causal": True, "window": (2000, None)}, True),
        ({"window": (2000, None)}, False),
    ],
)
def test_deterministic_gradients(options: dict[str, Any], by_auto: bool) -> None:
    """By "auto" where they are faster than the portable tier's, by name with every mask."""
    resolved = new_problem(head_dim=64, deterministic=True, **options)
    assert plan("auto", options=resolved).hopper_backward == by_auto
    assert plan("hopper", options=resolved).hopper_backward


@pytest.mark.usefixtures("on_sm90")
@pytest.mark.parametrize("implementation", ["auto", "hopper"])
@pytest.mark.parametrize(
    "head_dims",
    [(192, 128), (136, 72), (160, 40), (136, 136), (72, 136), (200, 128), (256, 256)],
)
def test_gradients_of_wide_heads(head_dims: tuple[int, int], implementation: str) -> None:
    for causal in ("none", "top-left", "bottom-right"):
        options = Problem(scale=-0.1, causal=causal)
        assert plan(implementation, head_dims, options).hopper_backward
    for other in (
        Problem(scale=0.1, window=(100, None)),
        Problem(scale=0.1, deterministic=True),
        Problem(scale=0.1, softcap=20.0),
    ):
        assert plan(implementation, head_dims, other).hopper_backward


@pytest.mark.usefixtures("on_sm90")
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_soft_caps(head_dim: int) -> None:
    capped = Problem(scale=0.125, softcap=20.0)
    chosen = plan("hopper", head_dims=(head_dim, head_dim), options=capped)
    assert chosen.tier == "hopper"
    assert chosen.hopper_backward == (head_dim > 64)
    assert chosen.tiling is not None
    by_auto = plan(head_dims=(head_dim, head_dim), options=capped)
    assert by_auto.tier == ("hopper" if head_dim > 64 else "triton")
    assert by_auto.hopper_backward == (head_dim > 64)


@pytest.mark.usefixtures("on_sm90")
def test_the_portable_tier_says_why_not() -> None:
    chosen = plan(head_dims=(84, 84))
    assert chosen.tier == "triton"
    assert "not the Hopper tier: it takes multiples of 8 from 40 to 256" in chosen.reason
    assert "Hopper" not in plan("triton").reason
    assert plan("triton").tier == "triton"


@pytest.mark.usefixtures("on_sm90")
def test_an_unsupported_triton_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_versions, "refusal", lambda: "it needs Triton 3.6")
    monkeypatch.setattr(inputs, "_given", set())
    with pytest.warns(UserWarning, match=r"faster on H200, .* it needs Triton 3\.6\. The portable"):
        assert plan().tier == "triton"
    assert "not the Hopper tier: it needs Triton 3.6" in plan().reason


@pytest.mark.usefixtures("on_sm90")
def test_by_name_it_insists() -> None:
    with pytest.raises(ValueError, match="'hopper' cannot run this: it takes multiples of 8"):
        plan("hopper", head_dims=(84, 84))
    small = Tiles(64, 64, 4, 2)
    tiling = Tiling(forward=small, key_pass=small, query_pass=small)
    with pytest.raises(ValueError, match="tiling must be None with implementation 'hopper'"):
        plan("hopper", tiling=tiling)
    assert plan("auto", tiling=tiling).tier == "triton"


def test_it_needs_cuda() -> None:
    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'hopper' must have CUDA tensors, but got cpu"):
        explain(q, q, q, implementation="hopper")


@pytest.mark.parametrize(("heads", "consumers"), [(1, 2), (16, 3)])
def test_tiles_are_smaller_where_all_run_at_once(heads: int, consumers: int) -> None:
    problem = new_problem(head_dim=64, causal=True)
    config = forward_config((64, 64), 16384, problem, heads * 16384)
    assert config.consumers == consumers


@pytest.mark.gpu
def test_tensors_that_the_tma_cannot_read_take_the_portable_tier() -> None:
    if dispatch.describe_gpu(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    text = explain(q, q, q, causal=True)
    assert text.startswith("tier: hopper")
    assert "forward: 128 queries x 128 keys, 2 consumers of 4 warps, 2 stages" in text
    assert "backward, fused (dQ by fp32 addition): 128 queries x 128 keys" in text
    text = explain(q, q, q, causal=True, deterministic=True)
    assert text.startswith("tier: hopper")
    assert "backward, fused (dQ by fp32 addition in a fixed order): 128 queries" in text
    assert "in a fixed order" in explain(q, q, q, deterministic=True)
    in_a_window = explain(q, q, q, causal=True, window=(2000, None), deterministic=True)
    assert "in a fixed order" in in_a_window
    text = explain(q, q, q, window=(2000, None), deterministic=True)  # a left edge alone
    assert text.startswith("tier: hopper")
    assert "fused" not in text
    assert "backward, keys (dK, dV)" in text
    shared = q[:, :1].expand(-1, 2, -1, -1)
    text = explain(q, shared, q)
    assert text.startswith("tier: triton")
    assert "not the Hopper tier: key's strides must be positive multiples of 8" in text
    with pytest.raises(ValueError, match="'hopper' cannot run this: key's strides"):
        explain(q, shared, q, implementation="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_packed_batches_without_scores_take_the_portable_tier(lengths: tuple[int, int]) -> None:
    q, k = (torch.empty(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in lengths)
    problem = new_problem("thd", 64, lengths)
    plan = dispatch.choose(q, k, k, problem)
    assert (plan.tier, plan.hopper_backward) == ("triton", False)
