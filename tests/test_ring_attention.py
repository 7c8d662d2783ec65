"""examples/ring_attention.py on ranks: outputs and gradients are those of one process."""

from examples import ring_attention

import ranks


def compare(rank: int, world_size: int) -> dict[str, float]:
    return ring_attention.largest_differences(n=24 * world_size)


def test_two_ranks() -> None:
    for outcome in ranks.run_ranks(compare, 2):
        assert set(outcome.value) == {"out", "grad_query", "grad_key", "grad_value"}
        assert max(outcome.value.values()) < 1e-5, outcome


def test_the_verdict_names_what_differs() -> None:
    exact = dict.fromkeys(("out", "grad_query", "grad_key", "grad_value"), 1e-7)
    assert ring_attention.verdict(exact).startswith("ring attention agrees with attention on")
    wrong = ring_attention.verdict({**exact, "grad_key": 0.5})
    assert "DIFFERS" in wrong
    assert "5.0e-01 in grad_key" in wrong
