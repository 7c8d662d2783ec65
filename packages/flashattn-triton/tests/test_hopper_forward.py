"""The Hopper tier's forward kernel, launched directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashattn_triton import flash_attention, flash_attention_varlen, merge, triton_versions
from flashattn_triton.problem import new_problem

pytestmark = pytest.mark.gpu


@pytest.fixture
def hopper_forward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launcher, its outputs full of NaN beforehand; skips where there is no such GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from launch_kernels import hopper_forward

    empty = torch.Tensor.new_empty_strided

    def poisoned(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return empty(self, *arguments, **keywords).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned)
    return hopper_forward


def check(launch: Any, inputs: Any, assert_results_close: Any) -> None:
    tensors = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    out, lse = launch(*tensors, inputs.options)
    assert_results_close(inputs, {"out": out, "lse": lse})


def test_full_matrix(
    hopper_case: Any, hopper_forward: Any, make_inputs: Any, assert_results_close: Any
) -> None:
    check(hopper_forward, make_inputs(hopper_case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize(
    ("heads", "n_queries", "n_keys"),
    [
        ((32, 8), 500, 500),
        ((6, 1), 333, 1000),
        ((5, 5), 1, 4096),
        ((2, 1), 4096, 1),
        ((3, 3), 1000, 300),  # bottom-right: whole tiles of queries see no key
        ((2, 2), 192, 129),
        ((2, 2), 193, 128),
        ((70, 10), 1100, 700),  # many tiles for each program, more than one group of heads
        ((70, 70), 500, 500),
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
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(2, heads, n_queries, n_keys, head_dim, "bf16", causal=causal)
    check(hopper_forward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize("head_dim", [80, 96, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top-left"},
        {"causal": "bottom-right"},
        {"causal": "top-left", "softcap": 2.0},
        {"causal": "top-left", "scale": -0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "n_queries", "n_keys"),
    [((6, 1), 333, 1000), ((3, 3), 1000, 300), ((2, 2), 193, 128), ((70, 10), 1100, 700)],
    ids=str,
)
def test_long_configurations(
    heads: tuple[int, int],
    n_queries: int,
    n_keys: int,
    options: dict[str, Any],
    head_dim: int,
    dense_case: Any,
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(2, heads, n_queries, n_keys, head_dim, "bf16", **options)
    check(hopper_forward, make_inputs(case, "cuda"), assert_results_close)


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
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """Some queries see no key, some keys are seen by none."""
    case = dense_case(2, (4, 2), n_queries, n_keys, head_dim, "bf16", **options)
    check(hopper_forward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.parametrize("head_dim", range(40, 129, 8))
def test_head_dims(
    head_dim: int,
    dense_case: Any,
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """What lies past the last column, in the inputs' memory, is NaN."""
    case = dense_case(2, (4, 2), 300, 411, head_dim, "fp16", causal="bottom-right")
    check(hopper_forward, make_inputs(case, "cuda", "padded"), assert_results_close)


