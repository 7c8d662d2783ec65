import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import basics_model
from basics_model.attention import softmax_attention
from basics_model.sizes import model_flops
from bench_harness.roofline import (
    attention_flops,
    bus_bandwidth_factor,
    forward_flops,
    matmul_ceiling,
    training_flops,
)

CONFIG = basics_model.ModelConfig(
    vocab_size=96, context_length=24, d_model=32, d_ff=80, num_layers=3, num_heads=4
)


def test_forward_and_training_match_what_torch_counts():
    model = basics_model.TransformerLM(CONFIG, attention=softmax_attention)
    tokens = torch.randint(96, (2, 24))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    forward = counter.get_total_flops()
    assert sum(forward_flops(CONFIG, 2, 24).values()) == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert training_flops(CONFIG, 2, 24) == forward + counter.get_total_flops()


def test_parts_add_up_to_the_model_packages_own_count():
    assert sum(forward_flops(CONFIG, 3, 17).values()) == model_flops(CONFIG, 3, 17)


def test_causal_counts_the_triangle():
    full, half = forward_flops(CONFIG, 1, 8), forward_flops(CONFIG, 1, 8, causal=True)
    assert half["attention scores"] * 64 == full["attention scores"] * 36
    assert half["feed-forward"] == full["feed-forward"]


def test_leaderboard_case():
    shape = (1, 16, 16384, 64)
    forward = attention_flops(*shape, causal=True)
    backward = attention_flops(*shape, causal=True, backward=True)
    assert forward == 2 * 16 * 16384**2 * 64
    assert backward == 2.5 * forward
    assert (forward + backward) / 1e12 == pytest.approx(1.924, rel=1e-3)


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (3, None)), (False, (2, 4)), (False, (0, 0))]
)
def test_attention_counts_what_a_window_shows(causal, window):
    from flashattn_triton.problem import new_problem
    from flashattn_triton.reference import visibility_mask

    options = new_problem(head_dim=8, causal=causal, window=window)
    visible = int(visibility_mask(13, 13, options).sum())
    shape = {"causal": causal, "window": window, "value_head_dim": 12}
    assert attention_flops(2, 3, 13, 8, **shape) == 2 * 2 * 3 * visible * (8 + 12)
    backward = attention_flops(2, 3, 13, 8, backward=True, **shape)
    assert backward == 2 * 2 * 3 * visible * (3 * 8 + 2 * 12)


def test_bus_bandwidth_factors():
    assert bus_bandwidth_factor("all_reduce", 2) == 1.0
    assert bus_bandwidth_factor("all_reduce", 4) == 1.5
    assert bus_bandwidth_factor("all_gather", 4) == 0.75
    assert bus_bandwidth_factor("broadcast", 8) == 1.0
    with pytest.raises(ValueError, match="operation must be one of all_reduce"):
        bus_bandwidth_factor("gossip", 2)


def test_matmul_ceiling_is_a_positive_rate():
    assert matmul_ceiling(torch.device("cpu"), torch.float32, size=32) > 0
