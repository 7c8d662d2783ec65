"""Caches of fixed size whose lengths are tensors, on every tier, against slices of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import explain, flash_attention
from flashattn_triton.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache(*leading: int, n_queries: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query of 4 heads, key and value of 2, for 24 places; layout "bshd"."""
    shapes = ((n_queries, 4, 16), (24, 2, 16), (24, 2, 8))
    return [torch.randn(*leading, *s, dtype=dtype, device=DEVICE) for s in shapes]


@pytest.mark.parametrize("implementation", ["tiled", "triton", "reference"])
@pytest.mark.parametrize("keywords", [{"causal": "bottom-right"}, {"window": (4, 0)}], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rows_of_every_length(layout: Any, keywords: Any, implementation: Any) -> None:
    inputs = [x.requires_grad_() for x in cache(4)]
    sinks = torch.randn(4, device=DEVICE)
    lengths = torch.tensor([24, 0, 7, 30], device=DEVICE)  # full, empty, and more than there is
    given = [x if layout == "bshd" else x.transpose(1, 2) for x in inputs]
    out, lse = flash_attention(
        *given, key_lengths=lengths, layout=layout, sinks=sinks, return_lse=True,
        implementation=implementation, **keywords,
    )  # fmt: skip
    out = out if layout == "bshd" else out.transpose(1, 2)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
    rows = []
    for i, n in enumerate((24, 0, 7, 24)):
        query, key, value = (x[i : i + 1] for x in inputs)
        rows.append(
            flash_attention(
                query, key[:, :n], value[:, :n], layout="bshd", sinks=sinks, return_lse=True,
                implementation="reference", **keywords,
            )
        )  # fmt: skip
    expected, expected_lse = (torch.cat(parts) for parts in zip(*rows, strict=True))
    wanted = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), inputs)
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


def test_places_that_are_not_filled_are_never_read() -> None:
    query, key, value = cache(2, n_queries=1)
    lengths = torch.tensor([5, 9], device=DEVICE)
    clean = flash_attention(query, key, value, key_lengths=lengths, layout="bshd")
    for i, n in enumerate((5, 9)):
        key[i, n:] = value[i, n:] = float("nan")
    found = flash_attention(query, key, value, key_lengths=lengths, layout="bshd")
    torch.testing.assert_close(found, clean, rtol=0, atol=0)


def test_one_compiled_program_decodes_with_every_length() -> None:
    query, key, value = cache(2, n_queries=1)

    def step(lengths: Tensor) -> Any:
        return flash_attention(query, key, value, key_lengths=lengths, layout="bshd")

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for lengths in ([1, 2], [24, 3]):
        given = torch.tensor(lengths, device=DEVICE)
        with torch.compiler.set_stance("fail_on_recompile" if lengths[0] > 1 else "default"):
            torch.testing.assert_close(compiled(given), step(given))
    torch.compiler.reset()


def test_flash_attns_function_adds_to_the_cache() -> None:
    query, key, value = cache(2, n_queries=2)
    new_keys, new_values = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 8)
    new_keys, new_values = new_keys.to(DEVICE), new_values.to(DEVICE)
    before = key.clone()
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    out, lse = flash_attn_with_kvcache(
        query, key, value, new_keys, new_values, cache_seqlens=lengths, causal=True,
        return_softmax_lse=True, num_splits=4,
    )  # fmt: skip
    for i, n in enumerate((5, 9)):
        assert torch.equal(key[i, n : n + 2], new_keys[i])
        assert torch.equal(value[i, n : n + 2], new_values[i])
        assert torch.equal(key[i, :n], before[i, :n])
        keys, values = key[i : i + 1, : n + 2], value[i : i + 1, : n + 2]
        expected, row_lse, _ = flash_attn_func(
            query[i : i + 1], keys, values, causal=True, return_attn_probs=True
        )
        torch.testing.assert_close(out[i : i + 1], expected)
        torch.testing.assert_close(lse[i : i + 1], row_lse)
    whole = flash_attn_with_kvcache(query, key, value)
    torch.testing.assert_close(whole, flash_attn_func(query, key, value))
    for i, name in enumerate(("q", "k_cache", "v_cache", "k")):
        given: list[Any] = [query, key, value, new_keys, new_values]
        given[i] = [1]
        with pytest.raises(TypeError, match=rf"{name} must be a torch\.Tensor, but got list"):
            flash_attn_with_kvcache(*given)
    with pytest.raises(ValueError, match=r"q must be \(batch, sequence, heads, head_dim\)"):
        flash_attn_with_kvcache(query[0], key, value)
    with pytest.raises(ValueError, match="block_table must be None"):
        flash_attn_with_kvcache(query, key, value, block_table=lengths)
    for wrong, got in ((torch.zeros(3).int(), r"int32 .*\(3,\)"), (torch.ones(2), "float32")):
        with pytest.raises(ValueError, match=rf"cache_seqlens must be .* 2 rows, but got .*{got}"):
            flash_attn_with_kvcache(query, key, value, new_keys, new_keys, cache_seqlens=wrong)
    flash_attn_with_kvcache(query, key, value, cache_seqlens=torch.tensor([[2]]))
    with pytest.raises(ValueError, match="v must be a tensor where the other one is"):
        flash_attn_with_kvcache(query, key, value, new_keys)
    wrong = (new_values[:, :1], new_values[:1], new_values[:, :, :1], new_values.double())
    for each in wrong:  # none of them is broadcast or cast into the cache
        with pytest.raises(ValueError, match=r"v must be torch.float32 of shape \(2, 2, 2, 8\)"):
            flash_attn_with_kvcache(query, key, value, new_keys, each, cache_seqlens=lengths)
    if DEVICE == "cpu":  # on a GPU an assertion of the device, after which the process is lost
        for place in (-1, key.shape[1] - 1):
            with pytest.raises(RuntimeError, match="out of bounds"):
                flash_attn_with_kvcache(
                    query, key, value, new_keys, new_values, cache_seqlens=place
                )


