"""Sharded training as strategies of Lightning's ``Trainer``, to copy and change.

::

    torchrun --nproc-per-node 2 examples/sharded_lightning_strategies.py

- ``ShardedOptimizerStrategy``: optimizer state, and gradients, in shards (ZeRO stages 1 and 2).
- ``FullyShardedStrategy``: parameters in shards as well (ZeRO stage 3).

Lightning starts the ranks and runs the loop as with its own ``DDPStrategy``. The file needs
``pip install lightning``. The program trains a small regression on CPUs with both, and prints the
losses.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout

from shard_optim import (
    FullyShardedDataParallel,
    ShardedGradScaler,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)

# What a checkpoint folder holds beside the files of ``shard_optim.save``.
_META = "lightning.pt"


class _ShardedStrategy(DDPStrategy):
    """What both strategies share: the process group, and clipping by the norm over all shards."""

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    def setup_precision_plugin(self) -> None:
        """Makes ``gradient_clip_val`` clip by the norm over all shards."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                "the gradient scaler must be a ShardedGradScaler, which looks at the shards of "
                f"all ranks, but got a {type(scaler).__name__}. Use precision='bf16-mixed', or "
                "plugins=MixedPrecision('16-mixed', 'cuda', scaler=ShardedGradScaler())."
            )
        super().setup_precision_plugin()
        # The plug-in's own would take the norm of what this rank holds.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    @abstractmethod
    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scales the gradients of all ranks' shards."""


class ShardedOptimizerStrategy(_ShardedStrategy):
    """Trains a ``LightningModule`` whose ``configure_optimizers`` returns a ``ShardedOptimizer``.

    The module is in no wrapper: the optimizers average the gradients themselves, so each needs
    ``reduce_gradients=True``. Rank 0's weights are taken at the start. ``accumulate_grad_batches``
    and ``gradient_clip_val`` work; in manual optimization, clip with ``self.clip_gradients``.

    A checkpoint is one file with the whole optimizer state, as of unsharded training: any number
    of ranks, and a ``Trainer`` with the plain optimizer class, can go on from it.

    Args:
        process_group_backend: such as "nccl" or "gloo"; None means the usual one for the device.
        timeout: of the process group's collectives.

    Raises:
        TypeError: from ``Trainer.fit``, for an optimizer of another class.
        ValueError: from ``Trainer.fit``, for a gradient scaler that looks at one rank only.
        RuntimeError: from the first step, on every rank, for an optimizer without
            ``reduce_gradients=True``.
    """

    def configure_ddp(self) -> None:
        """Makes all ranks start from rank 0's weights; called when the module is on its device."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def setup_optimizers(self, trainer: Any) -> None:
        """Lets Lightning make the optimizers, and checks them."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, ShardedOptimizer):
                raise TypeError(
                    "configure_optimizers must return ShardedOptimizer, but got a "
                    f"{type(optimizer).__name__}. Return ShardedOptimizer(self.parameters(), "
                    f"{type(optimizer).__name__}, reduce_gradients=True, ...)."
                )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward accumulates without communication."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def setup_precision_plugin(self) -> None:
        """Makes both algorithms of ``gradient_clip_algorithm`` look at the shards."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_value = self._clip_by_value

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        _unwrapped(optimizer).clip_grad_norm_(clip_val)

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        for gradient in _unwrapped(optimizer).local_gradients():
            gradient.clamp_(-clip_val, clip_val)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on rank 0, which writes the checkpoint; nothing elsewhere."""
        whole = full_state(optimizer=_unwrapped(optimizer))
        return {} if whole is None else whole["optimizer"]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives every rank its part of the whole states that rank 0 has read."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_state({"optimizer": state}, optimizer=_unwrapped(optimizer))


def _unwrapped(optimizer: Any) -> ShardedOptimizer:
    """The optimizer itself: Lightning wraps it for manual optimization, with its own attributes."""
    found = getattr(optimizer, "_optimizer", optimizer)
    assert isinstance(found, ShardedOptimizer)
    return found


