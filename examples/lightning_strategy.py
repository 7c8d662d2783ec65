"""``BucketedDDP`` as a strategy of Lightning's ``Trainer``, to copy and change.

::

    torchrun --nproc-per-node 2 examples/lightning_strategy.py

Lightning starts the ranks, moves the model and saves checkpoints as its own ``DDPStrategy`` does;
only the wrapper that averages the gradients is another. It needs ``pip install lightning``. The
program trains a small regression on CPUs and prints the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.constants import default_pg_timeout

from ddp_lite import BucketedDDP


class BucketedDDPStrategy(DDPStrategy):
    """Trains a ``LightningModule`` on several ranks, with gradients averaged by ``BucketedDDP``.

    Automatic and manual optimization, ``accumulate_grad_batches`` and every precision that
    Lightning's ``DDPStrategy`` supports work unchanged. Checkpoints are the ones of ``DDPStrategy``
    and load under either. Buffers, such as the statistics of batch normalisation, are not sent at
    every forward: the ranks take rank 0's before each validation and at the end of training.

    Args:
        process_group_backend: such as "nccl" or "gloo"; None means the usual one for the device.
        timeout: of the process group's collectives.
        bucketed_ddp: arguments of ``BucketedDDP``, such as ``bucket_size_mb=100``.

    Raises:
        TypeError: from ``Trainer.fit``, for an argument that ``BucketedDDP`` does not have.
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **bucketed_ddp: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._bucketed_ddp = bucketed_ddp

    def configure_ddp(self) -> None:
        """Wraps the module; called by Lightning when it is on its device."""
        self.model = self._setup_model(self.lightning_module)

    def _setup_model(self, model: nn.Module) -> BucketedDDP:
        return BucketedDDP(model, **self._bucketed_ddp)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward accumulates without communication."""
        assert isinstance(self.model, BucketedDDP)
        with self.model.no_sync():
            yield

    def on_validation_start(self) -> None:
        """Lets all ranks validate with the same buffers."""
        self._send_buffers()

    def on_train_end(self) -> None:
        """Leaves all ranks with the same buffers."""
        self._send_buffers()

    def teardown(self) -> None:
        """Unwraps the module, which Lightning then moves to the CPU."""
        if isinstance(self.model, BucketedDDP):
            self.model.detach()
            self.model = self.lightning_module
        super().teardown()

    def _send_buffers(self) -> None:
        if isinstance(self.model, BucketedDDP):  # Trainer.validate wraps nothing
            self.model.sync_buffers()


class Regression(pl.LightningModule):
    """An ordinary module of Lightning's: nothing in it is about ranks."""

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
        """Any optimizer: every rank holds the whole state."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Trains on two CPU ranks; started without ``torchrun``, Lightning starts the second itself."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = pl.Trainer(
        strategy=BucketedDDPStrategy(bucket_size_mb=25),
        accelerator="cpu",
        devices=2,
        max_epochs=20,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Regression()
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    if trainer.is_global_zero:
        print(f"loss {model.last_loss:.4f}")


if __name__ == "__main__":
    main()
