"""Merging parts of the keys, and attention sinks: against softmax over all logits in fp64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashattn_triton import flash_attention, flash_attention_varlen, merge
from flashattn_triton.problem import Problem
from flashattn_triton.reference import visibility_mask
from flashattn_triton.tiled import sinks_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["tiled", "triton", "reference"]


def leaves(
    n_queries: int = 19, n_keys: int = 33, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = ((4, n_queries), (2, n_keys), (2, n_keys))
    return [
        torch.randn(2, heads, rows, 16, device=DEVICE, dtype=dtype, requires_grad=True)
        for heads, rows in shapes
    ]


def definition(
    tensors: list[Tensor], sinks: Tensor, causal: Any = "none", softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over the scores and one more column, in fp64; (B, H, N, D) tensors."""
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    options = Problem(scale=1.0, causal=causal)
    seen = visibility_mask(q.shape[2], k.shape[2], options, q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.dtype), rtol=tolerance, atol=tolerance)


# ---- sinks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("lengths", "causal", "softcap"),
    [((19, 33), False, None), ((33, 19), "bottom-right", None), ((21, 21), "top-left", 3.0)],
    ids=str,
)
def test_sinks(
    lengths: tuple[int, int], causal: Any, softcap: float | None, implementation: Any
) -> None:
    """Ragged lengths, grouped heads, and queries that see nothing but the sink."""
    inputs = [*leaves(*lengths), torch.randn(4, device=DEVICE, requires_grad=True)]
    *tensors, sinks = inputs
    out, lse = flash_attention(
        *tensors,
        sinks=sinks,
        causal=causal,
        softcap=softcap,
        return_lse=True,
        implementation=implementation,
    )
    expected = definition(tensors, sinks, causal or "none", softcap)
    close((out, lse), expected)
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    actual = torch.autograd.grad((out, lse), inputs, weights)
    close(actual, torch.autograd.grad(expected, inputs, [w.double() for w in weights]), 2e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_of_half_types(dtype: torch.dtype, layout: Any) -> None:
    """No further from the definition than plain attention is, twice rounded."""
    inputs = [*leaves(dtype=dtype), torch.randn(4, device=DEVICE, dtype=dtype, requires_grad=True)]
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in inputs[:3]]
    out = flash_attention(*given, sinks=inputs[3], layout=layout)
    assert out.dtype == dtype
    expected, _ = definition(inputs[:3], inputs[3])
    out = out.transpose(1, 2) if layout == "bshd" else out
    unit = torch.finfo(dtype).eps
    close((out,), (expected,), 2 * unit)
    weight = torch.randn_like(out)
    actual = torch.autograd.grad(out, inputs, weight)
    for a, e in zip(actual, torch.autograd.grad(expected, inputs, weight.double()), strict=True):
        assert (a - e).abs().max() <= 8 * unit * max(1.0, e.abs().max().item())


