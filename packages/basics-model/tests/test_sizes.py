"""Configurations, named sizes and their accounting."""

import dataclasses
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from basics_model import SIZES, ModelConfig, TransformerLM, model_config
from basics_model.attention import softmax_attention
from basics_model.sizes import SizeName, model_flops


def test_sizes_are_the_assignments() -> None:
    table = {
        name: (size.d_model, size.d_ff, size.num_layers, size.num_heads)
        for name, size in SIZES.items()
    }
    assert table == {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
        "2026/xl": (2560, 10240, 32, 32),
        "2026/10B": (4608, 12288, 50, 36),
        "8B": (4096, 11008, 34, 32),
    }


def test_xl_has_1998235200_parameters_in_435_tensors() -> None:
    model = TransformerLM(model_config("xl"), device="meta")
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == 1_998_235_200
    assert len(parameters) == 435


def test_8b_has_8125698048_parameters_with_its_vocabulary() -> None:
    assert model_config("8B", vocab_size=151_936).num_parameters == 8_125_698_048


@pytest.mark.parametrize("name", SIZES)
def test_num_parameters_counts_the_model(name: str) -> None:
    config = model_config(name, vocab_size=257)
    model = TransformerLM(config, device="meta")
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_sizes_defaults_are_the_configurations() -> None:
    assert {size.vocab_size for size in SIZES.values()} == {10_000}
    assert {size.context_length for size in SIZES.values()} == {256}
    assert all(model_config(name) == size for name, size in SIZES.items())
    assert model_config("xl", d_model=None, num_layers=3).d_model == 1600


def test_overrides_replace_fields() -> None:
    config = model_config("small", context_length=77, num_layers=1, rope_theta=500.0)
    assert (config.d_model, config.num_layers, config.rope_theta) == (768, 1, 500.0)
    assert config.context_length == 77
    with pytest.raises(TypeError, match="depth"):
        model_config("small", depth=3)


def test_names_of_the_type_are_those_of_the_table() -> None:
    assert set(get_args(SizeName)) == set(SIZES)


def test_unknown_size_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"small, medium, large, xl, 2\.7B, .*8B, but got 'huge'"):
        model_config("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model must be an integer of at least 1, but got 0"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_heads": True}, "num_heads must be an integer"),
        ({"d_ff": 2.5}, "d_ff must be an integer of at least 1, but got 2.5"),
        ({"num_heads": 3}, "num_heads must divide d_model .* got d_model=16 and num_heads=3"),
        ({"num_heads": 16}, "even dimensions for rotary embeddings, but got d_model=16 and num"),
        ({"rope_theta": 0.0}, "rope_theta must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be above 0"),
    ],
)
def test_invalid_configurations_are_refused(
    config: ModelConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_config_is_frozen_and_keyword_only(config: ModelConfig) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig(31, 12, 16, 40, 2, 4)  # type: ignore[misc]


def test_flops_equal_those_counted_in_a_forward_pass(config: ModelConfig) -> None:
    model = TransformerLM(config, attention=softmax_attention)
    tokens = torch.zeros(3, 10, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).sum()
    assert counter.get_total_flops() == model_flops(config, batch=3, seq=10)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * model_flops(config, batch=3, seq=10)
