"""The largest score of each head, against all scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashattn_triton import largest_scores
from flashattn_triton.problem import new_problem
from flashattn_triton.reference import visibility_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES: list[dict[str, Any]] = [
    {},
    {"causal": "bottom-right", "scale": -0.3},
    {"causal": "top-left", "window": (4, None), "layout": "bshd"},
    {"softcap": 2.0},
    {"causal": "top-left", "bias": torch.randn(4, 50, 60)},
    {"causal": "top-left", "alibi_slopes": torch.rand(4)},
]


@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
@pytest.mark.parametrize("options", CASES, ids=lambda x: " ".join(x) or "plain")
def test_largest_scores(options: dict[str, Any], implementation: Any) -> None:
    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 60, 16)
    tensors = {k: x.to(DEVICE) for k, x in options.items() if isinstance(x, torch.Tensor)}
    q, k = query.to(DEVICE), key.to(DEVICE)
    if options.get("layout") == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    found = largest_scores(q, k, **(options | tensors), implementation=implementation)

    scores = query @ key.repeat_interleave(2, 1).mT * options.get("scale", 0.25)
    if "softcap" in options:
        scores = 2 * torch.tanh(scores / 2)
    if "bias" in options:
        scores += options["bias"]
    if "alibi_slopes" in options:
        distances = (torch.arange(50)[:, None] - torch.arange(60)).abs()
        scores -= options["alibi_slopes"][:, None, None] * distances
    band = {name: options[name] for name in ("causal", "window") if name in options}
    seen = visibility_mask(50, 60, new_problem(head_dim=16, **band))
    expected = scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    if not band:  # parts of the keys
        of_parts = [
            largest_scores(q, x, **(options | tensors), implementation=implementation)
            for x in k.split(17, 2)
        ]
        torch.testing.assert_close(torch.stack(of_parts).amax(0).cpu(), expected)


@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
def test_packed_sequences(implementation: Any) -> None:
    """Only scores of pairs in one sequence count, and none of tokens that no sequence owns."""
    q, k = torch.randn(50, 4, 16), torch.randn(40, 2, 16)
    starts = [torch.tensor(x, device=DEVICE) for x in ((0, 20, 20, 45), (0, 7, 9, 30))]
    q[45:], k[30:] = float("nan"), float("nan")
    found = largest_scores(
        q.to(DEVICE), k.to(DEVICE), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        implementation=implementation,
    )  # fmt: skip
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
    expected = torch.maximum(scores[:, :20, :7].amax((1, 2)), scores[:, 20:45, 9:30].amax((1, 2)))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("implementation", ["tiled", "reference", "triton"])
def test_no_scores(shape: tuple[int, ...], implementation: Any) -> None:
    query, key = torch.zeros(*shape, 16, device=DEVICE), torch.zeros(shape[0], 2, 5, 16)
    found = largest_scores(query, key.to(DEVICE), implementation=implementation)
    assert torch.equal(found.cpu(), torch.full((2,), float("-inf")))


def test_any_leading_dimensions() -> None:
    query, key = torch.randn(3, 2, 4, 5, 16), torch.randn(3, 2, 2, 6, 16)
    bias = torch.randn(3, 2, 1, 5, 6)
    of_each = [largest_scores(q, k, bias=b) for q, k, b in zip(*(
        x.flatten(0, 1) for x in (query, key, bias)), strict=True)]  # fmt: skip
    found = largest_scores(query, key, bias=bias)
    torch.testing.assert_close(found, torch.stack(of_each).amax(0))
    with pytest.raises(ValueError, match="query must have 3 dimensions, as query and at least 3"):
        largest_scores(query[0, 0, 0], key[0, 0, 0])


def test_unknown_keywords() -> None:
    x: Any = torch.zeros(1, 2, 5, 16)
    with pytest.raises(TypeError, match=r"largest_scores .* got sm_scale, .* Use scale=0\.5"):
        largest_scores(x, x, sm_scale=0.5)  # type: ignore[call-arg]


def test_compiled() -> None:
    x = torch.randn(1, 2, 20, 16)
    compiled = torch.compile(largest_scores, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, x, causal=True), largest_scores(x, x, causal=True))
