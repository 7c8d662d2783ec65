"""Checkpoints of a ``ShardedOptimizer`` for the ``Trainer`` of Hugging Face transformers.

    from shard_optim.integrations.transformers import ShardedCheckpoints

    arguments = TrainingArguments("runs", save_only_model=True)  # starts the process group
    model.to(arguments.device)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    trainer = Trainer(
        model,
        arguments,
        optimizers=(optimizer, None),
        callbacks=[ShardedCheckpoints(optimizer)],
    )

Training itself needs nothing from here. The ``Trainer`` writes the optimizer state of one rank, on
which a sharded optimizer holds a part; the callback writes and reads the parts of all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shard_optim.optimizer import ShardedOptimizer
from shard_optim.state import load, save

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "shard_optim.integrations.transformers needs the transformers package. Install it with: "
        "pip install 'shard-optim[transformers]'"
    ) from error

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
