"""Keys in parts: outputs in fp32, and gradients added from the joined output and logsumexp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashattn_triton import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    merge,
)
from flashattn_triton.parts import _share_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["tiled", "reference", "triton"]


backward: Any = flash_attention_backward


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, root mean square."""
    return float(
        (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_error_does_not_grow_with_the_parts(implementation: Any) -> None:
    n, parts = 64, 32
    shapes = ((1, 4, n, 16), (1, 2, n, 16), (1, 2, n, 16))
    inputs = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
    query, key, value = inputs
    grad_out = torch.randn_like(query)
    exact = [x.double().requires_grad_() for x in inputs]
    q, k, v = exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])
    wanted = torch.autograd.grad(((q @ k.mT) / 4).softmax(-1) @ v, exact, grad_out.double())
    leaves = [x.clone().requires_grad_() for x in inputs]
    whole = flash_attention(*leaves, implementation=implementation)
    of_one_call = torch.autograd.grad(whole, leaves, grad_out)

    of_keys = list(zip(key.chunk(parts, 2), value.chunk(parts, 2), strict=True))
    results = [
        flash_attention(
            query, *part, return_lse=True, out_dtype=torch.float32, implementation=implementation
        )
        for part in of_keys
    ]
    assert all(out.dtype == torch.float32 for out, _ in results)
    out, lse = merge(*zip(*results, strict=True))
    dq, dk, dv = sums = [torch.zeros(x.shape, device=DEVICE) for x in inputs]
    of_sums = zip(dk.chunk(parts, 2), dv.chunk(parts, 2), strict=True)
    for part, into in zip(of_keys, of_sums, strict=True):
        backward(query, *part, out, lse, grad_out, (dq, *into), implementation=implementation)
    for total, one, exactly in zip(sums, of_one_call, wanted, strict=True):
        assert error(total.bfloat16(), exactly) <= 1.1 * error(one, exactly)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads behind the sequence, deterministic": {"layout": "bshd", "deterministic": True},
    "sinks, a window": {"causal": "bottom-right", "window": (9, None), "sinks": True},
    "soft-cap, slopes": {"softcap": 2.0, "alibi_slopes": torch.rand(4), "causal": "top-left"},
    "packed": {"packed": True, "causal": "bottom-right", "sinks": True},
    "packed, a window": {"packed": True, "causal": "top-left", "window": (5, None)},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_added(name: str, implementation: Any) -> None:
    options = dict(CASES[name])
    packed, has_sinks = options.pop("packed", False), options.pop("sinks", False)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].to(DEVICE)
    if packed:
        shapes: Any = ((50, 4, 16), (40, 2, 16), (40, 2, 8))
        starts = [torch.tensor(x, device=DEVICE) for x in ((0, 20, 45), (0, 7, 35))]
        given: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        attend: Any = flash_attention_varlen
    else:
        shapes = ((2, 4, 20, 16), (2, 2, 30, 16), (2, 2, 30, 8))
        given, attend = {}, flash_attention
        if options.get("layout") == "bshd":
            shapes = tuple((b, n, h, d) for b, h, n, d in shapes)
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, device=DEVICE, requires_grad=True) if has_sinks else None
    options["implementation"] = implementation
    out, lse = attend(*leaves, **given, sinks=sinks, **options, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    wanted = leaves if sinks is None else [*leaves, sinks]
    expected = torch.autograd.grad((out, lse), wanted, (grad_out, grad_lse))
    sums = [torch.ones(x.shape, device=DEVICE) for x in wanted]
    of_sinks: dict[str, Any] = {} if sinks is None else {"sinks": sinks, "grad_sinks": sums[3]}
    backward(
        *leaves, out, lse, grad_out, sums[:3], grad_lse=grad_lse, **given, **of_sinks, **options
    )
    for total, gradient in zip(sums, expected, strict=True):
        torch.testing.assert_close(total - 1, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_keys_hold_that_a_window_hides_reaches_no_gradient(implementation: Any) -> None:
    shapes = ((2, 4, 20, 16), (2, 2, 60, 16), (2, 2, 60, 8))
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    options: Any = {"causal": "bottom-right", "window": (5, 0), "implementation": implementation}
    out, lse = flash_attention(*leaves, return_lse=True, **options)
    expected = torch.autograd.grad(out.sum(), leaves)
    dirty = [x.detach().clone() for x in leaves]
    for x in dirty[1:]:
        x[:, :, :35] = float("nan")
    sums = [torch.zeros(x.shape, device=DEVICE) for x in leaves]
    backward(*dirty, out.detach(), lse.detach(), torch.ones_like(out), sums, **options)
    for total, gradient in zip(sums, expected, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_an_output_in_fp32(implementation: Any) -> None:
    leaves = [torch.randn(1, 2, 20, 16, device=DEVICE).half().requires_grad_() for _ in range(3)]
    keywords: dict[str, Any] = {"causal": True, "implementation": implementation}
    out = flash_attention(*leaves, **keywords, out_dtype=torch.float32)
    rounded = flash_attention(*leaves, **keywords)
    torch.testing.assert_close(out, rounded.float(), rtol=2**-10, atol=1e-6)
    assert not torch.equal(out, out.half().float())
    grad_out = torch.randn_like(rounded)
    expected = torch.autograd.grad(rounded, leaves, grad_out)
    gradients = torch.autograd.grad(out, leaves, grad_out.float())
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.half
        torch.testing.assert_close(gradient, other, rtol=2**-7, atol=2**-9)


def test_a_compiler_knows_the_output_in_fp32() -> None:
    x = torch.randn(1, 2, 20, 16).half()
    attend = torch.compile(
        lambda x: flash_attention(x, x, x, out_dtype=torch.float32) + 1,
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    assert torch.equal(attend(x), flash_attention(x, x, x, out_dtype=torch.float32) + 1)


def test_unknown_keywords() -> None:
    x, lse = torch.zeros(1, 2, 20, 16), torch.zeros(1, 2, 20)
    with pytest.raises(TypeError, match=r"flash_attention_backward .* Use causal=True"):
        flash_attention_backward(x, x, x, x, lse, x, [x] * 3, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"into": 2}, "into must be dQ, dK and dV, but got 2 tensors"),
        ({"into": torch.half}, "into's dQ must be float32 of shape .* but got torch.float16"),
        ({"into": "expanded"}, "into's dQ must be float32"),
        ({"into": "input"}, "into's dQ must have memory of its own, .* but got that of "),
        ({"into": "twice"}, "into's dV must have memory of its own, .* that of an input or of"),
        ({"into": "overlap"}, "into's dV must have memory of its own, .* that of an input or of"),
        ({"into": "within input"}, "into's dQ must have memory of its own"),
        ({"into": "stack"}, "into must be dQ, dK and dV, but got Tensor"),
        ({"layout": "thd"}, "layout must be one of bhsd, bshd, but got 'thd'"),
        ({"lse": (1, 2, 5)}, "lse must be torch.float32 of shape"),
        ({"out": "meta"}, "out must be .* on cpu, but got .* on meta"),
        ({"out": (1, 2, 5, 16)}, "out must be torch.float32 or torch.float32 of shape"),
        ({"out_dtype": torch.half}, "out_dtype must be torch.float32 or None"),
        ({"sinks": torch.zeros(2)}, "sinks and grad_sinks must both be given"),
        ({"sinks": torch.zeros(3), "grad_sinks": torch.zeros(3)}, "sinks must be a floating"),
        ({"sinks": torch.zeros(2), "grad_sinks": torch.zeros(3)}, "grad_sinks must be float32"),
        ({"cu_seqlens_q": torch.tensor([0, 1])}, "cu_seqlens_q and cu_seqlens_k must both"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    x, lse = torch.randn(1, 2, 20, 16), torch.zeros(1, 2, 20)
    into: Any = [torch.zeros_like(x) for _ in range(3)]
    change, out = dict(change), x
    match change.pop("into", None):
        case 2:
            into = into[:2]
        case "expanded":
            into[0] = torch.zeros(1, 1, 20, 16).expand(x.shape)
        case "input":
            into[0] = x
        case "twice":
            into[2] = into[1]
        case "overlap":
            rows = torch.zeros(1, 2, 21, 16)
            into[1:] = rows[:, :, :20], rows[:, :, 1:]
        case "within input":
            x = torch.randn(1, 2, 21, 16)
            into[0], x = x[:, :, 1:], x[:, :, :20]
            out = x
        case "stack":
            into = torch.stack(into)
        case torch.half:
            into[0] = into[0].half()
    if "lse" in change:
        lse = torch.zeros(change.pop("lse"))
    if change.get("out") == "meta":
        out = x.to(change.pop("out"))
    if "out" in change:
        out = torch.zeros(change.pop("out"))
    with pytest.raises(ValueError, match=message):
        backward(x, x, x, out, lse, x, into, **change)
    assert not any(total.any() for total in into if total._base is None and total is not x)
    with pytest.raises(TypeError, match=r"grad_lse must be a torch\.Tensor"):
        backward(x, x, x, x, torch.zeros(1, 2, 20), x, into, grad_lse=[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_stay_as_they_are(implementation: Any) -> None:
    query, key = torch.randn(1, 2, 20, 16, device=DEVICE), torch.randn(1, 2, 19, 16, device=DEVICE)
    options: Any = {"causal": "bottom-right", "implementation": implementation}
    out, lse = flash_attention(query, key, key, return_lse=True, **options)
    assert lse[0, 0, 0] == float("-inf")  # a query that sees no key
    tensors, sums = (query, key, key, out, lse, out), [torch.zeros_like(query)]
    sums += [torch.zeros_like(key) for _ in range(2)]
    before = [x.clone() for x in tensors]
    backward(*tensors, sums, **options)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert not any(x.requires_grad for x in tensors)
    assert all(total.isfinite().all() for total in sums)


def test_gradients_beside_each_other_in_one_tensor() -> None:
    q, k, v = leaves = torch.randn(3, 2, 20, 4, 16, requires_grad=True).unbind(0)
    out, lse = flash_attention(q, k, v, layout="bshd", return_lse=True)
    expected = torch.autograd.grad(out.sum(), leaves)
    sums = torch.zeros(2, 20, 3, 4, 16)
    tensors = [x.detach() for x in (q, k, v, out, lse)]
    backward(*tensors, torch.ones_like(out), sums.unbind(2), layout="bshd")
    for total, gradient in zip(sums.unbind(2), expected, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_what_a_part_without_visible_keys_holds_does_not_matter(layout: Any) -> None:
    x = torch.randn(3, 2, 5, 5, 16)
    out, lse = flash_attention(*x, layout=layout, return_lse=True)
    dirty, unseen = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    leaves = [y.requires_grad_() for y in (out, lse, dirty, unseen)]
    merged = merge([out, dirty], [lse, unseen], layout=layout)
    torch.testing.assert_close(merged[0], out, rtol=1e-6, atol=0)
    assert torch.equal(merged[1], lse)
    gradients = torch.autograd.grad((merged[0] * 2).sum() + merged[1].sum(), leaves)
    for gradient, expected in zip(gradients, (2.0, 1.0, 0.0, 0.0), strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, expected))


@pytest.mark.parametrize("mapped", ["query", "into", "prefix_lengths"])
def test_within_a_transform(mapped: str) -> None:
    x, into = torch.randn(3, 1, 2, 8, 16, device=DEVICE), torch.zeros(3, 1, 2, 8, 16, device=DEVICE)
    out, lse = flash_attention(x[0], x[0], x[0], causal=True, return_lse=True)
    prefixes = torch.ones(3, 1, dtype=torch.int32, device=DEVICE)

    def differentiate(x: Tensor, dq: Tensor, prefixes: Tensor) -> Tensor:
        sums = (dq, torch.zeros_like(out), torch.zeros_like(out))
        backward(x, x, x, out, lse, out, sums, causal=True, prefix_lengths=prefixes)
        return dq

    of = {"query": x, "into": into, "prefix_lengths": prefixes}
    arguments = [whole if name == mapped else whole[0] for name, whole in of.items()]
    dims = tuple(0 if name == mapped else None for name in of)
    with pytest.raises(RuntimeError, match="but got one of a transform, such as"):
        torch.func.vmap(differentiate, dims)(*arguments)


VIEWS = st.tuples(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6))))


@given(VIEWS, VIEWS, st.sampled_from([torch.uint8, torch.float16]))
def test_shared_memory_is_found_whatever_the_strides(x: Any, y: Any, dtype: torch.dtype) -> None:
    """Compared with the sets of all bytes."""
    memory = torch.zeros(200, dtype=torch.uint8)
    views, of_each = [], []
    for (start, dimensions), kind in ((x, dtype), (y, torch.float32)):
        sizes, strides = zip(*dimensions[:3], strict=True) if dimensions else ((), ())
        views.append(memory.view(kind).as_strided(sizes, strides, start))
        offsets = torch.arange(200).view(-1, kind.itemsize)
        of_each.append(
            set(
                offsets[torch.arange(len(offsets)).as_strided(sizes, strides, start)]
                .flatten()
                .tolist()
            )
        )
    assert _share_memory(*views) == bool(set.intersection(*of_each))
