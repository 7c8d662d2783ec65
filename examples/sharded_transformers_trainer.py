"""``ShardedOptimizer`` in the ``Trainer`` of Hugging Face transformers, to copy and change.

::

    torchrun --nproc-per-node 2 examples/sharded_transformers_trainer.py FOLDER

Training itself needs nothing from here. The ``Trainer`` writes the optimizer state of one rank, on
which a sharded optimizer holds a part; the callback writes and reads the parts of all. It needs
``pip install transformers accelerate``. The program trains a small regression on CPUs, resumes it
from its first checkpoint, and prints the losses.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from shard_optim import ShardedOptimizer, load, save

# Inside each of the trainer's checkpoint folders; the trainer takes "optimizer..." for its own.
_FOLDER = "shards"
_SCHEDULER = "scheduler.pt"


class ShardedCheckpoints(TrainerCallback):
    """Saves the optimizer's shards and the schedule beside the model, and resumes from them.

    ``trainer.train(resume_from_checkpoint=...)`` finds them again in the checkpoint folders of
    ``output_dir``, on any number of ranks.

    Args:
        optimizer: the one given to the ``Trainer``.

    Raises:
        ValueError: from ``Trainer``, unless ``TrainingArguments`` has ``save_only_model=True``.
        FileNotFoundError: from ``train``, if the folder to resume from holds no shards.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when the trainer has been made."""
        if not args.save_only_model:
            raise ValueError(
                "save_only_model must be True, because the trainer would save the shards of one "
                "rank and load them on all, but got False. Pass save_only_model=True to "
                "TrainingArguments; ShardedCheckpoints saves the optimizer."
            )

    def on_save(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Called on every rank when the trainer has saved the model."""
        folder = _folder_of(args, state)
        if state.is_world_process_zero:  # a run resumed earlier comes to the same step again
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier(self._optimizer.process_group)
        save(folder, optimizer=self._optimizer)
        if state.is_world_process_zero:
            torch.save(lr_scheduler.state_dict(), folder / _SCHEDULER)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Called on every rank before the first step; with a step number when it resumes."""
        if state.global_step:
            folder = _folder_of(args, state)
            load(folder, optimizer=self._optimizer)
            lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))


def _folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", _FOLDER)


class Regression(nn.Module):
    """Returns its loss, as the ``Trainer`` wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank starts from the same parameters
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error of this rank's share of the batch."""
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


def make_trainer(output_dir: str) -> Trainer:
    """A trainer of two epochs with a new model. The order matters: the model moves first."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir,
        num_train_epochs=2,
        save_strategy="epoch",
        save_only_model=True,  # the callback saves the rest
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = Regression().to(arguments.device)  # starts the process group
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return Trainer(
        model,
        arguments,
        train_dataset=[{"inputs": row, "labels": row.sum()[None]} for row in inputs],
        optimizers=(optimizer, None),
        callbacks=[ShardedCheckpoints(optimizer)],
    )


def main(output_dir: str) -> None:
    """Trains two epochs, then the second one again from the checkpoint of the first."""
    straight = make_trainer(output_dir).train()
    first = f"{output_dir}/checkpoint-{straight.global_step // 2}"
    trainer = make_trainer(output_dir)
    resumed = trainer.train(resume_from_checkpoint=first)
    if trainer.is_world_process_zero():
        print(f"loss {straight.training_loss:.4f}, resumed at step {resumed.global_step}")


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # else it calls rank 1's processor "cpu:1"
    main(sys.argv[1])
