"""The public functions: layouts, arguments, errors, and the assignment's class."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn_triton import (
    FlashAttention2PyTorch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
    Tiles,
    Tiling,
    explain,
    flash_attention,
    flash_attention_varlen,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*shape: int, **keywords: Any) -> list[torch.Tensor]:
    keywords = {"device": DEVICE, **keywords}
    return [torch.randn(shape or (2, 2, 20, 16), **keywords) for _ in range(3)]


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_layouts_are_transposes_of_each_other(implementation: str) -> None:
    q, k, v = inputs(2, 20, 3, 16)
    out, lse = flash_attention(
        q, k, v, layout="bshd", return_lse=True, implementation=implementation
    )
    views = (x.transpose(1, 2) for x in (q, k, v))
    expected, expected_lse = flash_attention(*views, return_lse=True, implementation=implementation)
    assert out.shape == q.shape
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    if implementation != "reference":
        assert out.is_contiguous()


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 2)], ids=str)
def test_any_leading_dimensions(leading: tuple[int, ...], layout: str, implementation: str) -> None:
    heads_and_rows = ((4, 20), (2, 30)) if layout == "bhsd" else ((20, 4), (30, 2))
    query = torch.randn(*leading, *heads_and_rows[0], 16, device=DEVICE, requires_grad=True)
    key, value = (
        torch.randn(*leading, *heads_and_rows[1], 16, device=DEVICE, requires_grad=True)
        for _ in range(2)
    )
    leaves = [query, key, value]
    keywords: dict[str, Any] = {"causal": "top-left", "layout": layout, "return_lse": True}
    out, lse = flash_attention(*leaves, **keywords, implementation=implementation)
    assert out.shape == query.shape
    assert lse.shape == (*leading, 4, 20)
    batched = [x.detach().reshape(-1, *x.shape[-3:]).requires_grad_() for x in leaves]
    expected, expected_lse = flash_attention(*batched, **keywords, implementation="reference")
    torch.testing.assert_close(out, expected.view(out.shape), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse.view(lse.shape), rtol=1e-5, atol=1e-5)
    grad_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, grad_out)
    wanted = torch.autograd.grad(expected, batched, grad_out.reshape(expected.shape))
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w.view(a.shape), rtol=1e-4, atol=1e-5)


def test_causal_by_all_its_names() -> None:
    q, k, v = inputs()
    top_left = flash_attention(q, k, v, causal="top-left")
    assert torch.equal(flash_attention(q, k, v, causal=True), top_left)
    assert torch.equal(flash_attention(q, k, v, causal="bottom-right"), top_left)  # equal lengths
    assert torch.equal(flash_attention(q, k, v, window=(None, 0)), top_left)
    assert not torch.equal(flash_attention(q, k, v), top_left)


def test_default_scale() -> None:
    q, k, v = inputs()
    assert torch.equal(flash_attention(q, k, v), flash_attention(q, k, v, scale=0.25))


BAD_DENSE: list[tuple[dict[str, Any], str]] = [
    ({"query": (20, 16)}, "query must have 3 dimensions, as query and at least 3"),
    ({"query": (2, 20, 16)}, "key must have 3 dimensions, as query"),
    ({"key": (2, 20, 16)}, "key must have 4 dimensions, as query"),
    (
        {"query": (3, 2, 2, 20, 16), "key": (2, 3, 2, 20, 16), "value": (2, 3, 2, 20, 16)},
        r"key must have query's leading dimensions \(3, 2\), but got \(2, 3\)",
    ),
    ({"key": (2, 2, 20, 8)}, "key must have query's head_dim 16, but got 8"),
    ({"key": (1, 2, 20, 16)}, "key must have query's batch size 2, but got 1"),
    ({"value": (2, 2, 21, 16)}, "value must have key's sequence length 20, but got 21"),
    ({"query": (2, 0, 20, 16)}, "query must have at least one head, .* but got 0 and 16. Leave"),
    ({"key": (2, 0, 20, 16)}, "key must have at least one head"),
    ({"value": (2, 1, 20, 16)}, "value must have key's 2 heads, but got 1"),
    ({"query": (2, 3, 20, 16)}, "multiple of key's, but got 3 and 2"),
    ({"dtype": torch.int32}, "query must be float16, bfloat16 or float32, or float64 where"),
]


@pytest.mark.parametrize(("change", "message"), BAD_DENSE, ids=[m for _, m in BAD_DENSE])
def test_bad_tensors(change: dict[str, Any], message: str) -> None:
    shapes = {name: change.get(name, (2, 2, 20, 16)) for name in ("query", "key", "value")}
    tensors = {
        name: torch.zeros(shape, dtype=change.get("dtype", torch.float32), device=DEVICE)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        flash_attention(**tensors)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    x = torch.zeros(2, 3, 5, 16)
    for kind in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([x[0], x[1, :, :4]], layout=torch.strided)
        if kind == torch.jagged:
            nested = torch.nested.nested_tensor([x[0], x[1, :2]], layout=kind)
        message = f" must be a strided tensor, but got a nested one of layout {kind}"
        for i, name in enumerate(("query", "key", "value")):
            tensors = [nested if i == j else x for j in range(3)]
            for function in (flash_attention, explain):
                with pytest.raises(ValueError, match=name + message):
                    function(*tensors)
            with pytest.raises(ValueError, match=name + message):
                flash_attention_varlen(*tensors, *torch.tensor([[0, 2]] * 2))
        with pytest.raises(ValueError, match="bias" + message):
            flash_attention(x, x, x, bias=nested)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 2, 9, 257), torch.float32, r"at most 256 for Triton's kernels.*Use .*'tiled'"),
        ((1, 2, 9, 16), torch.float64, r"float64\. Convert it, or use implementation='tiled'"),
    ],
)
def test_what_no_kernel_computes_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    tensors = torch.randn(3, *shape, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        flash_attention(*tensors, implementation="triton")


@pytest.mark.parametrize("implementation", ["tiled", "reference"])
def test_wide_heads_are_computed_without_kernels(
    implementation: Any, dense_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    case = dense_case(1, 2, 9, 9, 257, "fp32", causal="top-left")

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attention(
            query, key, value, causal=True, return_lse=True, implementation=implementation
        )

    assert_close_to_oracle(attend, make_inputs(case, DEVICE))


def test_float64_in_tiles() -> None:
    leaves = [
        torch.randn(1, 2, 9, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)
        for _ in range(3)
    ]
    results = []
    for implementation in ("tiled", "reference"):
        out, lse = flash_attention(
            *leaves, causal=True, return_lse=True, implementation=implementation
        )
        assert out.dtype == lse.dtype == torch.float64
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)))
    torch.testing.assert_close(*results)


def test_mixed_dtypes_and_devices() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"value must have query's dtype torch\.float32"):
        flash_attention(q, k, v.half())
    with pytest.raises(ValueError, match="key must be on query's device"):
        flash_attention(q, k.to("meta"), v)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"causal": "lower"}, "causal must be False, True, 'top-left', 'bottom-right' or"),
    ({"scale": math.nan}, "scale must be a finite number"),
    ({"scale": "1"}, "scale must be a finite number"),
    ({"window": 5}, r"window must be None or a pair \(left, right\)"),
    ({"window": (-1, 0)}, "window left must be an integer >= 0"),
    ({"window": (0, 1.5)}, "window right must be an integer >= 0"),
    ({"softcap": 0.0}, "softcap must be a finite number > 0"),
    ({"layout": "sbhd"}, "layout must be one of bhsd, bshd"),
    ({"layout": "thd"}, "layout must be one of bhsd, bshd, but got 'thd'"),
    ({"bias": torch.zeros(20, 20).to_sparse()}, "bias must be a strided tensor"),
    ({"sinks": torch.zeros(2).to_sparse()}, "sinks must be a strided tensor"),
    ({"implementation": "fast"}, "implementation must be one of auto, tiled, triton, hopper"),
    ({"return_lse": 1}, "return_lse must be True or False, but got 1. Pass a bool"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS, ids=[m for _, m in BAD_ARGUMENTS])
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*inputs(), **change)


def test_numbers_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    q, k, v = inputs()
    expected = flash_attention(q, k, v, window=(3, 1), scale=0.25, softcap=2.0)
    for real in (np.float16, np.float32, np.float64):
        window = (np.int64(3), np.uint8(1))
        out = flash_attention(q, k, v, window=window, scale=real(0.25), softcap=real(2))
        assert torch.equal(out, expected)
    for change, message in (
        ({"window": (np.int64(-1), 0)}, "window left must be an integer >= 0"),
        ({"window": (None, np.float32(1))}, "window right must be an integer >= 0"),
        ({"window": (torch.tensor(1), 0)}, "window left must be an integer >= 0"),
        ({"scale": np.float16("inf")}, "scale must be a finite number"),
        ({"scale": 10**400}, "scale must be a finite number"),
        ({"softcap": np.bool_(True)}, "softcap must be a finite number > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention(q, k, v, **change)


def starts(*values: int, **keywords: Any) -> torch.Tensor:
    return torch.tensor(values, **{"dtype": torch.int32, "device": "cpu", **keywords})


BAD_PACKED: list[tuple[tuple[torch.Tensor | int | None, ...], str]] = [
    ((starts(0, 30), starts(0, 10, 20), 30, 20), "as many sequences as cu_seqlens_q"),
    ((starts(0, 30, dtype=torch.int16), starts(0, 20), 30, 20), "contiguous int32 or int64"),
    ((starts(30), starts(0, 20), 30, 20), "at least one sequence"),
    ((starts(0, 31), starts(0, 20), 31, 20), "rise from 0 to the number of tokens, 30"),
    ((starts(0, 20, 10, 30), starts(0, 5, 5, 20), 30, 20), "never fall"),
    ((starts(0, 30), starts(0, 20), 29, 20), "max_seqlen_q must be at least the longest"),
    ((starts(0, 30), starts(0, 20), 30, -1), "max_seqlen_k must be an integer >= 0 or None"),
    ((starts(0, 30), starts(0, 20), None, True), "max_seqlen_k must be an integer .* got True"),
    ((starts(0, 31), starts(0, 20)), "rise from 0 to the number of tokens, 30"),
    ((starts(0, 30), starts(0, 20), None, 19), "max_seqlen_k must be at least the longest"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_PACKED, ids=[m for _, m in BAD_PACKED])
def test_bad_packing(arguments: tuple[Any, ...], message: str) -> None:
    q, k = torch.zeros(30, 2, 16), torch.zeros(20, 2, 16)
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(q, k, k, *arguments)


OF_SPARE_TOKENS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom-right", "deterministic": True},
    {"causal": "top-left", "alibi_slopes": torch.rand(3, 4), "window": (9, None)},
    {"causal": "top-left", "prefix_lengths": torch.tensor([3, 4, 5])},
]


@pytest.mark.parametrize("keywords", OF_SPARE_TOKENS, ids=lambda x: " ".join(x) or "plain")
@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
def test_tokens_that_no_sequence_owns(implementation: str, keywords: dict[str, Any]) -> None:
    """They may hold NaN, and so may new memory; their results are 0 and -inf, with sinks too."""
    lengths = (((0, 37, 37, 70), 100), ((0, 20, 40, 60), 95))
    (starts_q, n_queries), (starts_k, n_keys) = lengths
    shapes = ((n_queries, 4, 16), (n_keys, 2, 16), (n_keys, 2, 8), (4,))
    leaves = [torch.randn(shape) for shape in shapes]
    results = []
    for spare in (math.nan, None):
        for x, (ends, _) in zip(leaves, (lengths[0], lengths[1], lengths[1]), strict=False):
            x[ends[-1] :] = math.nan
        used = [x.to(DEVICE) for x in leaves]
        if spare is None:  # the same without them
            used = [x[:70] if len(x) == 100 else x[:60] if len(x) == 95 else x for x in used]
        used = [x.clone().requires_grad_() for x in used]
        torch.use_deterministic_algorithms(True)  # new memory is NaN
        try:
            out, lse = flash_attention_varlen(
                *used[:3],
                *(starts(*x, device=DEVICE) for x in (starts_q, starts_k)),
                **{k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                   for k, x in keywords.items()},
                sinks=used[3], implementation=implementation, return_lse=True,
            )  # fmt: skip
            grad_lse = torch.ones_like(lse)
            gradients = torch.autograd.grad((out, lse), used, (torch.ones_like(out), grad_lse))
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([out, lse.T, *gradients])
    for whole, owned in zip(*results, strict=True):
        torch.testing.assert_close(whole[: len(owned)], owned, rtol=1e-5, atol=1e-5)
        spare_rows = whole[len(owned) :]
        assert torch.isneginf(spare_rows).all() if whole is results[0][1] else not spare_rows.any()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("implementation", ["tiled", "reference"])
def test_tokens_that_no_sequence_owns_have_zeros(implementation: str, compiled: bool) -> None:
    if compiled and implementation == "reference":
        pytest.skip("reads starts on the host, so that it is not compiled")
    attend = flash_attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [torch.randn(n, heads, 8).requires_grad_() for n, heads in ((20, 4), (16, 2), (16, 2))]
    sinks = torch.randn(4, requires_grad=True)
    ends = (starts(0, 6, 13), starts(0, 9, 11))
    keywords: dict[str, Any] = {"causal": "bottom-right", "return_lse": True}
    keywords |= {"sinks": sinks, "implementation": implementation}
    out, lse = attend(*leaves, *ends, **keywords)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum() + lse[:, :13].sum(), [*leaves, sinks])
    owned = [x[:n] for x, n in zip(leaves, (13, 11, 11), strict=True)]
    out_owned, lse_owned = flash_attention_varlen(*owned, *ends, **keywords)
    expected = torch.autograd.grad(
        (out_owned * weight[:13]).sum() + lse_owned.sum(), [*leaves, sinks]
    )
    torch.testing.assert_close(out[:13], out_owned)
    torch.testing.assert_close(lse[:, :13], lse_owned)
    assert not out[13:].any()
    assert lse[:, 13:].isneginf().all()
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    for gradient, n in zip(gradients, (13, 11, 11), strict=False):
        assert not gradient[n:].any()


EMPTY = {
    "no batch": ((0, 4, 5, 8), (0, 2, 7, 8)),
    "no queries": ((2, 4, 0, 8), (2, 2, 7, 8)),
    "no keys": ((2, 4, 5, 8), (2, 2, 0, 8)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_problems(kind: str, with_sinks: bool, implementation: str, compiled: bool) -> None:
    torch.compiler.reset()
    attend = flash_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    query_shape, key_shape = EMPTY[kind]
    leaves = [torch.randn(shape, requires_grad=True) for shape in (query_shape, *[key_shape] * 2)]
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    out, lse = attend(
        *leaves, sinks=sinks, causal="bottom-right", return_lse=True, implementation=implementation
    )
    assert out.shape == query_shape
    assert not out.any()
    expected = torch.full((4,), float("-inf")) if sinks is None else sinks.detach()
    torch.testing.assert_close(lse.detach(), expected[:, None].expand(lse.shape))
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_problems_with_everything_that_can_come_along(kind: str, compiled: bool) -> None:
    query_shape, key_shape = EMPTY[kind]
    batch, heads, n_queries, _ = query_shape
    n_keys = key_shape[2]
    ones = torch.ones(batch, dtype=torch.int32)
    calls: list[dict[str, Any]] = [
        {"mask": torch.ones(batch, 1, 1, n_keys, dtype=torch.bool)},
        {"mask": torch.ones(batch, 1, n_queries, n_keys, dtype=torch.bool)},
        {"bias": torch.zeros(heads, n_queries, n_keys)},
        {"alibi_slopes": torch.ones(heads), "causal": "top-left", "prefix_lengths": ones},
        {"key_lengths": ones},
    ]
    if kind != "no keys":
        calls.append({"document_ids": torch.zeros(batch, n_queries, dtype=torch.int64)})
    for given in calls:
        rows = n_queries if "document_ids" in given else n_keys
        leaves = [
            torch.randn(shape, requires_grad=True)
            for shape in (query_shape, *[(batch, 2, rows, 8)] * 2)
        ]
        attend = flash_attention
        if compiled:
            torch.compiler.reset()
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        out, lse = attend(*leaves, return_lse=True, **given)
        assert out.shape == query_shape
        assert not out.any()
        assert lse.isneginf().all()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
def test_no_sequences(implementation: str) -> None:
    leaves = [torch.randn(0, 2, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    none = [starts(0, device=DEVICE)] * 2
    out = flash_attention_varlen(*leaves, *none, implementation=implementation)
    assert out.shape == (0, 2, 8)
    out.sum().backward()
    behind = torch.randn(3, 2, 8, device=DEVICE)  # tokens that no sequence owns
    out = flash_attention_varlen(*[behind] * 3, *none)
    assert torch.equal(out, torch.zeros_like(behind))


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
def test_empty_packed_problems(lengths: tuple[int, int], implementation: str) -> None:
    n_queries, n_keys = lengths
    shapes = [(n, 2, 8) for n in (n_queries, n_keys, n_keys)]
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    both = [starts(0, n, device=DEVICE) for n in lengths]
    out = flash_attention_varlen(*leaves, *both, implementation=implementation)
    assert out.shape == (n_queries, 2, 8)
    assert not out.any()
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@pytest.mark.parametrize(
    "length",
    [
        lambda: torch.tensor(9),
        lambda: torch.tensor(9, dtype=torch.int32),
        lambda: pytest.importorskip("numpy").int64(9),
    ],
)
def test_lengths_and_starts_of_other_types(length: Callable[[], Any]) -> None:
    x, ends = torch.randn(20, 2, 16), starts(0, 9, 11, 20)
    expected = flash_attention_varlen(x, x, x, ends, ends, 9, 9)
    for given in (ends, ends.long()):
        out = flash_attention_varlen(x, x, x, given, given, length(), length())
        assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the longest"):
        flash_attention_varlen(x, x, x, ends, ends, length() - 1, length())
    with pytest.raises(ValueError, match="max_seqlen_q must be an integer >= 0 or None"):
        flash_attention_varlen(x, x, x, ends, ends, torch.tensor(9.0), 9)  # type: ignore[call-overload]


@pytest.mark.parametrize("offset", [2**32, -(2**32)])
def test_numbers_beyond_int32_do_not_wrap(offset: int) -> None:
    x = torch.randn(20, 2, 16)
    ends = torch.tensor([0, 9, 20 + offset])
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to the number of tokens"):
        flash_attention_varlen(x, x, x, ends, ends)
    tokens = torch.empty(2**31, 1, 8, device="meta")
    starts_of_two = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"query must have less than 2\^31 tokens"):
        flash_attention_varlen(tokens, tokens, tokens, starts_of_two, starts_of_two)
    q, k, v = inputs()
    lengths = torch.full((len(q),), 7 + offset, device=DEVICE)
    out = flash_attention(q, k, v, causal="bottom-right", prefix_lengths=lengths)
    whole = torch.full_like(lengths, k.shape[2] if offset > 0 else 0)
    expected = flash_attention(q, k, v, causal="bottom-right", prefix_lengths=whole)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("as_number", [False, True])
def test_longest_lengths_that_compiled_code_computes(as_number: bool) -> None:
    x, ends = torch.randn(20, 2, 16), starts(0, 9, 11, 20)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        longest: Any = ends.diff().max()
        longest = longest.item() if as_number else longest
        return flash_attention_varlen(x, x, x, ends.long(), ends.long(), longest, longest)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        out = attend(x, ends)
    torch.testing.assert_close(out, flash_attention_varlen(x, x, x, ends, ends))


@pytest.mark.parametrize("given", [(), (20,), (None, 9)], ids=str)
@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_longest_lengths_may_be_left_out(
    implementation: str, given: tuple[int | None, ...]
) -> None:
    """Ragged lengths, empty sequences on either side, more programs than any sequence needs."""
    cu_q, cu_k = starts(0, 3, 3, 23, 25, device=DEVICE), starts(0, 9, 13, 13, 20, device=DEVICE)
    leaves = [torch.randn(n, 2, 16, device=DEVICE, requires_grad=True) for n in (25, 20, 20)]
    small = Tiles(16, 16, 1, 1)
    keywords: dict[str, Any] = {"causal": "bottom-right", "implementation": implementation}
    if implementation == "triton":
        keywords["tiling"] = Tiling(forward=small, key_pass=small, query_pass=small)
    results = []
    for longest in ((20, 9), given):
        out, lse = flash_attention_varlen(
            *leaves, cu_q, cu_k, *longest, return_lse=True, **keywords
        )
        loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_unequal_totals_without_lengths_warn_of_the_alignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashattn_triton.inputs._given", set())
    q, k = torch.zeros(30, 2, 16), torch.zeros(20, 2, 16)
    with pytest.warns(UserWarning, match="True for 30 queries and 20 keys"):
        flash_attention_varlen(q, k, k, starts(0, 30), starts(0, 20), causal=True)


def test_meta_tensors_give_shapes() -> None:
    meta: dict[str, Any] = {"device": "meta", "requires_grad": True}
    leaf, packed = torch.zeros(2, 4, 20, 16, **meta), torch.zeros(20, 4, 16, **meta)
    cu = torch.zeros(3, dtype=torch.int32, device="meta")
    out, lse = flash_attention(leaf, leaf, leaf, causal=True, return_lse=True)
    of_packed = flash_attention_varlen(packed, packed, packed, cu, cu)
    (out.sum() + lse.sum() + of_packed.sum()).backward()
    assert (out.shape, lse.shape, of_packed.shape) == (leaf.shape, (2, 4, 20), packed.shape)
    for x in (leaf, packed):
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_no_value_of_the_starts_is_read_from_fake_tensors() -> None:
    """A fake tensor raises where the host would wait for a device's value."""
    with FakeTensorMode():
        leaf = torch.zeros(20, 2, 16, requires_grad=True)
        cu = torch.zeros(3, dtype=torch.int32)
        flash_attention_varlen(leaf, leaf, leaf, cu, cu, causal=True).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


