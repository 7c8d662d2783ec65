"""examples/train_lm.py as its users start it: alone, by torchrun, killed, resumed, misused."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from train_checkpoints import checkpoint_path, list_checkpoints, prune_checkpoints
from train_settings import Settings, application
from typer.testing import CliRunner

import ranks
from basics_model import Checkpoint, load_checkpoint, load_safetensors, save_checkpoint
from tests.example_programs import EXAMPLES, Examples

SCRIPT = EXAMPLES / "train_lm.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL: dict[str, object] = {
    "--device": "cpu",
    "--d-model": 32,
    "--d-ff": 64,
    "--num-layers": 2,
    "--num-heads": 2,
    "--context": 32,
    "--batch-size": 4,
    "--steps": 40,
    "--warmup-fraction": 0.1,
    "--learning-rate": 0.01,
    "--log-every": 5,
    "--checkpoint-every": 5,
    "--validate-every": 20,
    "--sample-length": 20,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    return path


def arguments(*flags: str, **changes: object) -> list[str]:
    options = SMALL | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [*flags, *(str(part) for option in options.items() for part in option)]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(started: subprocess.Popen[str]) -> str:
    with started as process:
        try:
            output, errors = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    server = Examples()
    yield server
    server.close()


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 100
    while not list_checkpoints(folder):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint after 100 s"
        time.sleep(0.002)


def losses(output: str) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step (\d+)/40: loss (\S+)  [\d,]+ tokens/s  ", output, re.M)
    }


def assert_refused(outcome: tuple[int, str, str], *messages: str) -> None:
    code, output, errors = outcome
    assert code == 2, errors
    assert output == ""
    assert len(errors.splitlines()) == 1, errors
    for message in messages:
        assert message in errors


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_run_continues_to_the_same_weights(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """Two ranks, killed by SIGKILL: under torchrun they end with bitwise the same state."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = arguments(data=text, checkpoint_dir=broken)
    code, reference, errors = examples.run(arguments(data=text, checkpoint_dir=whole), 2)
    assert code == 0, errors
    killed = examples.start(command, 2)
    wait_for_checkpoint(broken)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    code, *_ = examples.finish()
    assert code == -signal.SIGKILL
    reached = load_checkpoint(list_checkpoints(broken)[-1]).step
    assert 0 < reached < 40
    resumed = finish(start([*TORCHRUN, str(SCRIPT), *command]))

    assert sorted(losses(reference)) == [1, *range(5, 41, 5)]
    assert losses(reference)[1] > 5.0
    assert losses(reference)[40] < 1.0
    assert f"continuing from step {reached}" in resumed
    assert losses(resumed) == {s: loss for s, loss in losses(reference).items() if s > reached}
    for output in (reference, resumed):
        assert re.search(r"^step 40: validation loss \d\.\d+$", output, re.M)
        assert re.search(r"^sample: The ", output, re.M)
        assert "\x1b" not in output  # plain lines where there is no terminal
    kept = [path.name for path in list_checkpoints(broken)]
    assert kept == ["step-000000035.pt", "step-000000040.pt"]
    one, two = (load_checkpoint(list_checkpoints(folder)[-1]) for folder in (whole, broken))
    assert one.extra == two.extra
    for name, value in one.model.items():
        assert value.equal(two.model[name]), name
    for number, state in one.optimizer["state"].items():
        for name, value in state.items():
            assert value.equal(two.optimizer["state"][number][name]), (number, name)


