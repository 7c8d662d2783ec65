"""Examples in shards: train_sharded.py, continued on other ranks, and leaderboard_step.py."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.example_programs import Examples

SCRIPT = "train_sharded.py"
SMALL = [
    *("--size", "small", "--num-layers", "3", "--d-model", "32", "--d-ff", "64"),
    *("--num-heads", "2", "--vocab-size", "256", "--context", "32", "--steps", "2"),
    "--no-compiled",
]


@pytest.fixture
def examples() -> Iterator[Examples]:
    started = Examples()
    yield started
    started.close()


def test_predicts_trains_and_continues(examples: Examples, tmp_path: Path) -> None:
    code, output, errors = examples.run(["--dry-run", "--ranks", "2"], script=SCRIPT)
    assert code == 0, errors
    # 8.1 billion parameters: 4, 4 and 8 bytes each, on two ranks.
    assert "8,125,698,048 parameters on 2 ranks" in output
    assert "parameters 15.14, gradients 15.14, optimizer state 30.27" in output

    offloading = ["--dry-run", "--ranks", "2", "--offload-state"]
    code, output, errors = examples.run(offloading, script=SCRIPT)
    assert code == 0, errors
    # The chunk is the shard of the embedding: two of 8 × 151,936 × 4096 / 2 bytes.
    assert "optimizer state 4.64," in output
    assert "in host memory 30.27" in output

    folder = tmp_path / "run"
    (folder / "notes").mkdir(parents=True)  # not a checkpoint
    (folder / "notes" / ".metadata").touch()
    command = [*SMALL, "--checkpoint-dir", str(folder)]
    losses = []
    for world_size, options in ((2, []), (1, ["--offload-state"])):
        code, output, errors = examples.run([*command, *options], world_size, SCRIPT)
        assert code == 0, errors
        losses += [(int(a), float(b)) for a, b in re.findall(r"step (\d+): loss ([\d.]+)", output)]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "notes"]
    assert losses[0][1] == pytest.approx(5.55, abs=0.3)  # ln 256, as an untrained model has

    short = tmp_path / "short.txt"
    short.write_text("far too short")
    wide, archive = tmp_path / "wide.npy", tmp_path / "tokens.npz"
    np.save(wide, np.arange(300))
    archive.write_bytes(b"PK")
    for text, message in (
        (short, "has 13"),
        (tmp_path / "missing.txt", "No such file"),
        (wide, "all below --vocab-size 256, but"),
        (archive, "must be a .npy file or"),
    ):
        code, _, errors = examples.run([*SMALL, "--data", str(text)], script=SCRIPT)
        assert code == 2, errors
        assert message in " ".join(errors.replace("│", " ").split())  # a box wraps it
    for options, message in (
        (["--size", "9B"], "must be one of"),
        (["--num-heads", "3"], "num_heads must divide"),
        (["--checkpoint-dir", str(short)], "File exists"),  # before the first step
    ):
        code, _, errors = examples.run([*SMALL, *options], script=SCRIPT)
        assert code == 2, errors
        assert message in " ".join(errors.replace("│", " ").split())


def test_the_leaderboards_step_trains_and_is_timed(examples: Examples) -> None:
    size = ["--d-model", "32", "--d-ff", "64", "--num-layers", "2", "--num-heads", "2"]
    short = [*size, "--vocab-size", "256", "--context", "32", "--warmup", "0", "--measured", "0.01"]
    code, output, errors = examples.run(short, 2, "leaderboard_step.py")
    assert code == 0, errors
    assert re.search(r"parameters, 2 × 32 tokens: \d\.\d{3} s a step", output), output
    losses = re.search(r"loss ([\d.]+) in the first step, ([\d.]+) in the last", output)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    code, _, errors = examples.run(short, script="leaderboard_step.py")
    assert code == 2
    assert "torchrun" in errors
    code, _, errors = examples.run([*short, "--row", "/no/such/f"], 2, "leaderboard_step.py")
    assert code == 2, errors
    assert "No such file" in errors