class FullyShardedStrategy(_ShardedStrategy):
    """Trains a ``LightningModule`` inside ``FullyShardedDataParallel``.

    ``configure_optimizers`` sees the shards in ``self.parameters()`` and returns any element-wise
    optimizer over them. A module made on the meta device in ``configure_model`` is never whole on
    any rank. Afterwards the module's parameters stay shards; whole ones are in the checkpoint.

    A checkpoint is a folder that all ranks write, readable by any number of ranks: the files of
    ``shard_optim.save``, and what Lightning keeps beside weights and optimizer state.

    Args:
        process_group_backend: such as "nccl" or "gloo"; None means the usual one for the device.
        timeout: of the process group's collectives.
        fully_sharded: arguments of ``FullyShardedDataParallel``, such as ``compute_dtype``.

    Raises:
        ValueError: from ``Trainer.fit``, for several optimizers, or for a gradient scaler that
            looks at one rank only.
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **fully_sharded: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._fully_sharded = fully_sharded
        self._wrapped: FullyShardedDataParallel | None = None

    def setup(self, trainer: Any) -> None:
        """Wraps the module, once for all that the trainer does with it."""
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if self._wrapped is None or self._wrapped.module is not module:
            self._wrapped = self._setup_model(module)
        self.model = self._wrapped
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if len(self.optimizers) > 1:
                raise ValueError(
                    "configure_optimizers must return one optimizer, because a checkpoint holds "
                    f"one, but got {len(self.optimizers)}. Use parameter groups."
                )
        self.setup_precision_plugin()

    def _setup_model(self, model: nn.Module) -> FullyShardedDataParallel:
        if any(param.is_meta for param in model.parameters()):
            return FullyShardedDataParallel(model, device=self.root_device, **self._fully_sharded)
        return FullyShardedDataParallel(model.to(self.root_device), **self._fully_sharded)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward keeps whole gradients and communicates none."""
        with self._sharded.no_sync():
            yield

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._sharded.clip_grad_norm_(clip_val)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint holds shards, so the module must be sharded first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` writes the shards."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` writes the shards."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a folder on every rank; one of that name is replaced when all is written."""
        folder = Path(filepath)
        new = folder.with_name(f"{folder.name}.new")
        if self.is_global_zero:
            shutil.rmtree(new, ignore_errors=True)  # what a killed run left
        self.barrier()
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
        save(new, self._sharded, optimizer)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, new / _META, storage_options)
            if folder.exists():
                shutil.rmtree(folder)
            new.rename(folder)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads what Lightning keeps; remembers the folder for weights and optimizer state."""
        folder = Path(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(folder / _META, weights_only)
        return checkpoint | {"folder": folder}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Gives every rank its shards of the parameters."""
        load(checkpoint["folder"], self._sharded)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives every rank its shards of the optimizer state."""
        load(checkpoint["folder"], optimizer=self.optimizers[0])

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint's folder."""
        if self.is_global_zero:
            shutil.rmtree(filepath)

    def teardown(self) -> None:
        """Ends the run. The shards stay on the device: the wrapper is used again."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def _sharded(self) -> FullyShardedDataParallel:
        assert self._wrapped is not None
        return self._wrapped


class Regression(pl.LightningModule):
    """An ordinary module of Lightning's: under stage 3 nothing in it is about ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.last_loss = float("nan")

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The mean squared error of this rank's share of the batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.last_loss = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any element-wise optimizer: it gets this rank's shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class RegressionOfStage2(Regression):
    """The same module with an optimizer that averages the gradients in shards."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The class apart from its arguments."""
        return ShardedOptimizer(
            self.parameters(), torch.optim.AdamW, lr=1e-2, reduce_gradients=True
        )


def main() -> None:
    """Trains on two CPU ranks; started without ``torchrun``, Lightning starts the second itself."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    for module, strategy in (
        (RegressionOfStage2(), ShardedOptimizerStrategy()),
        (Regression(), FullyShardedStrategy(reshard_after_forward=False)),
    ):
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=20,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        if trainer.is_global_zero:
            print(f"{type(strategy).__name__}: loss {module.last_loss:.4f}")


if __name__ == "__main__":
    main()
