"""ALiBi slopes, an additive bias and prefixes: every tier against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_inputs import operator_arguments
from flashattn_triton import (
    Tiles,
    Tiling,
    explain,
    flash_attention,
    flash_attention_varlen,
    op,
)
from flashattn_triton.hopper import eligibility
from flashattn_triton.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashattn_triton.launch import tile_view
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.portable import forward
from flashattn_triton.problem import Problem, new_problem
from flashattn_triton.tiled import ScoreTiles, tiled_backward, tiled_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(32, 32, 4, 1)
FUSED = Tiling(forward=SMALL, key_pass=SMALL, query_pass=SMALL, fused=SMALL)
TWO_PASS = Tiling(forward=SMALL, key_pass=SMALL, query_pass=SMALL)
# Importing torch's compiler warns about its own use of torch.jit.
compiler = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def attend(inputs: Any, **keywords: Any) -> Callable[..., Any]:
    """``flash_attention``, or its packed form, of a case's options and tensors."""
    case = inputs.case
    keywords = {**case.keywords, **inputs.tensors, "return_lse": True, **keywords}
    if not case.packed:
        return lambda q, k, v: flash_attention(q, k, v, layout="bhsd", **keywords)
    longest = [max(column) for column in zip(*case.seqlens, strict=True)]
    starts = case.cu_seqlens(inputs.query.device)
    return lambda q, k, v: flash_attention_varlen(q, k, v, *starts, *longest, **keywords)


def leaves(n_queries: int = 20, n_keys: int = 33, **keywords: Any) -> list[Tensor]:
    keywords = {"device": DEVICE, "requires_grad": True, **keywords}
    shapes = ((4, n_queries), (2, n_keys), (2, n_keys))
    return [torch.randn(2, heads, rows, 16, **keywords) for heads, rows in shapes]


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.dtype), rtol=tolerance, atol=tolerance)


# ---- results -------------------------------------------------------------------------------------


