"""Hugging Face's Trainer and Accelerate with ``ShardedOptimizer`` equal single-process training.

The callback is that of ``examples/sharded_transformers_trainer.py``.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded_transformers_trainer.py"
BATCHES, BATCH_SIZE, WORLD_SIZE = 6, 4, 2
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # the same terms, summed in another order
# Importing transformers for the first time compiles it, in every rank, on cores that may be busy.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings(
        "ignore::Warning:accelerate", "ignore::Warning:transformers"
    ),  # theirs
]


class Regression(nn.Module):
    """Returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


def rows() -> list[dict[str, Tensor]]:
    inputs = torch.randn(
        BATCHES * BATCH_SIZE * WORLD_SIZE, 8, generator=torch.Generator().manual_seed(1)
    )
    labels = inputs.sum(1, keepdim=True).sin()
    return [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]


def batches(size: int) -> list[dict[str, Tensor]]:
    every = rows()
    return [
        {key: torch.stack([row[key] for row in every[first : first + size]]) for key in every[0]}
        for first in range(0, len(every), size)
    ]


def trained_alone(epochs: int, planned: int) -> dict[str, Tensor]:
    """One process, the batches of both ranks at once, and the Trainer's linear schedule."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (planned * BATCHES)
    )
    for _ in range(epochs):
        for batch in batches(BATCH_SIZE * WORLD_SIZE):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    return model.state_dict()


def hugging_face_run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Everything that the tests below look at, in one start of the ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group exists already
    # By itself Accelerate calls the CPU of rank 1 "cpu:1", and torch makes a copy of every tensor
    # that is sent there, even of one that has been sent before. The number of a GPU is its own.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate import Accelerator
    from sharded_transformers_trainer import ShardedCheckpoints
    from transformers import Trainer, TrainingArguments

    from shard_optim import ShardedOptimizer

    def trainer(**options: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=3,
            max_grad_norm=0.5,
            train_sampling_strategy="sequential",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            **{"save_only_model": True, **options},
        )
        model = Regression().to(arguments.device)
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.01
        )
        return Trainer(
            model,
            arguments,
            train_dataset=rows(),
            optimizers=(optimizer, None),
            callbacks=[ShardedCheckpoints(optimizer)],
        )

    found: dict[str, Any] = {}
    first = trainer()
    first.train()
    found["three epochs"] = first.model.state_dict()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{2 * BATCHES}")
    found["resumed"] = resumed.model.state_dict()
    try:
        trainer(save_only_model=False)
    except ValueError as error:
        found["refused"] = str(error)

    # Accelerate alone: the optimizer averages the gradients, so the model needs no wrapper.
    accelerator = Accelerator(cpu=True)
    model = Regression().to(accelerator.device)
    optimizer = accelerator.prepare(
        ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.01, reduce_gradients=True
        )
    )
    for batch in batches(BATCH_SIZE)[rank::world_size]:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    found["accelerate"] = model.state_dict()
    return {
        name: {key: value.clone() for key, value in part.items()} if name != "refused" else part
        for name, part in found.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    outcomes = run_ranks(
        hugging_face_run, WORLD_SIZE, str(folder), timeout=400.0, collective_timeout=120.0
    )
    return [outcome.value for outcome in outcomes]


def test_trainer_equals_single_process_training(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["three epochs"], trained_alone(3, 3), **TOLERANCE)
        torch.testing.assert_close(result["resumed"], trained_alone(3, 3), **TOLERANCE)


def test_a_checkpoint_of_one_rank_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "Pass save_only_model=True" in result["refused"]


def test_accelerate_equals_single_process_training(results: list[dict[str, Any]]) -> None:
    expected = trained_alone(1, 10**9)  # a schedule that stays where it begins
    for result in results:
        torch.testing.assert_close(result["accelerate"], expected, **TOLERANCE)


def test_the_program_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed at step 8" in done.stdout
