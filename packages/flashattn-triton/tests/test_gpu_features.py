"""Masks, caches and derivatives beyond the first on a GPU, beside the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton import explain, flash_attention
from flashattn_triton.primitives import HIDDEN_BIAS, minus_infinity_below

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def tensors(dtype: torch.dtype, n_queries: int = 300, n_keys: int = 300) -> list[Tensor]:
    """Query of 4 heads, key and value of 2."""
    shapes = ((2, 4, n_queries, 64), (2, 2, n_keys, 64), (2, 2, n_keys, 64))
    return [torch.randn(s, dtype=dtype, device="cuda", requires_grad=True) for s in shapes]


def assert_near(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    """Within the tolerance, in units of the largest expected number."""
    for a, e in zip(actual, expected, strict=True):
        scale = e.double().abs().max().clamp_min(1e-3)
        assert (a.double() - e.double()).abs().max() <= TOLERANCE[dtype] * scale


@triton.jit
def minus_infinity_below_kernel(bias_ptr, out_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, minus_infinity_below(tl.load(bias_ptr + i), False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_numbers_that_hide_a_key(dtype: torch.dtype) -> None:
    """All there are, zeros of either sign, infinities and NaN too."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    bias, out = bits.view(dtype), torch.empty(2**16, device="cuda")
    minus_infinity_below_kernel[(2**16 // 1024,)](bias, out, N=1024)
    expected = bias.float().masked_fill(bias <= HIDDEN_BIAS.value, float("-inf"))
    assert torch.equal(out.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(out[number].view(torch.int32), expected[number].view(torch.int32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_masks_hide_nan_in_kernels(dtype: torch.dtype, shared: bool) -> None:
    inputs = tensors(dtype)
    mask = torch.rand(2, 1, 1 if shared else 300, 300, device="cuda") > 0.3
    mask[..., 200:] = False
    bias = torch.randn(1, 4, 300, 300, dtype=dtype, device="cuda", requires_grad=True)
    results = []
    for implementation in ("triton", "reference"):
        given = [x.detach().clone() for x in inputs]
        if implementation == "triton":
            given[1][:, :, 200:] = given[2][:, :, 200:] = float("nan")
        leaves = [x.requires_grad_() for x in given]
        out = flash_attention(*leaves, bias=bias, mask=mask, implementation=implementation)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (*leaves, bias))))
    assert_near(*results, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"causal": "bottom-right", "window": (40, 0)}, slice(0, 260)),
        ({"causal": "top-left"}, slice(300, None)),
    ],
    ids=["decoding in a window", "causal"],
)
def test_keys_that_a_band_hides_may_hold_nan(
    options: dict[str, Any], hidden: slice, dtype: torch.dtype
) -> None:
    inputs, results = tensors(dtype, 300, 600), []
    for implementation in ("auto", "reference"):
        given = [x.detach().clone() for x in inputs]
        if implementation == "auto":
            given[1][:, :, hidden] = given[2][:, :, hidden] = float("nan")
        leaves = [x.requires_grad_() for x in given]
        out = flash_attention(*leaves, **options, implementation=implementation)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert_near(*results, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n_queries", [1, 5])
def test_caches_in_a_graph(dtype: torch.dtype, n_queries: int) -> None:
    query, key, value = (x.detach().transpose(1, 2) for x in tensors(dtype, n_queries))
    lengths = torch.tensor([300, 5], device="cuda")

    def step() -> Any:
        return flash_attention(
            query, key, value, key_lengths=lengths, causal="bottom-right", layout="bshd"
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for given in ([300, 5], [17, 264]):
        lengths.copy_(torch.tensor(given))
        graph.replay()
        for i, n in enumerate(given):
            alone = flash_attention(
                query[i : i + 1], key[i : i + 1, :n], value[i : i + 1, :n],
                causal="bottom-right", layout="bshd", implementation="reference",
            )  # fmt: skip
            assert_near([out[i : i + 1]], [alone], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_forward_mode_and_gradient_penalties(dtype: torch.dtype) -> None:
    inputs, directions = tensors(dtype), tensors(dtype)
    results = []
    for implementation in ("auto", "reference"):

        def function(*x: Tensor, implementation: Any = implementation) -> Any:
            return flash_attention(*x, causal=True, implementation=implementation)

        jvp: Any = torch.func.jvp
        out, tangent = jvp(function, tuple(inputs), tuple(directions))
        loss = function(*inputs).float().square().sum()
        gradients = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = torch.stack([g.float().square().sum() for g in gradients]).sum()
        results.append((out, tangent, *torch.autograd.grad(penalty, inputs)))
    assert_near(*results, dtype)


@pytest.mark.parametrize("widths", [(512, 512), (576, 512)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_wide_heads(widths: tuple[int, int], with_bias: bool) -> None:
    shapes = ((2, 4, 300, widths[0]), (2, 2, 333, widths[0]), (2, 2, 333, widths[1]))
    inputs = [torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
    bias = torch.randn(1, 4, 300, 333, device="cuda", requires_grad=True) if with_bias else None
    results = []
    for implementation in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, lse = flash_attention(
            *leaves, bias=bias, causal="bottom-right", return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        wanted = leaves if bias is None else [*leaves, bias]
        loss = out.float().square().sum() + lse.sum()
        results.append((out, lse, *torch.autograd.grad(loss, wanted)))
    assert_near(*results, torch.bfloat16)
    said = explain(*inputs, causal="bottom-right")
    assert "tier: triton" in said
    assert ("backward: tiles of PyTorch, above head_dim 512" in said) == (widths[0] > 512)


def test_wide_heads_of_fp32_are_refused_with_the_tier_that_has_no_limit() -> None:
    wide = torch.randn(1, 2, 40, 512, device="cuda")
    with pytest.raises(
        ValueError, match=r"at most 256 for Triton's kernels.*Use implementation='tiled'"
    ):
        flash_attention(wide, wide, wide)
    out = flash_attention(wide, wide, wide, implementation="tiled")
    assert_near([out], [flash_attention(wide, wide, wide, implementation="reference")], wide.dtype)
    assert "tier: tiled" in explain(wide, wide, wide, implementation="tiled")
