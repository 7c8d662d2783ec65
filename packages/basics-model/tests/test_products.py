"""Joined products: equal to separate ones in values and gradients, and copied only if they must."""

import sys
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from basics_model import ModelConfig, TransformerLM
from basics_model.model import Linear
from basics_model.products import joined_products, separate_products, use_float8_products


def layers(*rows: int, neighbours: bool, dtype: torch.dtype = torch.float64) -> list[Linear]:
    """Layers of 3 inputs, whose weights share one buffer as those of a gathered unit do, or not."""
    made = [Linear(3, count, dtype=dtype) for count in rows]
    if neighbours:
        buffer = torch.cat([layer.weight.detach() for layer in made])
        for layer, part in zip(made, buffer.split(rows), strict=True):
            layer.weight.data = part
    return made


def test_joined_products_are_differentiable_twice() -> None:
    first, second = layers(2, 1, neighbours=True)

    def results(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(joined_products(x, [first, second]))

    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, first.weight, second.weight)
    for expected, actual in zip(separate_products(x, [first, second]), results(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert torch.autograd.gradcheck(results, inputs)
    assert torch.autograd.gradgradcheck(results, inputs)


@pytest.mark.parametrize("neighbours", [True, False])
def test_only_weights_apart_are_copied(neighbours: bool) -> None:
    first, second = layers(8, 8, neighbours=neighbours)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(torch, "cat", wraps=torch.cat) as copies:
        results = joined_products(x, [first, second])
        sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
    assert copies.call_count == (0 if neighbours else 2)  # in forward and in backward


def test_neighbours_of_another_tensor_are_not_read() -> None:
    """A gap, another order and an unrelated buffer must not be taken for one matrix."""
    whole = torch.randn(12, 3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    for parts in ((slice(0, 3), slice(4, 7)), (slice(3, 6), slice(0, 3)), (slice(0, 3),) * 2):
        made = layers(3, 3, neighbours=False)
        for layer, part in zip(made, parts, strict=True):
            layer.weight.data = whole[part]
        for layer, result in zip(made, joined_products(x, made), strict=True):
            torch.testing.assert_close(result, x @ layer.weight.t())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_trains_alike(config: ModelConfig, autocast: bool, compiled: bool) -> None:
    token_ids = torch.randint(config.vocab_size, (2, config.context_length))
    gradients = []
    for products in (separate_products, joined_products):
        torch.manual_seed(0)
        model = TransformerLM(config, products=products)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(token_ids, token_ids).backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    separate, joined = gradients
    assert list(separate) == list(joined)
    tolerance = {"atol": 2e-3, "rtol": 5e-2} if autocast else {"atol": 1e-6, "rtol": 1e-4}
    for name in separate:
        torch.testing.assert_close(joined[name], separate[name], msg=name, **tolerance)


def test_results_of_joined_products_lie_in_one_tensor() -> None:
    made = layers(3, 5, 2, neighbours=True)
    results = joined_products(torch.randn(2, 4, 3, dtype=torch.float64), made)
    assert [result.shape for result in results] == [(2, 4, 3), (2, 4, 5), (2, 4, 2)]
    for before, after in pairwise(results):
        assert after.data_ptr() == before.data_ptr() + before.shape[-1] * 8


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
    with pytest.raises(ValueError, match="must be separate_products"):
        use_float8_products(TransformerLM(wide, products=joined_products))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"Install basics-model\[float8\]"):
        use_float8_products(TransformerLM(wide))
