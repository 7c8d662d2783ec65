"""docs/mistakes.md says what users see: each row of its tables is run."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_triton
from flashattn_triton import Tiles, dispatch, flash_attention, inputs, triton_versions
from flashattn_triton.integrations.flash_attn import flash_attn_func
from flashattn_triton.integrations.transformers import attention_forward

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"
ROWS = re.findall(r"^\| `(.+)` \| (\w+): (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_given", set())


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's code refers to."""

    def auto_on_h200_with_another_triton() -> None:
        gpu = dispatch.GPU(name="NVIDIA H200", capability=(9, 0), shared_memory=232448)
        monkeypatch.setattr(dispatch, "describe_gpu", lambda index: gpu)
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.99.0"))
        triton_versions.refusal.cache_clear()
        options = flashattn_triton.Problem(scale=1.0)
        try:
            query = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
            fake = types.SimpleNamespace(
                shape=query.shape, device=torch.device("cuda", 0), dtype=query.dtype,
                numel=query.numel, is_cuda=False,
            )  # fmt: skip
            assert dispatch.choose(fake, fake, fake, options).tier == "triton"  # type: ignore[arg-type]
        finally:
            monkeypatch.undo()
            triton_versions.refusal.cache_clear()

    def transformers_layer(**settings: float) -> None:
        layer = torch.nn.Module()
        layer.config = types.SimpleNamespace(hidden_dropout=0.5, **settings)
        (dropout,) = settings.values()
        attention_forward(layer, *torch.randn(3, 1, 1, 4, 8), None, dropout=dropout)

    q, k, v = torch.randn(3, 2, 4, 8, 16)
    return vars(flashattn_triton) | {
        "torch": torch,
        "flash_attn_func": flash_attn_func,
        "q": q,
        "k": k,
        "v": v,
        "long": torch.randn(2, 4, 12, 16),
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32),
        "small": Tiles(64, 64, 4, 2),
        "auto_on_h200_with_another_triton": auto_on_h200_with_another_triton,
        "transformers_layer": transformers_layer,
    }


def test_keys_that_a_window_hides_are_positions() -> None:
    """They are left out before the kernels run, and what is left looks like heads."""
    query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 12, 16)
    flash_attention(query, key, key, window=(0, 0))  # warnings are errors


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE.read_text(), flags=re.MULTILINE)) > 25


@pytest.mark.parametrize(("code", "kind", "message"), ROWS, ids=[code for code, _, _ in ROWS])
def test_what_is_seen(code: str, kind: str, message: str, names: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, UserWarning)) as seen:
        eval(code, names)
    assert (type(seen.value).__name__, str(seen.value)) == (kind, message)


def once(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call that is made twice."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
        call()
    assert all(x.filename == __file__ for x in seen)  # where the user's call is
    return [str(x.message) for x in seen]


def test_each_warning_comes_once() -> None:
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 12, 16)
    more = torch.randn(1, 4, 16, 16)
    assert len(once(lambda: flash_attention(query, key, key, causal=True))) == 1
    assert not once(lambda: flash_attention(query, more, more, causal=True))
    turned = query.transpose(1, 2)
    assert len(once(lambda: flash_attention(turned, turned, turned))) == 1


def test_what_is_explicit_needs_no_warning() -> None:
    """Warnings are errors here."""
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 12, 16)
    for alignment in ("top-left", "bottom-right"):
        flash_attention(query, key, key, causal=alignment)  # type: ignore[call-overload]
    flash_attention(query, query, query, causal=True)
    turned = query.transpose(1, 2)
    flash_attention(turned, turned, turned, layout="bshd")
    flash_attention(turned, turned, turned, layout="bhsd")
    decoding, cache = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 12, 16)
    flash_attention(decoding, cache, cache)


def test_a_compiled_call_is_not_interrupted() -> None:
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 12, 16)
    compiled = torch.compile(flash_attention, backend="eager", fullgraph=True)
    out = compiled(query, key, key, causal=True)
    assert torch.equal(out, flash_attention(query, key, key, causal="top-left"))
