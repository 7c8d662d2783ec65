"""Predicted memory of activations against what autograd really keeps."""

import pytest
import torch
from activation_memory import activation_memory
from torch import Tensor

from basics_model import ModelConfig, TransformerLM, model_config


def kept_bytes(
    config: ModelConfig, dtype: torch.dtype, checkpoint_blocks: int, keep_attention: bool
) -> int:
    """Bytes that autograd keeps for the backward pass, parameters left out, each once."""
    model = TransformerLM(
        config, checkpoint_blocks=checkpoint_blocks, keep_attention=keep_attention, dtype=dtype
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no address comes twice
        return x

    token_ids = torch.randint(config.vocab_size, (2, config.context_length + 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(token_ids[:, :-1], token_ids[:, 1:])
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint_blocks", [0, 1, 3])
def test_predicts_what_is_kept_for_backward(dtype: torch.dtype, checkpoint_blocks: int) -> None:
    config = ModelConfig(
        vocab_size=300, context_length=128, d_model=64, d_ff=160, num_layers=12, num_heads=4
    )
    predicted = activation_memory(
        config,
        batch=2,
        seq=128,
        itemsize=dtype.itemsize,
        checkpoint_blocks=checkpoint_blocks,
        device="cpu",
    )
    found = kept_bytes(config, dtype, checkpoint_blocks, keep_attention=False)
    assert predicted.kept + predicted.ends == pytest.approx(found, rel=0.1)
    if checkpoint_blocks == 0:
        assert predicted.kept + predicted.ends == pytest.approx(found, rel=0.03)
        assert predicted.recomputed == 0


def test_keeping_attention_doubles_what_recomputed_blocks_keep() -> None:
    config = ModelConfig(
        vocab_size=300, context_length=128, d_model=64, d_ff=160, num_layers=12, num_heads=4
    )

    def predict(**how: int) -> float:
        return activation_memory(config, batch=1, seq=128, checkpoint_blocks=1, **how).kept

    assert predict(keep_attention=True) == 2 * predict()


def test_the_leaderboards_step_in_gib() -> None:
    """34 blocks, 32,768 tokens, d_model 4096: 0.25 GiB of residual stream each."""
    config = ModelConfig(
        vocab_size=151_936,
        context_length=32_768,
        d_model=4096,
        d_ff=11_008,
        num_layers=34,
        num_heads=32,
    )
    found = activation_memory(
        config, batch=1, seq=32_768, checkpoint_blocks=1, keep_attention=True, compiled=True
    )
    assert found.kept / 2**30 == pytest.approx(17.0)
    assert found.recomputed / 2**30 == pytest.approx((8 * 4096 + 3 * 11_008) * 2 / 2**15)
    assert found.logits / 2**30 == pytest.approx(2048 * 151_936 * 10 / 2**30)
    assert found.gradients / 2**30 == pytest.approx((3 * 11_008 + 2 * 4096) * 2 / 2**15)
    # In the first block of backward there is more than in a chunk of the loss.
    assert found.total == found.kept + found.ends + found.recomputed + found.gradients
    assert found.total < 34 * 2**30


@pytest.mark.parametrize(
    ("name", "least", "wrong"),
    [("batch", 1, 0), ("seq", 1, -3), ("itemsize", 1, 0), ("checkpoint_blocks", 0, -1)],
)
def test_impossible_counts_are_refused(name: str, least: int, wrong: int) -> None:
    counts = {"batch": 1, "seq": 128, name: wrong}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least {least}, but got"):
        activation_memory(model_config("small"), **counts)