def test_kernels(tensor_case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    """Small tiles, and both backward forms in turn."""
    inputs = make_inputs(tensor_case, DEVICE)
    tiling = FUSED if len(str(tensor_case)) % 2 else TWO_PASS
    assert_close_to_oracle(attend(inputs, implementation="triton", tiling=tiling), inputs)


@pytest.mark.parametrize(
    "keywords",
    [
        {"bias": "hqk", "causal": "top-left"},
        {"bias": "bhqk", "causal": "bottom-right", "alibi": "batch", "prefix": True},
        {"bias": "hk", "alibi": "heads", "window": (20, 10)},
    ],
    ids=str,
)
def test_kernels_fed_by_the_tma(
    keywords: dict[str, Any], dense_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    case = dense_case(2, (2, 1), 35, 45, 16, "fp16", **keywords)
    tiles = Tiles(32, 32, 4, 2, use_tma=True)
    tiling = Tiling(forward=tiles, key_pass=tiles, query_pass=tiles)
    inputs = make_inputs(case, DEVICE)
    assert_close_to_oracle(attend(inputs, implementation="triton", tiling=tiling), inputs)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"bias": "hqk", "causal": "top-left"},
        {"bias": "bhqk", "causal": "bottom-right", "alibi": "batch", "softcap": 5.0},
        {"bias": "qk", "alibi": "heads", "window": (20, 10), "scale": -0.2},
    ],
    ids=str,
)
def test_a_bias_fed_by_the_tma(
    keywords: dict[str, Any],
    dtype: str,
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows are aligned; queries and keys end within a tile."""
    built = []
    monkeypatch.setattr(
        forward, "tile_view", lambda *given: built.append(given) or tile_view(*given)
    )
    op._cache.clear()
    case = dense_case(2, (2, 1), 35, 72, 16, dtype, **keywords)
    tiles = Tiles(32, 32, 4, 2, use_tma=True)
    tiling = Tiling(forward=tiles, key_pass=tiles, query_pass=tiles)
    inputs = make_inputs(case, DEVICE)
    assert_close_to_oracle(attend(inputs, implementation="triton", tiling=tiling), inputs)
    # Keys that the mask hides from all of the 35 queries are left out.
    right = keywords.get("window", (None, 0 if keywords.get("causal") == "top-left" else 37))[1]
    own = tuple(n if d in keywords["bias"] else 1 for d, n in zip("bh", (2, 2), strict=True))
    own += (35, 35 + right)
    assert own in [tuple(shape) for shape, *_ in built]


def test_tiled(tensor_case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    inputs = make_inputs(tensor_case, DEVICE)
    assert_close_to_oracle(attend(inputs, implementation="tiled"), inputs)


def test_tiled_in_small_tiles(
    dense_tensor_case: Any, make_inputs: Any, assert_results_close: Any
) -> None:
    inputs = make_inputs(dense_tensor_case)
    tensors = [x.detach() for x in (inputs.query, inputs.key, inputs.value)]
    problem = (inputs.options, inputs.given)
    out, lse = tiled_forward(*tensors, *problem, query_tile=32, key_tile=16)
    given = (*tensors, out, lse, inputs.grad_out, inputs.grad_lse)
    arguments: Any = (given, *problem)
    gradients = tiled_backward(*arguments, query_tile=32, key_tile=16)
    results = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if inputs.bias is not None:
        sizes = {"query_tile": 32, "key_tile": 16}
        results["dbias"] = tiled_backward(*arguments, of_bias=True, **sizes)[3]
    assert_results_close(inputs, results)


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_against_the_same_scores_written_out(implementation: Any) -> None:
    """In fp64 by PyTorch: biases of all kinds as one tensor, and the prefix as a mask."""
    q, k, v = leaves()
    slopes = torch.rand(2, 4, device=DEVICE)
    bias = torch.randn(4, 20, 33, device=DEVICE, requires_grad=True)
    prefixes = torch.tensor([17, 0], device=DEVICE)
    out = flash_attention(
        *(q, k, v),
        causal="bottom-right",
        alibi_slopes=slopes,
        bias=bias,
        prefix_lengths=prefixes,
        implementation=implementation,
    )
    i, j = torch.arange(20, device=DEVICE)[:, None] + 13, torch.arange(33, device=DEVICE)
    hidden = (j > i) & (j >= prefixes[:, None, None, None])
    added = bias.double() - slopes[..., None, None].double() * (i - j).abs()
    added = added.masked_fill(hidden, float("-inf"))
    wide = [x.double() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide, attn_mask=added, enable_gqa=True)
    close((out,), (expected,))
    weight = torch.randn_like(out)
    inputs = (q, k, v, bias)
    actual = torch.autograd.grad(out, inputs, weight)
    close(actual, torch.autograd.grad(expected, inputs, weight.double()))


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_a_bias_of_minus_infinity_hides_keys(implementation: Any) -> None:
    """Without NaN, also for a query that sees no key at all."""
    q, k, v = leaves()
    bias = torch.zeros(20, 33, device=DEVICE)
    bias[:, 5:9] = bias[3] = float("-inf")
    bias.requires_grad_()
    out, lse = flash_attention(q, k, v, bias=bias, implementation=implementation, return_lse=True)
    assert not out[:, :, 3].any()
    assert (lse[:, :, 3] == float("-inf")).all()
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v, bias), weight)
    assert all(x.isfinite().all() for x in gradients)
    rest = [n for n in range(33) if not 5 <= n < 9]
    fewer = [x.detach()[:, :, rest].requires_grad_() for x in (k, v)]
    seeing = [n for n in range(20) if n != 3]
    expected = flash_attention(q[:, :, seeing], *fewer, implementation="reference")
    close((out[:, :, seeing],), (expected,))
    wanted = torch.autograd.grad(expected, (q, *fewer), weight[:, :, seeing])
    close((gradients[0], gradients[1][:, :, rest], gradients[2][:, :, rest]), wanted)
    assert not gradients[1][:, :, 5:9].any()
    assert not gradients[3][3].any()


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "causal": "bottom-right", "alibi_slopes": torch.full((4,), 0.5)},
        {"causal": "top-left", "window": (7, 0)},
    ],
    ids=["plain", "soft-cap and ALiBi", "window"],
)
def test_a_bias_of_a_large_negative_number_is_one_of_minus_infinity(
    implementation: Any, options: dict[str, Any]
) -> None:
    """Also in rows that have nothing else, whose logsumexp could not hold what is added to it."""
    q, k, v = leaves()
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in options.items()}
    weight = torch.randn(*q.shape[:3], v.shape[-1], device=DEVICE)

    def attend(fill: float, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        bias = torch.randn(20, 33, device=DEVICE, generator=generator).to(dtype)
        bias[:, 5:9] = bias[3] = fill
        bias.requires_grad_()
        fixed = {"implementation": implementation, "deterministic": True, "return_lse": True}
        out, lse = flash_attention(q, k, v, bias=bias, **fixed, **options)
        return [out, lse, *torch.autograd.grad(out, (q, k, v, bias), weight)]

    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    for dtype, fills in (
        (torch.float32, (-8192.0, torch.finfo(torch.float32).min)),
        (torch.bfloat16, (-8192.0, -1e9)),
        (torch.float16, (-8192.0, -65504.0)),
    ):
        hidden = attend(-math.inf, dtype)
        assert (hidden[1][:, :, 3] == -math.inf).all()
        for fill in fills:
            for name, x, y in zip(names, attend(fill, dtype), hidden, strict=True):
                assert torch.equal(x, y), (name, fill)  # the same operations in one order


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_probabilities_of_a_row_that_only_sees_low_numbers_sum_to_one(implementation: Any) -> None:
    q, k, v = leaves()
    bias = torch.full((20, 33), -8191.0, device=DEVICE)
    weight = torch.randn(*q.shape[:3], v.shape[-1], device=DEVICE)
    out = flash_attention(q, k, v, bias=bias, implementation=implementation)
    (dv,) = torch.autograd.grad(out, (v,), weight)
    groups = weight.sum(2).unflatten(1, (v.shape[1], -1)).sum(2)
    assert torch.allclose(
        dv.sum(2), groups, rtol=2.0**-10, atol=2.0**-10 * groups.abs().max().item()
    )


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_any_leading_dimensions_layout_and_sinks(leading: tuple[int, ...], layout: Any) -> None:
    q, k, v = (torch.randn(*leading, 2, n, 16, device=DEVICE) for n in (9, 12, 12))
    sinks = torch.randn(2, device=DEVICE)
    tensors = {
        "alibi_slopes": torch.rand(*leading, 2, device=DEVICE),
        "bias": torch.randn(*leading, 2, 9, 1, device=DEVICE),
        "prefix_lengths": torch.randint(0, 12, leading, device=DEVICE),
    }
    options: dict[str, Any] = {"causal": "bottom-right", "sinks": sinks, "layout": layout}
    inputs = [x.transpose(-2, -3) if layout == "bshd" else x for x in (q, k, v)]
    out = flash_attention(*inputs, **tensors, **options)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in leading)) if leading else [()]:
        place = tuple(int(n) for n in index)
        own = {name: x[place][None] for name, x in tensors.items()}
        one = flash_attention(*(x[place][None] for x in inputs), **own, **options)
        close((out[place],), (one[0],))


def test_documents_have_the_same_slopes() -> None:
    q, k, v = (torch.randn(2, heads, 30, 16, device=DEVICE) for heads in (4, 2, 2))
    ids = torch.tensor([[0] * 12 + [1] * 18, [3] * 30], device=DEVICE)
    slopes = torch.rand(4, device=DEVICE)
    out = flash_attention(q, k, v, document_ids=ids, alibi_slopes=slopes, causal=True)
    alone = flash_attention(*(x[:1, :, :12] for x in (q, k, v)), alibi_slopes=slopes, causal=True)
    close((out[:1, :, :12],), (alone,))


@pytest.mark.parametrize("implementation", ["tiled", "triton"])
@pytest.mark.parametrize("shape", [(4, 20, 33), (2, 1, 1, 33), (1,)], ids=str)
def test_the_gradient_of_a_bias_is_deterministic(shape: Any, implementation: Any) -> None:
    tensors = leaves()
    bias = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def gradient() -> Tensor:
        out = flash_attention(*tensors, bias=bias, implementation=implementation)
        torch.manual_seed(3)
        (result,) = torch.autograd.grad(out, bias, torch.randn_like(out))
        return result

    first = gradient()
    assert first.dtype == bias.dtype
    assert all(torch.equal(gradient(), first) for _ in range(2))


@pytest.mark.parametrize("prefix", [0, 1, 16, 19, 99])
@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("shape", [(40, 40), (13, 50), (50, 13)])
def test_tiles_cover_exactly_what_is_visible(
    shape: tuple[int, int], causal: Any, prefix: int
) -> None:
    i, j = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    offset = shape[1] - shape[0] if causal == "bottom-right" else 0
    visible = (j <= i + offset) | (j < prefix)
    query, key = (torch.empty(1, 1, n, 1) for n in shape)
    prefixes = Given(prefix_lengths=torch.tensor([prefix]))
    found = ScoreTiles(query, key, Problem(scale=1.0, causal=causal), prefixes)
    covered = torch.zeros(*shape, dtype=torch.bool)
    spans = [(n, min(n + 16, shape[0])) for n in range(0, shape[0], 16)]
    for queries, keys in [(q, k) for q in spans for k in found.key_tiles(*q, 16)]:
        tile = (slice(*queries), slice(*keys))
        assert visible[tile].any(), f"{queries} x {keys} was visited for nothing"
        hidden = found.hidden(queries, keys)
        covered[tile] = True if hidden is None else ~hidden[0, 0, :, 0]
    assert torch.equal(covered, visible)


dims = st.integers(1, 40)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    lengths=st.tuples(dims, dims),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dtype_name=st.sampled_from(["fp32", "bf16"]),
    causal=st.sampled_from(["none", "top-left", "bottom-right"]),
    softcap=st.none() | st.floats(0.5, 20),
    alibi=st.sampled_from([None, "heads", "batch"]),
    bias=st.sampled_from([None, "bhqk", "hqk", "bk", "hq", ""]),
    prefix=st.booleans(),
)
def test_any_combination(
    lengths, heads, causal, prefix, dtype_name, dense_case, make_inputs, assert_close_to_oracle,
    **rest,
):  # fmt: skip
    prefix = prefix and causal != "none"
    case = dense_case(2, heads, *lengths, 8, dtype_name, causal=causal, prefix=prefix, **rest)
    inputs = make_inputs(case)
    assert_close_to_oracle(attend(inputs), inputs)


# ---- operators -----------------------------------------------------------------------------------


def arguments_of(implementation: str) -> tuple[Any, ...]:
    tensors = Given(
        alibi_slopes=torch.rand(2, 4, device=DEVICE),
        bias=torch.randn(1, 4, 20, 33, device=DEVICE, requires_grad=True),
        prefix_lengths=torch.tensor([7, 0], device=DEVICE, dtype=torch.int32),
        mask=torch.ones(2, 33, device=DEVICE, dtype=torch.uint8),
        sinks=torch.randn(4, device=DEVICE, requires_grad=True),
    )
    problem = new_problem(head_dim=16, causal=True, implementation=implementation)
    return operator_arguments(problem, tensors)


@compiler
@pytest.mark.parametrize(
    "implementation", ["tiled", pytest.param("triton", marks=pytest.mark.nightly)]
)
def test_opcheck(implementation: str) -> None:
    inputs, arguments = leaves(), arguments_of(implementation)
    torch.library.opcheck(torch.ops.flashattn_triton.forward.default, (*inputs, *arguments))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in (*inputs, *arguments)]
    out, lse = torch.ops.flashattn_triton.forward(*detached)
    results = (out, lse, torch.randn_like(out), torch.randn_like(lse))
    backward = (*detached[:3], *results, *detached[3:])
    for needs in ([True, True, True], [False, True, False], [False, False, True]):
        operator = torch.ops.flashattn_triton.backward.default
        torch.library.opcheck(operator, (*backward, needs))


@compiler
def test_compiled_without_breaks() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        slopes, bias, prefixes = tensors
        return flash_attention(
            *(q, k, v), alibi_slopes=slopes, bias=bias, prefix_lengths=prefixes, causal="top-left"
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (20, 27):
        bias = torch.randn(4, length, 33, device=DEVICE, requires_grad=True)
        slopes = torch.rand(4, device=DEVICE)
        inputs = (*leaves(length), slopes, bias, torch.tensor([9, 0], device=DEVICE))
        out, expected = compiled(*inputs), run(*inputs)
        close((out,), (expected,))
        leaf = (*inputs[:3], bias)
        weight = torch.randn_like(out)
        actual = torch.autograd.grad(out, leaf, weight)
        close(actual, torch.autograd.grad(expected, leaf, weight))
    torch.compiler.reset()


@compiler
@pytest.mark.parametrize("lengths_given", [True, False])
def test_compiled_packed_for_any_total(lengths_given: bool) -> None:
    compiled = torch.compile(
        flash_attention_varlen, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for lengths in ((5, 9, 20), (9, 30, 2)):
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        inputs = [
            torch.randn(sum(lengths), 2, 16, device=DEVICE, requires_grad=True) for _ in range(3)
        ]
        longest = (max(lengths), max(lengths)) if lengths_given else ()
        arguments = (*inputs, starts, starts, *longest)
        keywords = {
            "causal": "top-left",
            "alibi_slopes": torch.rand(3, 2, device=DEVICE),
            "prefix_lengths": torch.tensor([2, 0, 40], device=DEVICE),
        }
        out = compiled(*arguments, **keywords)
        expected = flash_attention_varlen(*arguments, **keywords)
        close((out,), (expected,))
        weight = torch.randn_like(out)
        actual = torch.autograd.grad(out, inputs, weight)
        close(actual, torch.autograd.grad(expected, inputs, weight))
    torch.compiler.reset()


@pytest.mark.parametrize("implementation", ["tiled", "triton"])
def test_transforms(implementation: Any) -> None:
    q, k, v = (x.detach() for x in leaves())
    bias = torch.randn(4, 20, 33, device=DEVICE)

    def loss(bias: Tensor, implementation: Any = implementation) -> Tensor:
        out = flash_attention(q, k, v, bias=bias, implementation=implementation)
        return out.square().sum()

    close((torch.func.grad(loss)(bias),), (torch.func.grad(loss)(bias, "reference"),))
    several = torch.stack([bias, -bias])
    actual = torch.func.vmap(torch.func.grad(loss))(several)
    close(actual, [torch.func.grad(loss)(own) for own in several])
    seen = torch.rand(3, 2, 1, 1, 33, device=DEVICE) > 0.5

    def masked(own: Tensor, q: Tensor) -> Tensor:
        out = flash_attention(q, k, v, bias=bias, mask=own, implementation=implementation)
        assert isinstance(out, Tensor)
        return out

    for dim, rows in ((0, q.expand(3, *q.shape)), (None, q)):
        actual = torch.func.vmap(masked, in_dims=(0, dim))(seen, rows)
        close(actual, [masked(own, q) for own in seen])


# ---- bad input, and what is said -----------------------------------------------------------------

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alibi_slopes": torch.ones(3)}, ValueError,
     r"alibi_slopes must be .* shape \(4,\) or \(2, 4\), but got torch\.float32 of shape \(3,\)"),
    ({"alibi_slopes": torch.ones(4).half()}, ValueError, r"alibi_slopes must be a float32 tensor"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError,
     "alibi_slopes must be constants, but got a tensor that requires a gradient"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, r"alibi_slopes must be a torch\.Tensor"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, "alibi_slopes must be on query's"),
    ({"bias": torch.ones(2, 3, 20, 33)}, ValueError,
     r"bias must be .* broadcasts to \(2, 4, 20, 33\) .* got torch\.float32 of shape \(2, 3,"),
    ({"bias": torch.ones(1, 2, 4, 20, 33)}, ValueError, r"shape \(1, 2, 4, 20, 33\)"),
    ({"bias": torch.ones(20, 33, dtype=torch.bool)}, ValueError, r"but got torch\.bool"),
    ({"prefix_lengths": torch.ones(3).long(), "causal": True}, ValueError,
     r"prefix_lengths must be .* shape \(2,\), .* but got torch\.int64 of shape \(3,\)"),
    ({"prefix_lengths": torch.ones(2), "causal": True}, ValueError, r"but got torch\.float32"),
    ({"prefix_lengths": torch.ones(2).long()}, ValueError,
     "causal must be 'top-left' or 'bottom-right' where prefix_lengths are given, but got False"),
    ({"prefix_lengths": torch.ones(2).long(), "causal": True, "window": (4, None)}, ValueError,
     r"window must be None where prefix_lengths are given, but got \(4, None\)"),
    ({"document_ids": torch.zeros(2, 20).long(), "bias": torch.ones(1)}, ValueError,
     "bias must be None where document_ids are given"),
    ({"document_ids": torch.zeros(2, 20).long(), "alibi_slopes": torch.ones(2, 4)}, ValueError,
     r"alibi_slopes must be of shape \(4,\) where document_ids are given, but got \(2, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "kind", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input(
    keywords: dict[str, Any], kind: type[Exception], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(op, "forward_launcher", None)  # nothing is launched
    q, k, v = leaves(20, 20 if "document_ids" in keywords else 33)
    given = {
        name: x.to(DEVICE) if isinstance(x, Tensor) and x.device.type == "cpu" else x
        for name, x in keywords.items()
    }
    if "causal" in given:
        given["causal"] = "top-left"
    with pytest.raises(kind, match=message):
        flash_attention(q, k, v, **given)


def test_bad_input_of_packed_sequences() -> None:
    starts = torch.tensor([0, 12, 20], dtype=torch.int32, device=DEVICE)
    x = torch.randn(20, 2, 16, device=DEVICE)
    arguments: tuple[Any, ...] = (x, x, x, starts, starts, 12, 12)
    with pytest.raises(ValueError, match="bias must be None for packed sequences"):
        flash_attention_varlen(*arguments, bias=torch.ones(1))
    with pytest.raises(ValueError, match=r"alibi_slopes .* \(2,\) or \(2, 2\), .* \(3, 2\)"):
        flash_attention_varlen(*arguments, alibi_slopes=torch.ones(3, 2, device=DEVICE))
    prefixes = torch.ones(3, device=DEVICE).long()
    with pytest.raises(ValueError, match=r"prefix_lengths must be .* shape \(2,\)"):
        flash_attention_varlen(*arguments, prefix_lengths=prefixes, causal=True)


def test_what_is_said() -> None:
    q, k, v = leaves(20, 20)
    bias = torch.zeros(20, 20, device=DEVICE, requires_grad=True)
    text = explain(q, k, v, bias=bias, alibi_slopes=torch.ones(4, device=DEVICE))
    assert "bias: its own pass" in text
    options = Problem(scale=1.0)
    kind = ((9, 0), torch.bfloat16, (64, 64), options)
    refusal = eligibility.refusal(*kind, ("alibi_slopes", "bias", "sinks"))
    assert refusal == "it takes no alibi_slopes or bias"
    assert eligibility.refusal(*kind, ("sinks",)) == eligibility.refusal(*kind)
    with pytest.raises(ValueError, match="bias must be"):
        explain(q, k, v, bias=torch.zeros(3, device=DEVICE))


def test_a_call_without_them_is_the_call_it_was() -> None:
    """The same operator arguments, and the same cached call."""
    assert NOTHING.names == ()
    assert operator_arguments(new_problem(head_dim=16))[:7] == (None,) * 7


# ---- flash-attn's functions ----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [(9, 9), (5, 11), (11, 5)], ids=str)
def test_slopes_as_flash_attn_has_them(rows: tuple[int, int], causal: bool) -> None:
    """-slope · |i + N_k - N_q - j| is added to the score, whatever the mask."""
    q = torch.randn(2, rows[0], 4, 16, device=DEVICE)
    k, v = torch.randn(2, 2, rows[1], 2, 16, device=DEVICE)
    slopes = torch.rand(2, 4, device=DEVICE)
    out = flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes)
    i = torch.arange(rows[0], device=DEVICE)[:, None] + rows[1] - rows[0]
    distance = (i - torch.arange(rows[1], device=DEVICE)).abs()
    bias = -slopes[..., None, None] * distance
    expected = flash_attn_func_with_bias(q, k, v, bias, causal)
    close((out,), (expected,))
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in rows]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = flash_attn_varlen_func(*flat, *starts, *rows, causal=causal, alibi_slopes=slopes)
    close((packed,), (expected.flatten(0, 1),))


def flash_attn_func_with_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool
) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).mT / 4 + bias.double()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)


# ---- what only a GPU can show --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_shipped_tiles(
    gpu_tensor_case: Any, deterministic: bool, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    inputs = make_inputs(gpu_tensor_case, "cuda")
    assert_close_to_oracle(attend(inputs, deterministic=deterministic), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bias", ["hqk", "bhqk"])
def test_shipped_tiles_of_a_bias_with_aligned_rows(
    bias: str,
    dtype: str,
    head_dim: int,
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    """Read by the TMA; several tiles, the last of them in part, and ALiBi beside it."""
    case = dense_case(
        2, (4, 2), 328, 456, head_dim, dtype, bias=bias, alibi="heads", causal="bottom-right"
    )
    inputs = make_inputs(case, "cuda")
    assert_close_to_oracle(attend(inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 1024, 1024), (2, 1, 1, 1024), (1,)], ids=str)
def test_gradients_are_bit_identical_on_a_gpu(shape: Any) -> None:
    inputs = [
        torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    bias = torch.randn(shape, device="cuda", requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        out = flash_attention(*inputs, bias=bias, causal=True, deterministic=True)
        torch.manual_seed(3)
        return torch.autograd.grad(out, (*inputs, bias), torch.randn_like(out))

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))


@pytest.mark.gpu
def test_a_call_with_slopes_runs_on_the_portable_tier() -> None:
    x = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.ones(2, device="cuda")
    assert "tier: triton" in explain(x, x, x, alibi_slopes=slopes)
