"""shard-optim's README shows what the committed rows say, and its memory prediction holds."""

import pytest
from scripts.optimizer_results import FILES, README, ROWS, read, rendered

RUNS = [read(ROWS / name) for name in FILES if (ROWS / name).exists()]
MEMORY = [
    (run, name) for run in RUNS for name in run.memory if "sharded" in name or "reduce" in name
]


def test_the_readme_is_drawn_from_the_rows():
    assert README.read_text() == rendered(README.read_text(), RUNS), (
        "run scripts/optimizer_results.py"
    )


@pytest.mark.parametrize(
    ("run", "name"), MEMORY, ids=[f"{name}-{run.facts['world_size']}" for run, name in MEMORY]
)
def test_measured_memory_is_as_predicted(run, name):
    """Parameters, gradients and optimizer state, within 3 % of what the allocator counts."""
    row = run.memory[name]
    expected = row["predicted_bytes"]
    assert row["memory"]["after_step_2"]["optimizer_state"] == pytest.approx(
        expected["optimizer_state"], rel=0.001
    )
    before = row["memory"]["before_step_2"]
    kept = sum(expected[part] for part in ("parameters", "gradients", "optimizer_state"))
    assert before["allocated"] == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("moment", ["after_init", "before_step_2", "after_step_2"])
def test_a_rank_weighed_alone_holds_what_one_of_two_does(moment):
    """What stands in for machines with more GPUs than were there."""
    alone, real = read(ROWS / "h200_xl_bf16_rank_of_2.jsonl"), read(ROWS / "h200x2_xl_bf16.jsonl")
    assert len(alone.memory) == 5
    for name, row in alone.memory.items():
        found, expected = (x["memory"][moment]["allocated"] for x in (row, real.memory[name]))
        assert found == pytest.approx(expected, rel=0.005), name