def test_sinks_of_packed_sequences_and_other_leading_dimensions() -> None:
    tensors, sinks = leaves(20, 20), torch.randn(4, device=DEVICE, requires_grad=True)
    expected, expected_lse = flash_attention(*tensors, sinks=sinks, return_lse=True)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=DEVICE)
    out, lse = flash_attention_varlen(*packed, starts, starts, 20, 20, sinks=sinks, return_lse=True)
    close(
        (out, lse),
        (expected.transpose(1, 2).flatten(0, 1), expected_lse.transpose(0, 1).flatten(1)),
    )
    weight = torch.randn_like(out)
    actual = torch.autograd.grad(out, sinks, weight)
    rows = weight.unflatten(0, (2, 20)).transpose(1, 2)
    close(actual, torch.autograd.grad(expected, sinks, rows))
    alone = flash_attention(*(x[0] for x in tensors), sinks=sinks)
    close((alone,), (expected[0],))
    reference = flash_attention_varlen(
        *packed, starts, starts, 20, 20, sinks=sinks, implementation="reference"
    )
    close((reference,), (out,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_sinks() -> None:
    tensors, sinks = leaves(), torch.randn(4, device=DEVICE, requires_grad=True)
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    out, expected = (f(*tensors, sinks=sinks) for f in (compiled, flash_attention))
    close((out,), (expected,))
    inputs = [*tensors, sinks]
    close(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks_of_minus_infinity_change_nothing(implementation: Any) -> None:
    """Also not for queries that see no key."""
    tensors = leaves(33, 19)
    sinks = torch.full((4,), float("-inf"), device=DEVICE, requires_grad=True)
    options: dict[str, Any] = {"causal": "bottom-right", "return_lse": True}
    results = flash_attention(*tensors, sinks=sinks, implementation=implementation, **options)
    expected = flash_attention(*tensors, implementation=implementation, **options)
    close(results, expected)
    weight = torch.randn_like(results[0])
    *actual, of_sinks = torch.autograd.grad(results[0], [*tensors, sinks], weight)
    close(actual, torch.autograd.grad(expected[0], tensors, weight))
    assert not of_sinks.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_transforms_with_sinks(implementation: Any) -> None:
    """Shared and mapped sinks, and their gradients."""
    q, k, v = (torch.randn(3, *x.shape, device=DEVICE) for x in leaves())
    sinks = torch.randn(3, 4, device=DEVICE)

    def loss(q: Tensor, sinks: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flash_attention(
            *(q, k, v), sinks=sinks, return_lse=True, implementation=implementation
        )
        return out.square().sum() + lse.square().sum()

    differentiate = torch.func.grad(loss, (0, 1))
    for dim in (0, None):
        given = sinks if dim == 0 else sinks[1]
        actual = torch.func.vmap(differentiate, in_dims=(0, dim, 0, 0))(q, given, k, v)
        for i in range(3):
            own = given[i] if dim == 0 else given
            inputs = [x[i].detach().requires_grad_() for x in (q, k, v)]
            leaf = own.clone().requires_grad_()
            expected, expected_lse = definition(inputs, leaf)
            total = expected.square().sum() + expected_lse.square().sum()
            wanted = torch.autograd.grad(total, (inputs[0], leaf))
            close([x[i] for x in actual], wanted, 5e-5)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_of_the_gradient_of_sinks(dtype: torch.dtype, with_lse: bool) -> None:
    """Against its formula: any strides, a last tile of two rows, a head_dim that is padded."""
    pytest.importorskip("triton")
    from launch_kernels import triton_sinks_backward

    sinks = torch.randn(3, device=DEVICE, dtype=dtype)
    out, grad_out = (
        torch.randn(2, 130, 3, 40, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(2)
    )
    lse = torch.randn(2, 3, 130, device=DEVICE)
    lse[0, 1, 7] = float("-inf")
    grad_lse = torch.randn(3, 2, 130, device=DEVICE).transpose(0, 1) if with_lse else None
    given = (sinks, out, lse, grad_out, grad_lse)
    first = triton_sinks_backward(*given)
    assert first.dtype == dtype
    wide = [None if x is None else x.double() for x in given]
    close((first,), (sinks_gradient(*wide),), max(2e-5, torch.finfo(dtype).eps))
    assert torch.equal(triton_sinks_backward(*given), first)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "lengths", "keywords"),
    [
        ((4, 2), (700, 700), {"causal": "top-left"}),
        ((4, 4), (1500, 1500), {"causal": "top-left"}),
        ((4, 1), (300, 1100), {"causal": "bottom-right"}),
        ((2, 2), (900, 200), {"causal": "bottom-right"}),  # 700 queries see only the sink
        ((4, 4), (129, 1000), {"scale": -0.2}),
        ((2, 1), (1700, 1700), {"causal": "top-left", "deterministic": True}),
    ],
    ids=str,
)
def test_sinks_on_a_gpu(
    heads: tuple[int, int], lengths: tuple[int, int], keywords: dict[str, Any], head_dim: int
) -> None:
    """By the tier that is chosen, forward and backward."""
    shapes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, n, rows, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, rows in shapes
    ]
    # Not aligned to 16 bytes, and large enough to take half of the softmax.
    logits = torch.linspace(3, 7, heads[0] + 1, device="cuda", dtype=torch.bfloat16)
    sinks = logits[1:].detach().requires_grad_()
    results = flash_attention(*inputs, sinks=sinks, return_lse=True, **keywords)
    factor = head_dim**0.5 * keywords.get("scale", head_dim**-0.5)
    wide = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    expected = definition([wide[0] * factor, *wide[1:3]], wide[3], keywords.get("causal", "none"))
    close(results[1:], expected[1:])
    close(results[:1], expected[:1], 2 * torch.finfo(torch.bfloat16).eps)
    weights = [torch.randn_like(x) for x in results]
    actual = torch.autograd.grad(results, [*inputs, sinks], weights)
    wanted = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    for a, e in zip(actual, wanted, strict=True):
        assert (a - e).abs().max() <= 8 * torch.finfo(a.dtype).eps * max(1.0, e.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "triton"])
def test_packed_sinks_on_a_gpu(implementation: Any) -> None:
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    lengths = (300, 1, 129, 700)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    sinks = torch.randn(4, device="cuda")
    q, k, v = (
        torch.randn(sum(lengths), n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2)
    )
    out, lse = flash_attention_varlen(
        *(q, k, v, starts, starts, 700, 700),
        sinks=sinks, causal=True, return_lse=True, implementation=implementation,
    )  # fmt: skip
    for start, length in zip(starts.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        one = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
        expected, expected_lse = definition(one, sinks, "top-left")
        close((out[rows],), (expected[0].transpose(0, 1),), 2 * torch.finfo(torch.bfloat16).eps)
        close((lse[:, rows],), (expected_lse[0],))


BAD_SINKS = [
    (lambda: torch.zeros(2), ValueError, r"sinks must be .* of shape \(4,\), .* got .* \(2,\)"),
    (lambda: torch.zeros(4, 1), ValueError, r"but got torch\.float32 of shape \(4, 1\)"),
    (lambda: torch.zeros(4, dtype=torch.int64), ValueError, r"but got torch\.int64 of shape"),
    (lambda: torch.zeros(4, device="meta"), ValueError, "on meta"),
    (lambda: [0.0] * 4, TypeError, r"sinks must be a torch\.Tensor, but got builtins\.list"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD_SINKS, ids=[m for *_, m in BAD_SINKS])
def test_bad_sinks(make: Any, kind: Any, message: str) -> None:
    q, k, v = leaves()
    with pytest.raises(kind, match=message):
        flash_attention(q, k, v, sinks=make())
    starts = torch.tensor([0, 19], dtype=torch.int32, device=DEVICE)
    packed = [x[0].transpose(0, 1) for x in (q, q, q)]
    with pytest.raises(kind, match=message):
        flash_attention_varlen(*packed, starts, starts, 19, 19, sinks=make())


# ---- merging -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 32), max_size=3, unique=True),
    layout=st.sampled_from(["bhsd", "bshd"]),
    seed=st.integers(0, 99),
)
def test_parts_of_the_keys_are_merged(cuts: list[int], layout: Any, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = leaves()
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in tensors]
    dim = 1 if layout == "bshd" else 2
    bounds = [0, *sorted(cuts), 33]
    parts = [
        flash_attention(
            given[0],
            *(x.narrow(dim, start, stop - start) for x in given[1:]),
            layout=layout,
            return_lse=True,
        )
        for start, stop in pairwise(bounds)
    ]
    merged = merge(*zip(*parts, strict=True), layout=layout)
    expected = flash_attention(*given, layout=layout, return_lse=True)
    close(merged, expected)
    weights = [torch.randn_like(x) for x in merged]
    actual = torch.autograd.grad(merged, tensors, weights)
    close(actual, torch.autograd.grad(expected, tensors, weights), 2e-5)


def test_rows_that_see_no_key_in_some_parts_or_in_any() -> None:
    """Without NaN, also in gradients."""
    q, k, v = leaves(19, 8)  # bottom-right: the first 11 queries see nothing
    first = flash_attention(q, k, v, causal="bottom-right", return_lse=True)
    second = flash_attention(q, k[:, :, :4], v[:, :, :4], causal="bottom-right", return_lse=True)
    out, lse = merge(*zip(first, second, strict=True))
    assert torch.equal(out[:, :, :11], torch.zeros_like(out[:, :, :11]))
    assert (lse[:, :, :11] == float("-inf")).all()
    assert lse[:, :, 11:].isfinite().all()
    gradients = torch.autograd.grad(out.sum() + lse[:, :, 11:].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[0][:, :, :11].any()


def test_half_types_are_merged_in_fp32() -> None:
    q, k, v = (x.detach() for x in leaves(19, 32, torch.bfloat16))
    parts = [
        flash_attention(q, k[:, :, i : i + 2], v[:, :, i : i + 2], return_lse=True)
        for i in range(0, 32, 2)
    ]
    out, lse = merge(*zip(*parts, strict=True))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    expected, expected_lse = flash_attention(
        *(x.double().float() for x in (q, k, v)), return_lse=True
    )
    close((out, lse), (expected, expected_lse), torch.finfo(torch.bfloat16).eps)


def part(*shape: int, **keywords: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, **keywords), torch.zeros(shape[:-1])


BAD_PARTS: list[tuple[list[Any], list[Any], str]] = [
    ([], [], "must have equally many tensors, at least one each, but got 0 outputs and 0"),
    ([part(2, 5, 4)[0]], [], "got 1 outputs and 0 logsumexps"),
    ([part(2, 5, 4)[0]] * 2, [part(2, 5, 4)[1], part(5, 2, 4)[1]], r"logsumexps\[1\] must be .*"),
    ([part(2, 5, 4)[0], part(2, 6, 4)[0]], [part(2, 5, 4)[1]] * 2, r"outputs\[1\] must be like"),
    ([part(2, 5, 4)[0], part(2, 5, 4)[0].half()], [part(2, 5, 4)[1]] * 2, "float16 of shape"),
    ([part(5, 4)[0]], [part(5, 4)[1]], r"outputs\[0\] must be .* at least 3 dimensions"),
]


@pytest.mark.parametrize(("outs", "lses", "message"), BAD_PARTS, ids=[m for *_, m in BAD_PARTS])
def test_bad_parts(outs: Any, lses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(outs, lses)


def test_parts_must_be_tensors() -> None:
    out, lse = part(2, 5, 4)
    with pytest.raises(TypeError, match=r"logsumexps\[0\] must be a torch\.Tensor"):
        merge([out], [lse.numpy()])
    with pytest.raises(ValueError, match="layout must be one of bhsd, bshd"):
        merge([out], [lse], layout="sbhd")  # type: ignore[arg-type]
