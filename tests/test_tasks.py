"""What five people come for works as the programs of examples/tasks show it."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.example_programs import EXAMPLES, Examples


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    programs = Examples()
    yield programs
    programs.close()


@pytest.mark.parametrize(
    ("program", "ranks", "says"),
    [
        ("swap_attention.py", None, "attention swapped: outputs and gradients agree"),
        ("swap_ddp.py", 2, "rank 1: DDP swapped, the weights agree"),
        ("shard_and_resume.py", 2, "rank 1: resumed at step 5, the weights are equal to the bit"),
    ],
)
def test_a_task(
    program: str, ranks: int | None, says: str, examples: Examples, tmp_path: Path
) -> None:
    code, output, errors = examples.run([str(tmp_path)], ranks, f"tasks/{program}")
    assert code == 0, errors
    assert says in output


@pytest.mark.parametrize(
    "program",
    [
        "tasks/swap_ddp.py",
        "tasks/shard_and_resume.py",
        "tasks/measure_and_gate.py",
        "finetune_any_module.py",
        "hierarchical_average.py",
        "power_sgd.py",
        "ring_attention.py",
    ],
)
def test_a_program_without_its_ranks_or_folder_says_how_to_start_it(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert f" examples/{program}" in str(ended.value.code)


@pytest.mark.nightly  # two runs, each of which measures the machine first
@pytest.mark.timeout(600)
def test_an_own_model_is_measured_and_a_slower_change_fails_the_build(tmp_path: Path) -> None:
    program = EXAMPLES / "tasks" / "measure_and_gate.py"
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured, and the gate closed" in done.stdout
