"""The fast preset of examples/train_lm.py on CPUs: what it shares, predicts, and leaves behind."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from basics_model import checkpoint_path, list_checkpoints, load_checkpoint
from tests.example_programs import Examples

SMALL = [
    *("--preset", "fast", "--device", "cpu", "--d-model", "32", "--d-ff", "64"),
    *("--num-layers", "2", "--num-heads", "2", "--context", "32", "--batch-size", "4"),
    *("--steps", "8", "--learning-rate", "0.01", "--log-every", "2", "--sample-length", "4"),
    *("--checkpoint-every", "4", "--validate-every", "4", "--validation-batches", "3"),
]


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    started = Examples()
    yield started
    started.close()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    return path


def losses(output: str) -> dict[int, float]:
    return {int(a): float(b) for a, b in re.findall(r"^step (\d+)/8: loss (\S+)", output, re.M)}


@pytest.mark.slow
@pytest.mark.nightly
def test_two_ranks_continue_exactly_and_with_every_other_division(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """A checkpoint of sharded parameters is continued by itself bit for bit, and by the others."""
    whole = tmp_path / "whole"
    common = [*SMALL, "--data", str(text)]
    code, output, errors = examples.run([*common, "--checkpoint-dir", str(whole)], 2)
    assert code == 0, errors
    assert "ZeRO stage 3 on 2 ranks" in output
    assert re.search(r"^predicted memory: [\d.]+ MiB per rank", output, re.M)
    assert output.count("validation loss") == 2
    assert output.count("sample: The ") == 1
    end = load_checkpoint(checkpoint_path(whole, 8))
    changes: dict[str, list[str]] = {
        "itself": [],
        "stage 2": ["--wrapper", "stage-2", "--recompute", "block-keep-attention"],
        "stage 3": ["--wrapper", "stage-3", "--recompute", "every-2"],
        "replicas": ["--preset", "plain", "--wrapper", "bucketed", "--fused"],
    }
    for name, change in changes.items():
        folder = tmp_path / name
        folder.mkdir()
        half = checkpoint_path(folder, 4)
        half.write_bytes(checkpoint_path(whole, 4).read_bytes())
        command = [*common, "--checkpoint-dir", str(folder), *change]
        code, again, errors = examples.run(command, 2)
        assert code == 0, errors
        assert "continuing from step 4" in again
        assert losses(again)[8] == pytest.approx(losses(output)[8], abs=0.002), name
        found = load_checkpoint(checkpoint_path(folder, 8))
        assert found.extra == end.extra, name
        for key, value in end.model.items():
            # Sums in another order, which Adam amplifies where gradients are tiny.
            apart = float((found.model[key] - value).abs().max())
            assert apart <= (0.0 if name == "itself" else 0.01), (name, key)


@pytest.mark.parametrize(
    ("gib", "remedy"),
    [
        (20.0, "Use --recompute block-keep-attention, which needs 18.06 GiB."),
        (17.0, "Use --recompute block, which needs 16.66 GiB."),
        (1.0, "Use a smaller model, a shorter --context or more ranks."),
    ],
)
def test_what_does_not_fit_is_said_from_the_prediction(
    examples: Examples, text: Path, gib: float, remedy: str
) -> None:
    """With the nearest options that fit; no model is made."""
    options = ["--preset", "fast", "--size", "large", "--device", "cpu", "--data", str(text)]
    options += ["--context", "1024", "--batch-size", "8", "--memory-gib", str(gib)]
    code, output, errors = examples.run(options)
    assert (code, output) == (2, ""), errors
    assert len(errors.splitlines()) == 1
    assert "the memory of a rank must be what a step is predicted to need" in errors
    assert f"but got {gib:.2f} GiB. {remedy}" in errors


def test_a_full_disk_during_a_checkpoint_loses_nothing(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """The checkpoint in the background fails; the run says so, and earlier ones are whole."""
    folder = tmp_path / "run"
    command = [*SMALL, "--data", str(text), "--checkpoint-dir", str(folder)]
    code, _, errors = examples.run(command)
    assert code == 0, errors
    before, last = list_checkpoints(folder)
    last.unlink()
    content = before.read_bytes()
    pids = examples.start([*command, "--keep", "1"])
    try:
        for pid in pids:  # as if the disk were full: a checkpoint has more than 400,000 bytes
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    finally:
        code, _, errors = examples.finish()
    assert code == 2, errors
    assert errors == f"train_lm.py: [Errno 27] File too large: '{last}'\n"
    assert list_checkpoints(folder) == [before]
    assert before.read_bytes() == content