def test_flash_attns_function_takes_arguments_in_flash_attns_order() -> None:
    """The order of flash-attn 2.8's ``flash_attn_with_kvcache``."""
    query, key, value = cache(2, n_queries=2)
    new, lengths = (torch.ones_like(key[:, :2]), torch.ones_like(value[:, :2])), 5
    nothing = (None, None, None)  # cache_batch_idx, cache_leftpad, block_table
    slopes = torch.rand(key.shape[2], device=DEVICE).repeat(query.shape[2] // key.shape[2])
    out, lse = flash_attn_with_kvcache(
        query, key, value, *new, None, None, lengths, *nothing, 0.3, True, (3, 0), 2.0, True,
        slopes, 0, True,
    )  # fmt: skip
    expected, expected_lse, _ = flash_attn_func(
        query, key[:, : lengths + 2], value[:, : lengths + 2], softmax_scale=0.3, causal=True,
        window_size=(3, 0), softcap=2.0, alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    cos, indices = torch.ones(4, 2), torch.zeros(2, dtype=torch.int32)
    for given, name in (
        ((cos,), "rotary_cos"),
        ((None, cos), "rotary_sin"),
        ((None, None, lengths, indices), "cache_batch_idx"),
        ((None, None, lengths, None, indices), "cache_leftpad"),
        ((None, None, lengths, None, None, indices), "block_table"),
        ((None, None, lengths, *nothing, 0.3, True, (3, 0), 2.0, False), "rotary_interleaved"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be "):
            flash_attn_with_kvcache(query, key, value, *new, *given)


@pytest.mark.parametrize("implementation", ["tiled", "reference"])
def test_each_row_may_have_slopes_of_its_own(implementation: Any) -> None:
    query, key, value = cache(2, 1)
    slopes, lengths = torch.rand(2, 1, 4, device=DEVICE), torch.tensor([[5], [9]], device=DEVICE)
    options: dict[str, Any] = {"causal": "bottom-right", "layout": "bshd"}
    out = flash_attention(
        query, key, value, alibi_slopes=slopes, key_lengths=lengths, implementation=implementation,
        **options,
    )  # fmt: skip
    for i, n in enumerate((5, 9)):
        keys, values = key[i, :, :n], value[i, :, :n]
        expected = flash_attention(query[i], keys, values, alibi_slopes=slopes[i], **options)
        torch.testing.assert_close(out[i], expected)


def test_vmap_over_lengths() -> None:
    query, key, value = cache(2)
    lengths = torch.tensor([[5, 9], [24, 1]], device=DEVICE)

    def attend(own: Tensor) -> Tensor:
        return flash_attention(query, key, value, key_lengths=own, layout="bshd")

    expected = torch.stack([attend(own) for own in lengths])
    torch.testing.assert_close(torch.vmap(attend)(lengths), expected)


def test_mistaken_lengths() -> None:
    query, key, value = cache(2)
    lengths = torch.tensor([5, 9], device=DEVICE)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key_lengths": lengths[:1]}, r"key_lengths must be int32 or int64 of shape \(2,\)"),
        ({"key_lengths": lengths.float()}, "key_lengths must be int32 or int64"),
        ({"key_lengths": lengths, "bias": torch.zeros(24)}, "bias must be None where key_lengths"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            flash_attention(query, key, value, layout="bshd", **given)
    halves = value.reshape(4, 12, *value.shape[2:])  # as many tokens in other rows
    for k, v in ((key, halves), (halves, halves), (key[:1], value[:1]), (key[:, :9], value)):
        with pytest.raises(ValueError, match=r"(key|value) must have rows and places \(2, "):
            flash_attention(query, k, v, layout="bshd", key_lengths=lengths)
    assert "tier" in explain(query, key, value, key_lengths=lengths, layout="bshd")
