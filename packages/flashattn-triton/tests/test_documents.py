"""Documents in rows: against a mask of all pairs in fp64, and against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn_triton import cu_seqlens_of, explain, flash_attention, flash_attention_varlen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.tensor([[5, 5, 5, 2, 2, 7, 7, 7, 7, 7, 7], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5]])


def leaves(ids: Tensor = IDS) -> list[Tensor]:
    return [
        torch.randn(*ids.shape[:-1], heads, ids.shape[-1], 16, device=DEVICE, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def definition(tensors: list[Tensor], ids: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(2, -3) for x in (k, v))
    seen = ids[..., :, None] == ids[..., None, :]
    seen = (seen.tril() if causal else seen).unsqueeze(-3).to(q.device)
    scores = (q @ k.mT / 4).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def close(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal: bool, layout: Any, implementation: Any) -> None:
    tensors = leaves()
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in tensors]
    out, lse = flash_attention(
        *given,
        document_ids=IDS.to(DEVICE),
        causal=causal,
        layout=layout,
        return_lse=True,
        implementation=implementation,
    )
    out = out.transpose(1, 2) if layout == "bshd" else out
    expected = definition(tensors, IDS, causal)
    close((out, lse), expected)
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    actual = torch.autograd.grad((out, lse), tensors, weights)
    close(actual, torch.autograd.grad(expected, tensors, [w.double() for w in weights]))


def test_any_leading_dimensions_and_sinks() -> None:
    for ids in (IDS[0], IDS[None]):
        tensors, sinks = leaves(ids), torch.zeros(4, device=DEVICE)
        out, lse = flash_attention(*tensors, document_ids=ids.to(DEVICE), return_lse=True)
        close((out, lse), definition(tensors, ids, causal=False))
        with_sinks = flash_attention(*tensors, document_ids=ids.to(DEVICE), sinks=sinks)
        close((with_sinks,), (out * torch.sigmoid(lse)[..., None],))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3))
def test_starts(lengths: list[list[int]]) -> None:
    """Whatever the lengths; rows are padded by a document of their own."""
    longest = max(sum(row) for row in lengths)
    rows = [[*row, longest - sum(row)] for row in lengths]
    ids = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    )
    cu_seqlens, most = cu_seqlens_of(ids)
    expected = [n for row in rows for n in row if n]
    assert cu_seqlens.diff().tolist() == expected
    assert cu_seqlens.dtype == torch.int32
    assert (cu_seqlens[0], cu_seqlens[-1], most) == (0, ids.numel(), max(expected))


OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "window": (2, None)},
    {"causal": "bottom-right", "layout": "bshd"},
    {"window": (1, 2), "softcap": 5.0},
]


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiled_documents(options: dict[str, Any], most: int | None) -> None:
    """In one graph: rows of several documents, of one, and other numbers in the same code."""

    def attend(ids: Tensor, *tensors: Tensor) -> Any:
        return flash_attention(
            *tensors, document_ids=ids, max_documents=most, return_lse=True, **options
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    tensors = leaves()
    if options.get("layout") == "bshd":
        tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]
    for ids in (IDS, torch.zeros_like(IDS), IDS.flip(1)):
        found = compiled(ids.to(DEVICE), *tensors)
        expected = flash_attention(
            *tensors, document_ids=ids.to(DEVICE), return_lse=True, **options
        )
        close(found, expected)
        gradients, others = (
            torch.autograd.grad(x, tensors, [torch.ones_like(y) for y in x])
            for x in (found, expected)
        )
        close(gradients, others)
    torch._dynamo.reset()


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
def test_a_number_of_documents_instead_of_a_wait(implementation: Any) -> None:
    tensors = leaves()
    keywords: dict[str, Any] = {"implementation": implementation, "return_lse": True}
    out = flash_attention(*tensors, document_ids=IDS.to(DEVICE), max_documents=9, **keywords)
    close(out, definition(tensors, IDS, causal=False))
    starts = torch.tensor([0, 3, 5, 11, 12, 21, 22, 22, 22, 22])
    found, longest = cu_seqlens_of(IDS, 9)
    assert torch.equal(found, starts.int())
    assert longest == 11  # tokens of a row
    compiled = torch.compile(cu_seqlens_of, backend="eager", fullgraph=True)
    found, longest = compiled(IDS)
    assert torch.equal(found[:10], starts.int())
    assert len(found) == 23
    assert longest == 11
    with pytest.raises(RuntimeError, match="max_documents must be at least the number"):
        cu_seqlens_of(IDS, 5)
    with pytest.raises(RuntimeError, match="in several pieces"):
        cu_seqlens_of(torch.tensor([[0, 1, 0]]), 3)


def test_starts_that_compiled_code_and_shapes_alone_can_use() -> None:
    """The length is a number that callers may calculate with, and no value is read."""

    def attend(ids: Tensor, x: Tensor) -> Tensor:
        cu_seqlens, longest = cu_seqlens_of(ids)
        out = flash_attention_varlen(x, x, x, cu_seqlens, cu_seqlens, longest, longest)
        return out / (longest + 1)

    x, ids = torch.randn(22, 2, 16), IDS.sort(1).values
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (11, 9):
        expected = attend(ids[:, :n], x[: 2 * n]) * (1 + cu_seqlens_of(ids[:, :n])[1]) / (1 + n)
        close([compiled(ids[:, :n], x[: 2 * n])], [expected])
    torch._dynamo.reset()
    q = x.view(2, 11, 2, 16).to("meta")
    assert attend(ids.to("meta"), x.to("meta")).shape == x.shape
    assert flash_attention(q, q, q, document_ids=ids.to("meta"), layout="bshd").shape == q.shape
    with FakeTensorMode() as mode:
        assert attend(mode.from_tensor(ids), mode.from_tensor(x)).shape == x.shape


BAD = [
    (torch.tensor([[0, 1, 0]]), "in several pieces in row 0"),
    (torch.tensor([[0, 1, 1], [3, 1, 3]]), "in several pieces in row 1"),
    (torch.tensor([[0.0, 1.0]]), r"must be integers .* but got torch\.float32 of shape \(1, 2\)"),
    (torch.tensor([[True, False]]), r"must be integers .* but got torch\.bool"),
    (torch.tensor(3), r"must be integers .* of shape \(\)"),
]


@pytest.mark.parametrize(("ids", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_documents(ids: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cu_seqlens_of(ids)


@pytest.mark.parametrize("number", [-1, 1.5, True, "4", [4]], ids=str)
def test_a_number_of_documents_must_be_one(number: Any) -> None:
    tensors, ids = leaves(), IDS.to(DEVICE)
    for call in (
        lambda: flash_attention(*tensors, document_ids=ids, max_documents=number),
        lambda: flash_attention(*tensors, max_documents=number),
        lambda: explain(*tensors, document_ids=ids, max_documents=number),
        lambda: cu_seqlens_of(ids, number),
    ):
        with pytest.raises(ValueError, match="max_documents must be an integer >= 0 or None, but"):
            call()


@pytest.mark.parametrize("most", [None, 4])
def test_documents_are_shared_by_what_vmap_maps_over(most: int | None) -> None:
    x, ids = torch.randn(2, 1, 2, 8, 16), torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])

    def attend(x: Tensor, ids: Tensor) -> Tensor:
        return flash_attention(x, x, x, document_ids=ids, max_documents=most)

    actual = torch.vmap(attend, in_dims=(0, None))(x, ids)
    torch.testing.assert_close(actual, torch.stack([attend(y, ids) for y in x]))
    with pytest.raises(ValueError, match=r"document_ids must be the same for all that torch\.vmap"):
        torch.vmap(attend)(x, torch.stack([ids, ids]))


def test_documents_must_fit_the_tokens() -> None:
    q, k, v = leaves()
    with pytest.raises(ValueError, match=r"each token of query, \(2, 11\) on .* shape \(2, 10\)"):
        flash_attention(q, k, v, document_ids=IDS[:, 1:].to(DEVICE))
    with pytest.raises(ValueError, match=r"each token of key, \(2, 8\) on .* shape \(2, 11\)"):
        flash_attention(q, k[:, :, :8], v, document_ids=IDS.to(DEVICE))
    with pytest.raises(TypeError, match=r"document_ids must be a torch\.Tensor"):
        flash_attention(q, k, v, document_ids=IDS.tolist())  # type: ignore[call-overload]
