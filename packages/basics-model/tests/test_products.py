"""Products in float8: close to those in bf16, with the same names."""

import sys
from unittest import mock

import pytest
import torch

from basics_model import ModelConfig, TransformerLM
from basics_model.products import use_float8_products


@pytest.fixture
def wide() -> ModelConfig:
    return ModelConfig(
        vocab_size=40, context_length=16, d_model=32, d_ff=64, num_layers=2, num_heads=2
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_are_close_and_keep_the_names(wide: ModelConfig, recipe: str) -> None:
    pytest.importorskip("torchao")
    model, exact = TransformerLM(wide), TransformerLM(wide)
    exact.load_state_dict(model.state_dict())
    use_float8_products(model, recipe, emulate=True)
    assert model.state_dict().keys() == exact.state_dict().keys()
    token_ids = torch.randint(wide.vocab_size, (2, 16))
    losses = []
    for each in (model, exact):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(token_ids, token_ids)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for found, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        error = (found.grad - wanted.grad).norm() / wanted.grad.norm()
        assert 0 < error < 0.3  # e5m2 gradients have two bits of fraction


def test_float8_products_refuse_what_they_cannot_do(
    wide: ModelConfig, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", mock.MagicMock())
    with pytest.raises(ValueError, match="must be multiples of 16"):
        use_float8_products(TransformerLM(config))
    with pytest.raises(ValueError, match="must be on its device"):
        use_float8_products(TransformerLM(wide, device="meta"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"Install basics-model\[float8\]"):
        use_float8_products(TransformerLM(wide))
