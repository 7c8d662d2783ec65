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
