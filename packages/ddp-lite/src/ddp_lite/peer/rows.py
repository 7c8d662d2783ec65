"""The rows of a message: addresses for copies, and views for torch's operations.

A view of a tensor costs the host microseconds, and a message has hundreds of tensors. So views are
made only where torch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ddp_lite.peer.schedule import Chunk


class Layout:
    """The chunks of one row, which all messages of tensors of the same sizes share.

    Args:
        chunks: in the order in which they lie in the row.
        itemsize: bytes of an element of the row.

    Attributes:
        chunks: as given.
        starts: where each chunk begins in the row, in elements.
        numels: elements of each chunk.
        places: where each chunk begins in the row, in bytes.
        sizes: bytes of each chunk.
    """

    def __init__(self, chunks: Sequence[Chunk], itemsize: int) -> None:
        self.chunks = chunks
        self.starts = [chunk.at for chunk in chunks]
        self.numels = [chunk.end - chunk.begin for chunk in chunks]
        self.places = [start * itemsize for start in self.starts]
        self.sizes = [numel * itemsize for numel in self.numels]

    def row(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> Row:
        """The row of one message, with its tensors, contiguous, and their addresses."""
        itemsize = tensors[0].itemsize if tensors else 0
        at = [addresses[chunk.tensor] + chunk.begin * itemsize for chunk in self.chunks]
        return Row(self, tensors, at)

    def views_in(self, row: Tensor) -> list[Tensor]:
        """Each chunk in a tensor that holds the row from its first element on."""
        return [row[chunk.at : chunk.at + chunk.end - chunk.begin] for chunk in self.chunks]


@dataclass(slots=True)
class Row:
    """One row of one message.

    Attributes:
        layout: its chunks.
        tensors: of the message.
        addresses: of the chunks in these tensors.
    """

    layout: Layout
    tensors: Sequence[Tensor]
    addresses: list[int]

    def views(self) -> list[Tensor]:
        """The chunks, one-dimensional."""
        return [
            self.tensors[chunk.tensor].view(-1)[chunk.begin : chunk.end]
            for chunk in self.layout.chunks
        ]
