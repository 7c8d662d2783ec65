"""examples/ring_attention.py on ranks: outputs and gradients are those of one process."""

from examples import ring_attention

import ranks


def compare(rank: int, world_size: int) -> dict[str, float]:
    return ring_attention.largest_differences(n=24 * world_size)


def test_two_ranks() -> None:
    for outcome in ranks.run_ranks(compare, 2):
        assert set(outcome.value) == {"out", "grad_query", "grad_key", "grad_value"}
        assert max(outcome.value.values()) < 1e-5, outcome