@pytest.mark.parametrize("layout", ["bshd", "padded"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_strides(
    layout: str,
    causal: str,
    dense_case: Any,
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(2, (4, 2), 333, 411, 64, "fp16", causal=causal)
    inputs = make_inputs(case, "cuda", layout)
    check(hopper_forward, inputs, assert_results_close)


@pytest.mark.parametrize("scale", [-0.2, 1e-20, 3.0])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_scale(
    scale: float,
    causal: str,
    dense_case: Any,
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    case = dense_case(1, 2, 411, 333, 128, "bf16", causal=causal, scale=scale)
    check(hopper_forward, make_inputs(case, "cuda"), assert_results_close)


@pytest.mark.usefixtures("long_configurations")
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top-left"},
        {"causal": "bottom-right", "scale": -0.1},
        {"causal": "top-left", "window": (600, None)},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "factor"), [("bf16", 30.0), ("bf16", 1e4), ("fp16", 4.0)])
def test_rows_that_overflow(
    dtype: str,
    factor: float,
    options: dict[str, Any],
    head_dims: tuple[int, int],
    dense_case: Any,
    hopper_forward: Any,
    make_inputs: Any,
    assert_results_close: Any,
) -> None:
    """Scores of the first keys, which come last, are too large for the first tile's maximum.

    Those of every other row are as far below it. No sum of large numbers cancels, which would leave
    it no digits.
    """
    case = dense_case(2, (6, 3), 1500, 1500, head_dims, dtype, **options)
    inputs = make_inputs(case, "cuda")
    with torch.no_grad():
        inputs.key[:, :, :500].abs_().mul_(factor)
        inputs.query.abs_()
        inputs.query[:, :, ::2] *= -1.0
    check(hopper_forward, inputs, assert_results_close)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_beside_one_that_overflows(head_dim: int, hopper_forward: Any) -> None:
    q, k, v = (torch.randn(1, 2, 2000, head_dim, device="cuda").bfloat16() for _ in range(3))
    options = new_problem(head_dim=head_dim)
    before = hopper_forward(q, k, v, options)
    q[:, :, 1000] *= 1e4
    beside = hopper_forward(q, k, v, options)
    assert all(torch.isfinite(x).all() for x in beside)
    others = torch.arange(2000, device="cuda") != 1000
    for x, y in zip(before, beside, strict=True):
        assert torch.equal(x[:, :, others], y[:, :, others])


def test_repetitions_are_bit_identical(hopper_forward: Any) -> None:
    q, k, v = (torch.randn(2, 8, 2000, 64, device="cuda").bfloat16() for _ in range(3))
    options = new_problem(head_dim=64, causal=True)
    first = hopper_forward(q, k, v, options)
    for _ in range(20):
        again = hopper_forward(q, k, v, options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_rows_past_two_billion_elements(hopper_forward: Any) -> None:
    rows, gap = 4096, 2**31 // 4096 + 64
    storage = torch.empty(rows * gap, device="cuda", dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, rows, 64), (0, 0, gap, 1))
    near = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.bfloat16)
    far.copy_(near)
    options = new_problem(head_dim=64, causal=True)
    actual, expected = (hopper_forward(x, x, x, options) for x in (far, near))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dims", [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128)])
def test_an_output_in_fp32_rounds_to_the_other(
    head_dims: tuple[int, int], packed: bool, hopper_forward: Any
) -> None:
    widths = (head_dims[0], head_dims[0], head_dims[1])
    q, k, v = (torch.randn(700, 4, d, device="cuda").bfloat16() for d in widths)
    options: dict[str, Any] = {"causal": True, "implementation": "hopper", "return_lse": True}
    if packed:
        starts = torch.tensor([0, 0, 130, 131, 640], dtype=torch.int32, device="cuda")

        def attend(dtype: Any) -> Any:
            return flash_attention_varlen(q, k, v, starts, starts, out_dtype=dtype, **options)
    else:
        batch = [x.unsqueeze(0) for x in (q, k, v)]

        def attend(dtype: Any) -> Any:
            return flash_attention(*batch, layout="bshd", out_dtype=dtype, **options)

    (out, lse), (rounded, same) = attend(torch.float32), attend(None)
    assert out.dtype == torch.float32
    assert torch.equal(out.bfloat16(), rounded)
    assert not torch.equal(out, rounded.float())
    assert torch.equal(lse, same)


def test_many_keys(hopper_forward: Any) -> None:
    """One call, and two joined parts of the keys."""
    q, k, v = (
        torch.randn(1, 2, n, 64, device="cuda").bfloat16() for n in (1000, 2**16 + 8, 2**16 + 8)
    )
    long = new_problem(head_dim=64, causal="bottom-right")
    out, lse = hopper_forward(q, k, v, long)
    parts = [slice(0, 2**15), slice(2**15, None)]
    options = (new_problem(head_dim=64), long)
    results = [
        hopper_forward(q, k[:, :, x], v[:, :, x], y) for x, y in zip(parts, options, strict=True)
    ]
    merged, merged_lse = merge(*zip(*results, strict=True))
    torch.testing.assert_close(out, merged, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, merged_lse)
