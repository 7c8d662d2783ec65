"""What every test of this package starts from."""

import pytest

from basics_model import ModelConfig


@pytest.fixture
def config() -> ModelConfig:
    """A model small enough for any test; its dimensions are all different."""
    return ModelConfig(
        vocab_size=31, context_length=12, d_model=16, d_ff=40, num_layers=2, num_heads=4
    )
