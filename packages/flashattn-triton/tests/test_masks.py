"""Boolean masks beside everything else, on every tier, against the definition with -inf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import explain, flash_attention, tiled
from flashattn_triton.tiled import ScoreTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["tiled", "triton", "reference"]


def leaves(*leading: int, layout: str = "bhsd", n_keys: int = 21) -> list[Tensor]:
    """Query (3, 4 heads), key and value (2 heads)."""
    tensors = [torch.randn(*leading, *s, device=DEVICE) for s in
               ((4, 18, 16), (2, n_keys, 16), (2, n_keys, 16))]  # fmt: skip
    tensors = [x if layout == "bhsd" else x.transpose(-2, -3) for x in tensors]
    return [x.requires_grad_() for x in tensors]


def results(inputs: list[Tensor], bias: Tensor | None = None, **keywords: Any) -> list[Tensor]:
    out, lse = flash_attention(*inputs, bias=bias, return_lse=True, **keywords)
    wanted = inputs if bias is None else [*inputs, bias]
    loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((3, 1, 1, 21), "bhsd"), ((4, 18, 21), "bshd"), ((18, 21), "bhsd"), ((3, 4, 1, 21), "bshd")],
    ids=str,
)
def test_masks_of_every_shape_alone_and_beside_a_bias(
    shape: tuple[int, ...], layout: Any, implementation: Any
) -> None:
    inputs = leaves(3, layout=layout)
    mask = torch.rand(shape, device=DEVICE) > 0.4
    mask[..., 5:9] = False
    mask[0] = False  # no key at all for the first element, head or query
    numbers = torch.zeros(shape, device=DEVICE).masked_fill(~mask, float("-inf"))
    keywords = {"layout": layout, "causal": "bottom-right"}
    ours = results(inputs, mask=mask, implementation=implementation, **keywords)
    theirs = results(inputs, numbers.requires_grad_(), implementation="reference", **keywords)[:5]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    bias = torch.randn(1, 4, 18, 21, device=DEVICE, requires_grad=True)
    both = results(inputs, bias, mask=mask, implementation=implementation, **keywords)
    total = bias + numbers.detach()
    expected = results(inputs, total, implementation="reference", **keywords)
    torch.testing.assert_close(both[:5], expected[:5], rtol=1e-4, atol=1e-5)
    gradient = expected[5].sum_to_size(bias.shape)
    torch.testing.assert_close(both[5], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_what_keys_hold_that_no_query_sees_reaches_no_result(
    layout: Any, implementation: Any
) -> None:
    inputs = leaves(2, layout=layout)
    mask = torch.ones(2, 1, 1, 21, dtype=torch.bool, device=DEVICE)
    mask[0, ..., 12:] = False
    clean = results(inputs, layout=layout, mask=mask, implementation=implementation)
    dirty = [x.detach().clone() for x in inputs]
    for x in dirty[1:]:
        (x if layout == "bhsd" else x.transpose(1, 2))[0, :, 12:] = float("nan")
    dirty = [x.requires_grad_() for x in dirty]
    found = results(dirty, layout=layout, mask=mask, implementation=implementation)
    torch.testing.assert_close(found, clean, rtol=0, atol=0)


# A mask of bands, and the keys (of 40) that it hides from all of 18 queries.
BANDS: dict[str, tuple[dict[str, Any], slice]] = {
    "causal": ({"causal": "top-left"}, slice(18, None)),
    "a window ahead": ({"window": (None, 3)}, slice(21, None)),
    "decoding in a window": ({"causal": "bottom-right", "window": (5, 0)}, slice(0, 17)),
    "a prefix": ({"causal": "top-left", "prefix_lengths": [22, 5]}, slice(22, None)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BANDS)
def test_what_keys_hold_that_a_band_hides_reaches_no_result(name: str, implementation: Any) -> None:
    options, hidden = dict(BANDS[name][0]), BANDS[name][1]
    if "prefix_lengths" in options:
        options["prefix_lengths"] = torch.tensor(options["prefix_lengths"], device=DEVICE)
    inputs = leaves(2, n_keys=40)
    bias = torch.randn(4, 18, 40, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 18:22] = False
    given = {"implementation": implementation, "mask": mask, "alibi_slopes": None, **options}
    given["alibi_slopes"] = torch.rand(4, device=DEVICE)
    clean = results(inputs, bias, **given)
    dirty = [x.detach().clone() for x in inputs]
    for x in dirty[1:]:
        x[:, :, hidden] = float("nan")
    found = results([x.requires_grad_() for x in dirty], bias, **given)
    torch.testing.assert_close(found, clean)
    assert not found[3][:, :, hidden].any()
    expected = results(inputs, bias, **given | {"implementation": "reference"})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_compiled_calls_leave_out_what_a_window_hides() -> None:
    def attend(*inputs: Tensor) -> Tensor:
        return flash_attention(*inputs, causal="bottom-right", window=(5, 0))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for n_keys in (40, 29, 19):
        inputs = [x.detach() for x in leaves(2, n_keys=n_keys)]
        for x in inputs[1:]:
            x[:, :, : max(0, n_keys - 18 - 5)] = float("nan")
        assert compiled(*inputs).isfinite().all()
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_a_bias_that_does_not_fit_all_keys_is_refused_though_a_window_hides_some() -> None:
    inputs = leaves(2, n_keys=40)
    with pytest.raises(ValueError, match=r"broadcasts to \(2, 4, 18, 40\)"):
        flash_attention(
            *inputs, bias=torch.zeros(18, 23), causal="bottom-right", window=(5, 0)
        )  # fmt: skip


def test_a_pair_bias_beside_a_key_mask_as_in_evoformer() -> None:
    inputs = leaves(2, 3)
    pair = torch.randn(2, 1, 4, 18, 21, device=DEVICE, requires_grad=True)
    mask = torch.rand(2, 3, 1, 1, 21, device=DEVICE) > 0.3
    ours = results(inputs, pair, mask=mask)
    numbers = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, float("-inf"))
    theirs = results(inputs, pair + numbers, implementation="reference")
    theirs[5] = theirs[5].sum_to_size(pair.shape)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_key_mask_and_a_bias_are_not_added_up() -> None:
    inputs = leaves(3)
    bias = torch.randn(1, 4, 18, 21, device=DEVICE, requires_grad=True)
    saved = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    mask = torch.rand(3, 1, 1, 21, device=DEVICE) > 0.4
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        flash_attention(*inputs, mask=mask, bias=bias)
    assert any(x.data_ptr() == bias.data_ptr() for x in saved)
    assert not [x for x in saved if x.shape == (3, 4, 18, 21)]


def test_tiles_of_keys_that_a_mask_hides_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = []
    scores = ScoreTiles.scores

    def counted(self: ScoreTiles, queries: Any, keys: Any) -> Any:
        visited.append(keys)
        return scores(self, queries, keys)

    monkeypatch.setattr(ScoreTiles, "scores", counted)
    query, key = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3 * tiled.KEY_TILE, 8)
    mask = torch.zeros(1, 1, 1, key.shape[2], dtype=torch.bool)
    mask[..., tiled.KEY_TILE + 1] = True
    query.requires_grad_()
    flash_attention(query, key, key, mask=mask, implementation="tiled").sum().backward()
    assert visited == [(tiled.KEY_TILE, 2 * tiled.KEY_TILE)] * 2  # forward and backward


def test_compiled_masks() -> None:
    inputs = leaves(3)
    mask = torch.rand(3, 1, 1, 21, device=DEVICE) > 0.4

    def loss(mask: Tensor) -> Any:
        return flash_attention(*inputs, mask=mask).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(mask), inputs), torch.autograd.grad(loss(mask), inputs)
    )
    torch.compiler.reset()


def test_mistaken_masks() -> None:
    inputs = leaves(3)
    for mask, message in (
        (torch.ones(3, 21, dtype=torch.bool), r"Pass mask\[:, None, None, :\] for one of"),
        (torch.zeros(18, 21), "mask must be a bool tensor .* and numbers as bias"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention(*inputs, mask=mask.to(DEVICE))
    ids = torch.zeros(3, 18, dtype=torch.int64, device=DEVICE)
    mask = torch.ones(18, 18, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="mask must be None where document_ids are given"):
        flash_attention(*leaves(3, n_keys=18), mask=mask, document_ids=ids)
    assert "tier" in explain(*inputs, mask=torch.ones(18, 21, dtype=torch.bool, device=DEVICE))
