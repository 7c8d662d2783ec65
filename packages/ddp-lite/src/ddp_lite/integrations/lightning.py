"""``BucketedDDP`` as a strategy of Lightning's ``Trainer``.

    from ddp_lite.integrations.lightning import BucketedDDPStrategy

    trainer = Trainer(accelerator="gpu", devices=2, strategy=BucketedDDPStrategy())

Lightning starts the ranks, moves the model and saves checkpoints as its own ``DDPStrategy`` does;
only the wrapper that averages the gradients is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed.constants import default_pg_timeout

from ddp_lite.wrappers import BucketedDDP

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "ddp_lite.integrations.lightning needs the lightning package. Install it with: "
        "pip install 'ddp-lite[lightning]'"
    ) from error


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
