"""The Hopper tier's backward kernels on a GPU, launched directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    triton_versions,
)
from flashattn_triton.configs import tiling_for
from flashattn_triton.problem import new_problem

pytestmark = pytest.mark.gpu

Launcher = Callable[..., tuple[Tensor, Tensor, Tensor]]
SHARED_MEMORY = 227 * 1024


@pytest.fixture
def hopper_backward() -> Launcher:
    """The launcher; whatever it allocates is full of NaN. Skips where there is no such GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from launch_kernels import hopper_backward

    def launch(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.use_deterministic_algorithms(True)  # fills new tensors
        try:
            assert arguments[0].new_empty(1, dtype=torch.float32).isnan().all()
            return hopper_backward(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)

    return launch


def forward(inputs: Any) -> tuple[Tensor, ...]:
    """The arguments of the backward pass up to the logsumexp, by the portable tier."""
    from launch_kernels import triton_forward

    tensors = [x.detach() for x in (inputs.query, inputs.key, inputs.value)]
    width = inputs.query.shape[-1]
    tiling = tiling_for(SHARED_MEMORY, width, inputs.query.dtype)
    return (*tensors, *triton_forward(*tensors, inputs.options, tiling.forward))


def check(launch: Launcher, inputs: Any, assert_results_close: Any) -> None:
    gradients = launch(*forward(inputs), inputs.grad_out, inputs.grad_lse, inputs.options)
    assert_results_close(inputs, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def test_full_matrix(
    hopper_case: Any, hopper_backward: Launcher, make_inputs: Any, assert_results_close: Any
) -> None:
    check(hopper_backward, make_inputs(hopper_case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize(
    ("heads", "n_queries", "n_keys"),
    [
        ((32, 8), 500, 500),
        ((6, 1), 333, 1000),  # top-left: whole tiles of keys that no query sees
        ((5, 5), 1, 4096),
        ((2, 1), 4096, 1),
        ((3, 3), 1000, 300),  # bottom-right: whole tiles of queries see no key
        ((2, 2), 192, 129),
        ((2, 2), 193, 128),
        ((4, 2), 640, 384),
    ],
    ids=str,
)
def test_heads_and_lengths(
    heads: tuple[int, int],
    n_queries: int,
    n_keys: int,
    head_dim: int,
    causal: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(2, heads, n_queries, n_keys, head_dim, "bf16", causal=causal)
    check(hopper_backward, make_inputs(case, "cuda"), assert_results_close)


WINDOWS = [
    {"window": (100, None)},
    {"window": (None, 70)},
    {"window": (0, 0)},
    {"window": (200, 130)},
    {"window": (100, None), "causal": "top-left"},
    {"window": (63, None), "causal": "bottom-right"},
    {"window": (1000, 1000)},
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("n_queries", "n_keys"), [(700, 700), (1000, 300), (300, 1000), (129, 64), (1, 500), (4096, 1)]
)
def test_windows(
    n_queries: int,
    n_keys: int,
    options: dict[str, Any],
    head_dim: int,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """Some queries see no key, some keys are seen by none."""
    case = dense_case(2, (4, 2), n_queries, n_keys, head_dim, "bf16", **options)
    check(hopper_backward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", range(40, 129, 8))
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_head_dims(
    head_dim: int,
    causal: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """What lies past the last column, in the inputs' memory, is NaN."""
    case = dense_case(2, (4, 2), 300, 411, head_dim, "fp16", causal=causal)
    check(hopper_backward, make_inputs(case, "cuda", "padded"), assert_results_close)


@pytest.mark.parametrize("layout", ["bshd", "padded"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_strides(
    layout: str,
    causal: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(2, (4, 2), 333, 411, 64, "fp16", causal=causal)
    check(hopper_backward, make_inputs(case, "cuda", layout), assert_results_close)


@pytest.mark.parametrize("form", ["expanded", "last stride 2", "unaligned"])
def test_gradients_that_must_be_copied(
    form: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    inputs = make_inputs(dense_case(2, (4, 2), 200, 300, 128, "bf16"), "cuda")
    grad_out = inputs.grad_out
    if form == "expanded":
        grad_out = torch.ones((), device="cuda", dtype=grad_out.dtype).expand(grad_out.shape)
    elif form == "last stride 2":
        grad_out = grad_out.repeat_interleave(2, dim=3)[..., ::2]
    else:
        spare = grad_out.new_empty(grad_out.numel() + 1)
        grad_out = spare[1:].view(grad_out.shape).copy_(grad_out)
    inputs = replace(inputs, grad_out=grad_out)
    check(hopper_backward, inputs, assert_results_close)


@pytest.mark.parametrize("scale", [-0.2, 1e-20, 3.0])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_scale(
    scale: float,
    causal: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(1, 2, 411, 333, 128, "bf16", causal=causal, scale=scale)
    check(hopper_backward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_no_gradient_of_the_logsumexp(
    head_dim: int,
    causal: str,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    inputs = make_inputs(dense_case(2, 3, 300, 300, head_dim, "bf16", causal=causal), "cuda")
    gradients = hopper_backward(*forward(inputs), inputs.grad_out, None, inputs.options)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_results_close(inputs, named, lse_gradient=False)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("tiles", range(1, 8))
def test_every_number_of_steps(
    tiles: int,
    causal: str,
    head_dim: int,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """Buffers and barriers are taken in turns of two and three."""
    n_queries = tiles * (128 if head_dim == 64 else 64)
    case = dense_case(1, (3, 1), n_queries, 128, head_dim, "bf16", causal=causal)
    check(hopper_backward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_without_keys(
    head_dim: int, dense_case: Any, hopper_backward: Launcher, make_inputs: Any
) -> None:
    """Whatever the gradient of their constant logsumexp says."""
    case = dense_case(1, 2, 400, 130, head_dim, "bf16", causal="bottom-right")
    inputs = make_inputs(case, "cuda")
    grad_lse = inputs.grad_lse.clone()
    grad_lse[:, :, :270] = float("nan")
    dq, dk, dv = hopper_backward(*forward(inputs), inputs.grad_out, grad_lse, inputs.options)
    assert torch.all(dq[:, :, :270] == 0)
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_past_the_end_count_for_nothing(
    head_dim: int,
    dense_case: Any,
    hopper_backward: Launcher,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """Where every score is so low that a key of zeros would have an infinite probability."""
    inputs = make_inputs(dense_case(1, 2, 70, 70, head_dim, "bf16", scale=1.0), "cuda")
    direction = torch.zeros(head_dim, device="cuda", dtype=torch.bfloat16)
    direction[0] = 16.0
    query, key = (
        (x.detach() + sign * direction).requires_grad_()
        for x, sign in ((inputs.query, 1), (inputs.key, -1))
    )
    check(hopper_backward, replace(inputs, query=query, key=key), assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_repetitions(head_dim: int, causal: bool, hopper_backward: Launcher) -> None:
    """dK and dV have a fixed order; dQ differs by the order of fp32 sums, then by one rounding."""
    from launch_kernels import triton_forward

    q, k, v, do = (torch.randn(2, 8, 2000, head_dim, device="cuda").bfloat16() for _ in range(4))
    options = new_problem(head_dim=head_dim, causal=causal)
    tiling = tiling_for(SHARED_MEMORY, head_dim, q.dtype)
    out, lse = triton_forward(q, k, v, options, tiling.forward)
    first = hopper_backward(q, k, v, out, lse, do, None, options)
    for _ in range(50):
        dq, dk, dv = hopper_backward(q, k, v, out, lse, do, None, options)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        torch.testing.assert_close(dq, first[0], rtol=2**-7, atol=1e-5)


@pytest.mark.timeout(120, method="thread")  # ends the process even if a kernel never does
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (300, None)}])
@pytest.mark.parametrize("lengths", [(2000, 2000), (500, 1300), (1300, 500)])
def test_deterministic_repetitions(
    lengths: tuple[int, int], options: dict[str, Any], head_dim: int, hopper_backward: Launcher
) -> None:
    """More programs than run at a time; grouped heads."""
    from launch_kernels import triton_forward

    q, do = (torch.randn(4, 8, lengths[0], head_dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(4, 4, lengths[1], head_dim, device="cuda").bfloat16() for _ in range(2))
    resolved = new_problem(head_dim=head_dim, deterministic=True, **options)
    tiling = tiling_for(SHARED_MEMORY, head_dim, q.dtype)
    out, lse = triton_forward(q, k, v, resolved, tiling.forward)
    first = hopper_backward(q, k, v, out, lse, do, None, resolved)
    for _ in range(10):
        again = hopper_backward(q, k, v, out, lse, do, None, resolved)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    free = replace(resolved, deterministic=False)
    for a, b in zip(hopper_backward(q, k, v, out, lse, do, None, free), first, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-4)


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_turns_end_in_many_calls(head_dim: int, hopper_backward: Launcher) -> None:
    """Each of 128 or 256 tiles of queries is a wait for others; one that missed its number, as
    several warps once could, never ended: with head_dim 128 in about one of 50 calls."""
    shape = (1, 16, 16384, head_dim)
    q, k, v, do, out = (torch.randn(shape, device="cuda").bfloat16() for _ in range(5))
    lse = torch.randn(shape[:3], device="cuda") + 10
    options = new_problem(head_dim=head_dim, causal=True, deterministic=True)
    first, *_ = hopper_backward(q, k, v, out, lse, do, None, options)
    for _ in range(400):
        again, *_ = hopper_backward(q, k, v, out, lse, do, None, options)
    assert torch.equal(again, first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom-right", "window": (1500, None)},
        {"causal": True, "deterministic": True},
    ],
    ids=str,
)
def test_gradients_are_added(
    options: dict[str, Any], head_dim: int, packed: bool, hopper_backward: Launcher
) -> None:
    """To slices of heads of fp32 tensors, whose other heads stay; the rounded sums are the same."""
    n, heads = 700, (4, 2, 2)
    query, key, value = (
        torch.randn(n, h, head_dim, device="cuda", dtype=torch.bfloat16) for h in heads
    )
    grad_out, given = torch.randn_like(query), {}
    if packed:
        starts = torch.tensor([0, 0, 130, 131, 640], dtype=torch.int32, device="cuda")
        given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
        attend: Any = flash_attention_varlen
    else:
        query, key, value, grad_out = (x.unsqueeze(0) for x in (query, key, value, grad_out))
        options, attend = {**options, "layout": "bshd"}, flash_attention
    options = {**options, "implementation": "hopper"}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = attend(*leaves, **given, **options, return_lse=True)
    expected = torch.autograd.grad(out, leaves, grad_out)
    wide = [torch.ones(*x.shape[:-2], x.shape[-2] + 1, head_dim, device="cuda") for x in leaves]
    into = [x[..., 1:, :] for x in wide]
    for o in (out.detach(), out.detach().float()):
        for x in wide:
            x.fill_(1.0)
        flash_attention_backward(*leaves, o, lse.detach(), grad_out, into, **given, **options)
        for whole, total, x in zip(wide, into, expected, strict=True):
            assert (whole[..., 0, :] == 1).all()
            torch.testing.assert_close(total - 1, x.float(), rtol=2**-7, atol=1e-3)


def test_rows_past_two_billion_elements(hopper_backward: Launcher) -> None:
    rows, gap = 4096, 2**31 // 4096 + 64
    storage = torch.empty(rows * gap, device="cuda", dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, rows, 64), (0, 0, gap, 1))
    near = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.bfloat16)
    far.copy_(near)
    lse = torch.randn(1, 1, rows, device="cuda") + 10
    options = new_problem(head_dim=64)
    actual, expected = (hopper_backward(x, x, x, near, lse, x, None, options) for x in (far, near))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2**-7, atol=1e-5)