#: Ctrl-C reaches the program also where the tests run with interrupts ignored, as in background.
INTERRUPTIBLE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[0], sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_ctrl_c_ends_in_one_line_and_the_same_command_continues_exactly(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = arguments(data=text, checkpoint_dir=broken, steps=200)
    with start(["-c", INTERRUPTIBLE, str(EXAMPLES), str(SCRIPT), *command]) as process:
        try:
            wait_for_checkpoint(broken, process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.splitlines() == [
        "train_lm.py: interrupted; with --checkpoint-dir the same command continues"
    ]
    left = list_checkpoints(broken)
    assert {path.name for path in broken.glob("step-*")} == {path.name for path in left}
    reached = [load_checkpoint(path).step for path in left][-1]  # each of them is whole
    assert 0 < reached < 200

    code, resumed, errors = examples.run(command)
    assert code == 0, errors
    assert f"continuing from step {reached}" in resumed
    code, _, errors = examples.run(arguments(data=text, checkpoint_dir=whole, steps=200))
    assert code == 0, errors
    one, two = (load_checkpoint(list_checkpoints(folder)[-1]) for folder in (whole, broken))
    assert one.extra == two.extra
    assert all(value.equal(two.model[name]) for name, value in one.model.items())


@pytest.mark.slow
@pytest.mark.nightly
def test_ctrl_c_under_torchrun_ends_in_one_line_and_the_same_command_continues(
    text: Path, tmp_path: Path
) -> None:
    """The launcher hands SIGINT on to both ranks, adds lines of its own, and ends with 1."""
    folder = tmp_path / "run"
    command = [*TORCHRUN, str(SCRIPT), *arguments(data=text, checkpoint_dir=folder, steps=400)]
    with start(command) as process:
        try:
            wait_for_checkpoint(folder, process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 1, errors
    own = [line for line in errors.splitlines() if line.startswith("train_lm.py")]
    assert own == ["train_lm.py: interrupted; with --checkpoint-dir the same command continues"]
    left = list_checkpoints(folder)
    reached = load_checkpoint(left[-1]).step
    assert 0 < reached < 400
    resumed = finish(start(command))
    assert f"continuing from step {reached}" in resumed
    assert load_checkpoint(list_checkpoints(folder)[-1]).step == 400


def test_a_folder_into_which_another_run_writes_is_refused(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """Until that run has ended, also if it is killed."""
    folder = tmp_path / "run"
    (first,) = examples.start(arguments(data=text, checkpoint_dir=folder, steps=100_000))
    wait_for_checkpoint(folder)
    os.kill(first, signal.SIGSTOP)  # it keeps the folder, and leaves the processor to the second
    command = arguments(data=text, checkpoint_dir=folder, steps=2)
    with start([str(SCRIPT), *command]) as second:
        output, errors = second.communicate(timeout=100)
    refused = f"--checkpoint-dir must be used by one run at a time, but got {folder}, into which"
    assert_refused((second.returncode, output, errors), refused)
    os.kill(first, signal.SIGKILL)
    examples.finish()
    assert_refused(examples.run(command), "must hold checkpoints of this run")


def test_a_text_that_becomes_shorter_ends_in_one_line(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    examples.start(arguments(data=text, checkpoint_dir=folder, steps=100_000))
    wait_for_checkpoint(folder)
    size = text.stat().st_size
    os.truncate(text, 10)
    code, _, errors = examples.finish()
    assert code == 2, errors
    assert errors == f"train_lm.py: a mapped file of tokens must keep {size} bytes, but got 10.\n"


@pytest.mark.parametrize("wrapper", ["bucketed", "stage-3-kept"])
def test_a_rank_that_is_killed_is_named_in_one_line(
    examples: Examples, text: Path, tmp_path: Path, wrapper: str
) -> None:
    """The rank that is left ends, and checkpoints are whole."""
    folder = tmp_path / "run"
    options = {"checkpoint_dir": folder, "wrapper": wrapper, "steps": 4000, "log_every": 1}
    _, second = examples.start(arguments(data=text, **options), 2)
    wait_for_checkpoint(folder)
    os.kill(second, signal.SIGKILL)
    _, _, errors = examples.finish()
    assert errors.startswith("train_lm.py: every rank ")
    assert "rank 0" in errors
    assert errors.endswith("with --checkpoint-dir the same command continues\n")
    assert len(errors.splitlines()) == 1, errors
    for path in list_checkpoints(folder):
        load_checkpoint(path)


def test_sequences_over_ranks_are_learned_as_on_one(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """A mesh of two by two ranks, in shards, continues a run of two ranks to the same weights."""
    folders = [tmp_path / name for name in ("two", "four")]
    common: dict[str, object] = {"data": text, "keep": 9, "recompute": "block-keep-attention"}
    common |= {"steps": 10, "validate_every": 10}
    whole = examples.run(arguments(**common, checkpoint_dir=folders[0], wrapper="stage-3"), 2)
    assert whole[0] == 0, whole[2]
    folders[1].mkdir()
    shutil.copy(folders[0] / "step-000000005.pt", folders[1])
    options = {"wrapper": "stage-3", "context_parallel": 2}
    spread = examples.run(arguments(**common, **options, checkpoint_dir=folders[1]), 4)
    assert spread[0] == 0, spread[2]
    assert "continuing from step 5" in spread[1]
    found = [
        re.findall(r"step 10: validation loss ([\d.]+)", output) for _, output, _ in (whole, spread)
    ]
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), abs=2e-3)
    one, two = (load_checkpoint(list_checkpoints(folder)[-1]) for folder in folders)
    assert one.step == two.step == 10
    for name, value in one.model.items():
        np.testing.assert_allclose(value, two.model[name], rtol=0, atol=1e-3, err_msg=name)


def test_run_continues_under_other_wrappers_but_not_with_other_settings(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """How weights are computed may change on the way; what they are may not."""
    whole, same, close, fused = (tmp_path / name for name in ("whole", "same", "close", "fused"))
    code, reference, errors = examples.run(arguments(data=text, checkpoint_dir=whole, keep=9))
    assert code == 0, errors
    for folder in (same, close, fused):
        folder.mkdir()
        shutil.copy(whole / "step-000000020.pt", folder)

    others: dict[str, object] = {"batch_size": 2, "accumulate": 2, "attention": "softmax"}
    unsharded, rounded, faster, changed, fresh = (
        examples.run(command)
        for command in (
            arguments("--no-sharded", data=text, checkpoint_dir=same, wrapper="naive"),
            arguments(data=text, checkpoint_dir=close, wrapper="flat", **others),
            arguments("--fused", data=text, checkpoint_dir=fused, wrapper="stage-3"),
            arguments(data=text, checkpoint_dir=same, learning_rate=0.02, seed=3),
            arguments("--no-resume", data=text, checkpoint_dir=same),
        )
    )
    for code, output, errors in (unsharded, rounded, faster):
        assert code == 0, errors
        assert "continuing from step 20" in output
    one, two = (load_checkpoint(list_checkpoints(folder)[-1]) for folder in (whole, same))
    assert one.step == two.step == 40
    for name, value in one.model.items():
        assert value.equal(two.model[name]), name
    last = load_checkpoint(list_checkpoints(fused)[-1])
    assert last.optimizer["param_groups"][0]["fused"] is True  # not as it was saved
    # Sums in another order, which Adam amplifies where gradients are tiny.
    assert losses(rounded[1])[40] == pytest.approx(losses(reference)[40], abs=0.02)
    assert_refused(changed, "of another one (seed 0 -> 3, learning_rate 0.01 -> 0.02)")
    assert_refused(
        fresh, "--checkpoint-dir must hold no checkpoints beside --no-resume", "step-000000040.pt"
    )


def test_an_update_sees_the_same_data_however_its_sequences_are_divided(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """Over backward passes and over ranks; sums are in another order."""
    found = []
    for world_size, batch_size, accumulate in ((1, 4, 1), (1, 1, 4), (2, 1, 2)):
        path = tmp_path / f"{world_size}-{batch_size}.jsonl"
        options = {"batch_size": batch_size, "accumulate": accumulate, "metrics": path}
        options |= {"steps": 6, "log_every": 1}
        code, _, errors = examples.run(arguments(data=text, **options), world_size)
        assert code == 0, errors
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([record["loss"] for record in records if "loss" in record])
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_a_text_that_differs_anywhere_is_another_run(examples: Examples, tmp_path: Path) -> None:
    text, folder = tmp_path / "long.txt", tmp_path / "run"
    content = b"It is a truth. " * 100_000
    text.write_bytes(content)
    command = arguments(data=text, steps=1, checkpoint_dir=folder, validation_batches=1)
    code, _, errors = examples.run(command)
    assert code == 0, errors
    text.write_bytes(content[:1_300_000] + b"!" + content[1_300_001:])
    assert_refused(examples.run(command), "of another one (text_sha256 ")


def agree(rank: int, _: int, changes: dict[str, Any], text: str) -> str:
    from train_lm import InputError, check_agreement

    settings = Settings(data=Path(f"of-machine-{rank}"), **(changes if rank else {}))
    inputs: Any = SimpleNamespace(identity={"text_sha256": text if rank else "abc"})
    try:
        check_agreement(settings, inputs)
    except InputError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("changes", "text", "difference"),
    [
        ({}, "abc", None),
        ({"seed": 3, "accumulate": 2}, "abc", "(seed 0 -> 3, accumulate 1 -> 2)"),
        ({"checkpoint_dir": Path("a")}, "abc", "(checkpoint_dir None -> True)"),
        ({}, "def", "(text_sha256 abc -> def)"),
    ],
)
def test_ranks_that_were_started_with_other_settings_end(
    changes: dict[str, Any], text: str, difference: str | None
) -> None:
    """As when each machine's command is typed by hand."""
    for outcome in ranks.run_ranks(agree, 2, changes, text):
        if difference is None:
            assert outcome.value == "agreed"
        else:
            assert f"rank 1 others than on rank 0 {difference}" in outcome.value


def test_a_logger_with_the_methods_of_weights_and_biases(examples: Examples, text: Path) -> None:
    """On two ranks, rank 0 alone makes one."""
    refused = examples.run(arguments(data=text, logger="shutil:copy"), 2)
    assert_refused(refused, "--logger must name a function that needs no arguments, but shutil:co")
    options = {"data": text, "steps": 10, "logger": "recording_logger:init"}
    code, output, errors = examples.run(arguments(**options), 2)
    assert code == 0, errors
    logged = re.findall(r"^logged (\d+) (\S+)$", output, flags=re.MULTILINE)
    assert [int(step) for step, _ in logged] == [1, 5, 10, 10]
    assert {"loss", "learning_rate"} <= set(logged[0][1].split(","))
    assert logged[-1][1] == "validation_loss"
    assert output.count("finished\n") == 1
    refused = examples.run(arguments(**(options | {"logger": "platform:node"})))
    assert_refused(refused, "but platform:node returned a str")


@pytest.fixture(scope="module")
def continued(examples: Examples, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two ranks that write metrics and curves while they recompute blocks; then, without the newest
    checkpoints and with half a line at the end of the metrics, the same command once more."""
    folder = tmp_path_factory.mktemp("continued")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    run, metrics, board = folder / "run", folder / "logs" / "metrics.jsonl", folder / "board"
    options: dict[str, object] = {"data": text, "checkpoint_dir": run, "metrics": metrics}
    options |= {"tensorboard": board, "recompute": "block", "steps": 20, "validate_every": 10}
    found = SimpleNamespace(outputs=[], metrics=[], boards=[])
    for further in ({"keep": 9, "peak_tflops": 0.001}, {}):
        code, output, errors = examples.run(arguments(**options, **further), 2)
        assert code == 0, errors
        found.outputs.append(output)
        found.metrics.append([json.loads(line) for line in metrics.read_text().splitlines()])
        found.boards.append(shutil.copytree(board, folder / f"board-{len(found.boards)}"))
        if further:
            for name in ("step-000000015.pt", "step-000000020.pt"):
                (run / name).unlink()
            metrics.write_text(metrics.read_text() + '{"step": 21, "lo')
    return found


def test_metrics_are_written_and_continued(continued: SimpleNamespace) -> None:
    """One line per report; a continued run drops newer lines."""
    line = r"^predicted cost: recomputation adds \d+% to the operations of a step$"
    assert re.search(line, continued.outputs[0], re.M)
    whole, again = continued.metrics
    reports = [record for record in whole if "loss" in record]
    assert [record["step"] for record in reports] == [1, *range(5, 21, 5)]
    assert [record["step"] for record in whole if "validation_loss" in record] == [10, 20]
    for record in reports:
        # The vocabulary is 256 and d_model 32: at least their product's operations a token.
        assert record["tflops_per_rank"] * 2e12 > record["tokens_per_second"] * 6 * 256 * 32
        assert record["mfu"] == pytest.approx(record["tflops_per_rank"] / 0.001)
        assert record["gradient_norm"] > 0
    assert "continuing from step 10" in continued.outputs[1]
    assert [record["step"] for record in again] == [record["step"] for record in whole]
    for record, first in zip(again, whole, strict=True):
        assert record.get("loss") == first.get("loss")
        assert record.get("validation_loss") == first.get("validation_loss")


def test_tensorboard_reads_back_what_was_written(continued: SimpleNamespace) -> None:
    """The curves are those of the JSON lines; a continued run hides points after its start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(continued.boards[0].iterdir())) == 1  # rank 0 alone writes
    for board, records in zip(continued.boards, continued.metrics, strict=True):
        events = EventAccumulator(str(board))
        events.Reload()
        names = {"loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second"}
        assert names <= set(events.Tags()["scalars"])
        for name in sorted(names):
            points = [(point.step, point.value) for point in events.Scalars(name)]
            expected = [(record["step"], record[name]) for record in records if name in record]
            assert [step for step, _ in points] == [step for step, _ in expected], name
            assert [value for _, value in points] == pytest.approx([v for _, v in expected]), name


def test_tensorboard_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    metrics = importlib.import_module("train_metrics")
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="the package tensorboard must be installed for"):
        metrics.check_tensorboard()


def test_a_new_run_keeps_earlier_metrics_and_touches_no_other_file(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    path, notes = tmp_path / "metrics.jsonl", tmp_path / "notes.txt"
    earlier = '{"step": 1, "loss": 5.0}\n{"step": 30, "loss": 2.0}\n'
    path.write_text(earlier + '{"st')
    code, _, errors = examples.run(arguments(data=text, metrics=path, steps=2))
    assert code == 0, errors
    assert path.with_name("metrics.jsonl.old").read_text() == earlier + '{"st'
    assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {1, 2}
    for number in (2, 3):
        before = path.read_text()
        code, _, errors = examples.run(arguments(data=text, metrics=path, steps=2))
        assert code == 0, errors
        assert path.with_name(f"metrics.jsonl.old.{number}").read_text() == before
    assert path.with_name("metrics.jsonl.old").read_text() == earlier + '{"st'
    for content in (b"precious", b"precious\n", b'{"step": "x"}\n', b"\xff\xfe", b"[1]\n"):
        notes.write_bytes(content)
        refused = f"or one with metrics of a run, but got {notes}, whose line 1 is no JSON object"
        assert_refused(examples.run(arguments(data=text, metrics=notes)), refused)
        assert notes.read_bytes() == content


@pytest.mark.parametrize("wrapper", ["bucketed", "stage-3"])
def test_the_sample_text_is_learned_and_weights_are_exported(
    examples: Examples, tmp_path: Path, wrapper: str
) -> None:
    """Two ranks without --data; the file of weights holds what the last checkpoint holds."""
    folder, path = tmp_path / "run", tmp_path / "model.safetensors"
    options = {"steps": 2, "wrapper": wrapper, "checkpoint_dir": folder, "export": path}
    code, output, errors = examples.run(arguments(**options), 2)
    assert code == 0, errors
    assert "112,882 training tokens" in output
    exported = load_safetensors(path)
    [checkpoint] = list_checkpoints(folder)
    weights = load_checkpoint(checkpoint).model
    assert exported.config.context_length == 32
    assert exported.state_dict().keys() == weights.keys()
    assert all(weights[name].equal(value) for name, value in exported.state_dict().items())


def test_a_file_of_weights_that_cannot_be_written_is_refused(
    examples: Examples, tmp_path: Path
) -> None:
    missing = tmp_path / "nowhere" / "model.safetensors"
    refused = examples.run(arguments(steps=2, export=missing))
    assert_refused(refused, "No such file or directory", "nowhere")
    refused = examples.run(arguments(steps=2, export=tmp_path))
    assert_refused(refused, "--export must name a file, but got the folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is full")
def test_metrics_that_cannot_be_written_end_all_ranks(examples: Examples, text: Path) -> None:
    code, output, errors = examples.run(arguments(data=text, metrics="/dev/full"), 2)
    assert code == 2, errors
    assert errors == "train_lm.py: [Errno 28] No space left on device: '/dev/full'\n"
    assert "step 1/40" in output


def test_bad_input_is_one_line(examples: Examples, text: Path, tmp_path: Path) -> None:
    short, missing = tmp_path / "short.txt", tmp_path / "missing.txt"
    short.write_text("far too short")
    wide, floats, damaged = tmp_path / "wide.npy", tmp_path / "floats.npy", tmp_path / "damaged"
    np.save(wide, np.arange(300, dtype=np.uint16))
    np.save(floats, np.zeros(300, dtype=np.float32))
    empty, few = tmp_path / "empty.npy", tmp_path / "few.npy"
    empty.touch()
    np.save(few, np.arange(300) % 100)
    damaged.mkdir()
    (damaged / "step-000000005.pt").write_bytes(b"torn")
    folder = tmp_path / "checkpoints"
    cases: dict[str, dict[str, object]] = {
        "the text must have at least 66 tokens": {"data": short},
        f"No such file or directory: '{missing}'": {"data": missing},
        "Not a directory": {"checkpoint_dir": text / "inside"},
        "wrapper must be one of naive, flat, overlap, bucketed, peer-copy, stage-2, stage-3, "
        "stage-3-kept, but got 'fast'": {"wrapper": "fast"},
        "preset must be one of plain, fast, but got 'faster'": {"preset": "faster"},
        "communication must be one of nccl, peer-copy, auto, but got 'x'": {"communication": "x"},
        "recompute must be one of none, block, block-keep-attention, every-K with a number for K, "
        "but got 'every-0'": {"recompute": "every-0"},
        "token ids must be from 0 to --vocab-size - 1 = 255, but": {"data": wide},
        "array of at least one integer, but got float32": {"data": floats},
        f"{empty} must be a whole .npy file": {"data": empty},
        "--prompt must be at least one byte, all of them below --vocab-size 256": {"prompt": ""},
        "below --vocab-size 104, but got 'The '. Use --sample-length 0": {
            "data": few,
            "vocab_size": 104,
        },
        "must be a checkpoint of save_checkpoint, but got a damaged": {"checkpoint_dir": damaged},
        "attention must be one of flash, sdpa, softmax, but got 'fast'": {"attention": "fast"},
        "precision must be one of fp32, bf16, but got 'fp8'": {"precision": "fp8"},
        "products must be one of plain, float8, float8-rows, but got 'fp4'": {"products": "fp4"},
        "--products float8 must come with --precision bf16 on a GPU of compute capability 8.9 or "
        "more, but got bf16 on cpu": {"products": "float8", "precision": "bf16"},
        "device must be one of auto, cuda, cpu, but got 'tpu'": {"device": "tpu"},
        "size must be one of small, medium, large, xl, 2.7B, 2026/xl, 2026/10B, 8B, but "
        "got 'huge'": {"size": "huge"},
        "num_heads must divide d_model": {"num_heads": 5},
        "--logger must be MODULE:FUNCTION of an installed module": {"logger": "no_such:init"},
        "--context-parallel must divide the number of ranks, 1, and half of --context, 16, but got "
        "2": {"context_parallel": 2},
    }
    common = {"data": text, "checkpoint_dir": folder}
    refused = (
        "--cuda-graph must come with GPUs, --fused and --wrapper stage-3 or stage-3-kept, but got"
    )
    assert_refused(examples.run(arguments("--cuda-graph", data=text)), refused)
    refused = (
        "--communication peer-copy must come with GPUs and --wrapper stage-3 or stage-3-kept, but"
    )
    assert_refused(examples.run(arguments(data=text, communication="peer-copy")), refused)
    for message, change in cases.items():
        assert_refused(examples.run(arguments(**(common | change))), message)
    typo, usage = (
        examples.run(["--wraper", "flat"]),
        examples.run(["--help"]),
    )
    assert not folder.exists()  # nothing was written
    assert examples.run(["--seed", str(2**64)])[0] == 2
    assert typo[0] == 2
    assert "No such option" in typo[2]
    assert usage[0] == 0
    for name in SMALL.keys() | {"--wrapper", "--sharded", "--attention", "--checkpoint-dir"}:
        assert name in usage[1]


def test_any_module_example_learns(examples: Examples) -> None:
    code, output, errors = examples.run([], 1, script="finetune_any_module.py")
    assert code == 0, errors
    accuracies = [float(value) for value in re.findall(r"accuracy (\S+)$", output, re.M)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.75


@pytest.mark.gpu
def test_compiled_blocks_learn(text: Path) -> None:
    options = arguments("--compile", data=text, device="cuda", precision="bf16")
    assert losses(finish(start([str(SCRIPT), *options])))[40] < 1.0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("preset", ["plain", "fast"])
def test_two_gpus_train_and_continue(text: Path, tmp_path: Path, preset: str) -> None:
    import psutil  # here, so that the rest also runs where only the GPU tests' needs are met

    settings = {
        "data": text, "checkpoint_dir": tmp_path / "run", "device": "cuda", "preset": preset,
    }  # fmt: skip
    if preset == "fast":  # by itself it takes NCCL for a model this small
        settings["communication"] = "peer-copy"
    command = [*TORCHRUN, str(SCRIPT), *arguments(**settings, precision="bf16")]
    with start(command) as process:
        launcher = psutil.Process(process.pid)
        try:
            wait_for_checkpoint(tmp_path / "run")
        finally:
            with suppress(psutil.Error):
                for member in [*launcher.children(recursive=True), launcher]:
                    with suppress(psutil.Error):
                        member.kill()
        process.communicate(timeout=100)
    output = finish(start(command))
    assert "2 ranks on cuda" in output
    assert ("by copies between GPUs" in output) == (preset == "fast")
    assert "continuing from step" in output
    assert losses(output)[40] < 1.0


def test_folder_is_listed_by_step_and_pruned(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []
    for step in (10, 2, 1_234_567_890):
        save_checkpoint(checkpoint_path(tmp_path, step), Checkpoint(step=step, model={}))
    (tmp_path / ".step-000000099.pt.tmp").touch()
    (tmp_path / "notes.txt").touch()
    steps = [load_checkpoint(path).step for path in list_checkpoints(tmp_path)]
    assert steps == [2, 10, 1_234_567_890]
    prune_checkpoints(tmp_path, keep=2)
    assert [load_checkpoint(path).step for path in list_checkpoints(tmp_path)] == steps[1:]
    assert (tmp_path / "notes.txt").exists()
    with pytest.raises(ValueError, match="keep must be at least 1"):
        prune_checkpoints(tmp_path, keep=0)


def test_a_file_of_settings_is_read_and_options_win(tmp_path: Path) -> None:
    seen: list[tuple[Settings, set[str]]] = []
    app = application(lambda settings, given: seen.append((settings, set(given))))
    file = tmp_path / "mine.toml"
    file.write_text('steps = 7\n"learning-rate" = 0.5\nmetrics = "m.jsonl"\ncompile = true\n')
    done = CliRunner().invoke(app, ["--config", str(file), "--steps", "9"])
    assert done.exit_code == 0, done.output
    [(settings, given)] = seen
    assert (settings.steps, settings.learning_rate, settings.compile) == (9, 0.5, True)
    assert settings.metrics == Path("m.jsonl")
    assert given == {"steps", "learning_rate", "metrics", "compile"}  # a preset changes none

    for text, message in (
        ("stepz = 7", "but got 'stepz'"),
        ("steps = [7]", "steps in .* must be one value"),
        ("steps =", "must be a TOML file"),
        ("steps = 0", "Invalid value for .--steps."),
    ):
        file.write_text(text)
        refused = CliRunner().invoke(app, ["--config", str(file)], env={"COLUMNS": "4000"})
        assert refused.exit_code == 2
        assert re.search(message, " ".join(refused.output.split())), refused.output
    assert len(seen) == 1
