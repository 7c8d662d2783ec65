"""Sequences of ``train_lm.py`` that are spread over ranks, with ``--context-parallel``.

The ranks form a mesh of data and context. Ranks of one context have the same sequences, each its
own tokens of them, and attend to all tokens (``flashattn_triton.context_parallel``). Parameters and
gradients are those of all ranks together: the mean of all ranks' losses is the loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train_settings import Settings, causal_flash_attention

from flashattn_triton.context_parallel import (
    context_parallel_attention,
    shard_tokens,
    token_positions,
)


class Context:
    """This rank's place in the mesh; without ``--context-parallel``, each rank is a context.

    Attributes:
        data_rank: of the ranks that have other sequences.
        data_size: how many there are.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        size, world_size = settings.context_parallel, dist.get_world_size()
        if world_size % size or settings.context % (2 * size):
            raise ValueError(
                f"--context-parallel must divide the number of ranks, {world_size}, and half of "
                f"--context, {settings.context / 2:g}, but got {size}. Change one of them."
            )
        if size > 1 and settings.attention != "flash":
            raise ValueError(
                f"--attention must be flash with --context-parallel, but got "
                f"{settings.attention!r}. Leave it out."
            )
        self.data_rank, self.data_size = dist.get_rank() // size, world_size // size
        self._size, self._whole = size, False
        self._device, self._length = device, settings.context
        self._mesh: Any = None

    def join(self) -> None:
        """Makes the groups of the mesh. Collective."""
        if self._size > 1:
            shape, names = (self.data_size, self._size), ("data", "context")
            mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
            self._mesh = mesh["context"]
            self._positions = token_positions(self._length, self._mesh, device=self._device)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention to the tokens of all ranks of the context, (batch, heads, seq, D)."""
        if self._mesh is None or self._whole:
            return causal_flash_attention(query, key, value)
        out: Tensor = context_parallel_attention(
            query, key, value, self._mesh, causal=True, layout="bhsd"
        )
        return out

    def own(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's tokens of (batch, context) inputs and targets, and their positions."""
        if self._mesh is None:
            return inputs, targets, None
        return shard_tokens(inputs, self._mesh), shard_tokens(targets, self._mesh), self._positions

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Within it, the model is given whole sequences, as to continue a prompt."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