def test_packed_results_are_those_of_each_sequence() -> None:
    q, k, v = (x.transpose(0, 1).contiguous() for x in inputs(2, 30, 16))
    cu = starts(0, 12, 12, 30, device=DEVICE)
    out, lse = flash_attention_varlen(q, k, v, cu, cu, 18, 18, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (2, 30)
    for first, last in ((0, 12), (12, 30)):
        alone = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        expected, expected_lse = flash_attention(*alone, causal=True, return_lse=True)
        torch.testing.assert_close(out[first:last].transpose(0, 1)[None], expected)
        torch.testing.assert_close(lse[None, :, first:last], expected_lse)


FUNCTIONS = [
    FlashAttention2PyTorch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(2, 40, 16), (2, 3, 33, 16), (2, 1, 2, 17, 8)], ids=str)
def test_assignment_functions(function: Any, shape: tuple[int, ...]) -> None:
    leaves = inputs(*shape, requires_grad=True)
    out = function.apply(*leaves, True)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == leaves[0].shape[:-1]]
    assert len(saved) == 1
    q, k, v = (x.reshape(-1, 1, *x.shape[-2:]) for x in leaves)
    expected, lse = flash_attention(
        q, k, v, causal=True, return_lse=True, implementation="reference"
    )
    torch.testing.assert_close(out, expected.view(shape), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(saved[0], lse.view(shape[:-1]), rtol=1e-5, atol=1e-5)
    grad_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, grad_out)
    wanted = torch.autograd.grad(expected, leaves, grad_out.view(expected.shape))
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-4, atol=1e-5)


def test_assignment_function_is_not_causal_by_default() -> None:
    q, k, v = inputs(2, 40, 16)
    assert torch.equal(
        FlashAttention2Triton.apply(q, k, v), FlashAttention2Triton.apply(q, k, v, False)
    )
    assert not torch.equal(
        FlashAttention2Triton.apply(q, k, v), FlashAttention2Triton.apply(q, k, v, True)
    )


def test_assignment_function_checks_its_inputs() -> None:
    q, k, v = inputs(2, 40, 16)
    with pytest.raises(ValueError, match=r"Q must have at least three dimensions \(..., sequence"):
        FlashAttention2Triton.apply(q[0], k[0], v[0])
    with pytest.raises(ValueError, match=r"K must have .* the same leading dimensions as Q"):
        FlashAttention2Triton.apply(q, k[:1], v)
