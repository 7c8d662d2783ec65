"""The fast preset of examples/train_lm.py on CPUs: what it shares, predicts, and leaves behind."""

import importlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tools.pages.rows import read
from torch.utils.flop_counter import FlopCounterMode
from train_checkpoints import checkpoint_path, list_checkpoints

from basics_model import ModelConfig, TransformerLM, load_checkpoint
from basics_model.attention import softmax_attention
from basics_model.sizes import model_flops
from tests.example_programs import EXAMPLES, Examples

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
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_two_ranks_continue_exactly_and_with_every_other_division(
    examples: Examples, text: Path, tmp_path: Path, moments: str
) -> None:
    """A checkpoint of sharded parameters is continued by itself bit for bit, and by the others."""
    whole = tmp_path / "whole"
    common = [*SMALL, "--data", str(text), "--moments", moments]
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


def test_without_clipping_blocks_are_updated_within_backward(
    examples: Examples, text: Path, tmp_path: Path
) -> None:
    """The same updates as of gradients that are too small to be clipped, bit for bit."""
    ends = []
    for norm in ("0", "1e9"):
        folder = tmp_path / norm
        command = [*SMALL, "--data", str(text), "--max-norm", norm]
        code, output, errors = examples.run([*command, "--checkpoint-dir", str(folder)])
        assert code == 0, errors
        assert ("  grad " in output) == (norm != "0")
        ends.append(load_checkpoint(checkpoint_path(folder, 8)).model)
    for key, value in ends[1].items():
        assert torch.equal(ends[0][key], value), key


@pytest.mark.parametrize(
    ("gib", "remedy"),
    [
        (
            20.0,
            "Use --recompute block-keep-attention, which needs 19.46 GiB; recomputation adds 23% "
            "to the operations of a step.",
        ),
        (
            18.0,
            "Use --recompute block, which needs 17.36 GiB; recomputation adds 26% to the "
            "operations of a step.",
        ),
        (1.0, "Use a smaller model, a shorter --context or more ranks."),
    ],
)
def test_what_does_not_fit_is_said_from_the_prediction(
    examples: Examples, text: Path, gib: float, remedy: str
) -> None:
    """With the nearest options that fit and what they cost; no model is made."""
    options = ["--preset", "fast", "--size", "large", "--device", "cpu", "--data", str(text)]
    options += ["--context", "1024", "--batch-size", "16", "--memory-gib", str(gib)]
    code, output, errors = examples.run(options)
    assert (code, output) == (2, ""), errors
    assert len(errors.splitlines()) == 1
    assert "the memory of a rank must be what a step is predicted to need" in errors
    assert f"but got {gib:.2f} GiB. {remedy}" in errors


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module of predictions."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_memory")


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ("fastest-step-8b.jsonl", {"wrapper": "stage-3", "recompute": "block-keep-attention"}),
        ("fastest-step.jsonl.gz", {"wrapper": "stage-3-kept", "cuda_graph": True}),
    ],
)
def test_predicted_memory_bounds_the_published_peaks(
    memory: ModuleType, rows: str, options: dict[str, object]
) -> None:
    """The prediction is never too low, and at most a fifth too high."""
    settings = importlib.import_module("train_settings").Settings
    documentation = EXAMPLES.parent / "docs"
    page = (documentation / "explanations" / "fastest-step.md").read_text()
    shown = 0
    for row in read(documentation / "results" / rows):
        config, wrapper = row["config"], row["settings"]["wrapper"]
        if wrapper["name"] != "fully-sharded":
            continue
        chosen = settings(
            device="cuda",
            precision="bf16",
            compile=True,
            fused=True,
            size=config["size"],
            vocab_size=config["vocab_size"],
            batch_size=config["batch"],
            context=config["sequence"],
            communication=wrapper.get("communication", "nccl"),
            **options,
        )
        predicted = memory.predict(chosen, chosen.model_config(), config["world_size"])
        ratio = predicted.total / 2**30 / row["peak_gib"]
        assert 1.0 <= ratio <= 1.2, (row["label"], row["variant"], ratio)
        shown += f" | {predicted.total / 2**30:.2f} | " in page
    assert shown


def test_gradients_beside_activations_where_a_step_accumulates(memory: ModuleType) -> None:
    settings = importlib.import_module("train_settings").Settings

    def predict(**options: object) -> Any:
        chosen = settings(device="cpu", size="small", **options)
        return memory.predict(chosen, chosen.model_config(), 2)

    once, often = (predict(wrapper="stage-3", accumulate=count) for count in (1, 2))
    assert once.total + once.replaced == often.total
    assert once.replaced > 0
    assert often.replaced == predict(wrapper="bucketed").replaced == 0
    assert "freed before all gradients are there" in str(once)
    assert "freed" not in str(often)
    assert predict(wrapper="stage-3", moments="bf16").held == 0.75 * once.held


@pytest.mark.parametrize("checkpoint_blocks", [0, 1, 2, 3])
def test_predicted_recomputation_is_what_backward_repeats(
    memory: ModuleType, checkpoint_blocks: int
) -> None:
    """Counted by torch in a step, of whose operations the prediction is a part."""
    config = ModelConfig(
        vocab_size=300, context_length=64, d_model=32, d_ff=96, num_layers=5, num_heads=2
    )
    counts = []
    for together in (0, checkpoint_blocks):
        model = TransformerLM(config, attention=softmax_attention, checkpoint_blocks=together)
        token_ids = torch.randint(300, (2, 65))
        with FlopCounterMode(display=False) as counter:
            model(token_ids[:, :-1], token_ids[:, 1:]).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == 3 * model_flops(config, batch=2, seq=64)
    predicted = memory.recomputed_share(
        config, seq=64, checkpoint_blocks=checkpoint_blocks, keep_attention=False
    )
    assert predicted == pytest.approx(counts[1] / counts[0] - 1, abs=1e-12)
    if checkpoint_blocks == 1:
        kept = memory.recomputed_share(config, seq=64, checkpoint_blocks=1, keep_attention=True)
        attention = 5 * 4 * 64**2 * 32 / model_flops(config, batch=1, seq=64) / 3
        assert predicted - kept == pytest.approx(attention)


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
