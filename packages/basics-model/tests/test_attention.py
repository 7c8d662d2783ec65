"""Attention callables and rotary embeddings against formulas written a second time in fp64."""

import math

import pytest
import torch
from torch import Tensor

from basics_model import sdpa_attention
from basics_model.attention import (
    Attention,
    apply_rotary,
    rotary_tables,
    softmax_attention,
)

# Largest absolute error against fp64, for unit-variance inputs: a few units in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float64: 1e-12}


def oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention row by row in fp64: row i sees keys 0 to i and nothing else exists."""
    query, key, value = query.double(), key.double(), value.double()
    rows = []
    for i in range(query.shape[-2]):
        scores = (query[..., i : i + 1, :] * key[..., : i + 1, :]).sum(-1)
        weights = torch.softmax(scores / math.sqrt(query.shape[-1]), dim=-1)
        rows.append((weights.unsqueeze(-1) * value[..., : i + 1, :]).sum(-2))
    return torch.stack(rows, dim=-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 7, 4), (1, 2, 33, 10)], ids=str)
@pytest.mark.parametrize("attention", [sdpa_attention, softmax_attention])
def test_attention_and_its_gradients_equal_the_oracle(
    attention: Attention, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape).to(dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, expected = attention(*inputs), oracle(*doubles)
    output.backward(upstream)
    expected.backward(upstream.double())
    assert output.dtype == dtype
    pairs = [
        (output.detach(), expected.detach()),
        *((x.grad, y.grad) for x, y in zip(inputs, doubles, strict=True)),
    ]
    for actual, reference in pairs:
        scale = max(1.0, float(reference.abs().max()))
        assert float((actual.double() - reference).abs().max()) <= TOLERANCE[dtype] * scale


def test_steps_are_ranges_of_a_profile() -> None:
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        softmax_attention(query, key, value)
    names = {event.key for event in profile.key_averages()}
    assert {"attention.scores", "attention.softmax", "attention.output"} <= names


@pytest.mark.parametrize("length", [1, 5, 300])
def test_rotary_turns_pairs_as_complex_numbers(length: int) -> None:
    x = torch.randn(2, 3, length, 6)
    cos, sin = rotary_tables(torch.arange(length), 6, 100.0)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (3, 2)))
    angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(0, 6, 2).double() / 6)
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    # fp32 rounds an angle of up to `length` by half a unit in its last place.
    bound = 2e-6 + 4 * length * 2**-24
    assert float((apply_rotary(x, cos, sin) - expected).abs().max()) <= bound


def test_rotary_scores_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(40), 8, 10_000.0)

    def score(i: int, j: int) -> Tensor:
        return apply_rotary(query, cos[i], sin[i]) @ apply_rotary(key, cos[j], sin[j])

    torch.testing.assert_close(score(3, 1), score(38, 36), atol=1e-5, rtol=0)
    assert not torch.isclose(score(3, 1), score(3, 2), atol=1e-3)


def test_rotary_keeps_dtype_and_position_zero() -> None:
    cos, sin = rotary_tables(torch.arange(4), 8, 10_000.0)
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16)
    turned = apply_rotary(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.equal(turned[:, 1], x[:, 1])
