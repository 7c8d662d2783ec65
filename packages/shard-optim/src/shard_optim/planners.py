"""Ranges of vectors in checkpoints of ``torch.distributed.checkpoint``.

Its default planners know whole tensors and its own sharded kinds. These two also save and load
plain vectors of which each rank holds a range, described beside the tensor instead of by a
subclass of it. Import this module only when a checkpoint is written or read: its imports change
warning filters.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True, kw_only=True)
class Range:
    """Elements ``[offset, offset + len(values))`` of a vector of ``total`` elements.

    Attributes:
        values: one-dimensional; read when saving, filled when loading.
        offset: place of the first of them in the vector.
        total: elements of the whole vector.
    """

    values: Tensor
    offset: int
    total: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The range as a checkpoint's metadata have it."""
        return ChunkStorageMetadata(
            offsets=torch.Size([self.offset]), sizes=torch.Size([self.values.numel()])
        )


class RangeSavePlanner(DefaultSavePlanner):
    """Saves the state dict as the default planner does, and this rank's ranges beside it.

    Args:
        ranges: by key; other ranks hold the other ranges of the same keys.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._ranges = ranges

    def create_local_plan(self) -> SavePlan:
        """The default plan and one item per range."""
        plan = super().create_local_plan()
        items = [
            WriteItem(
                index=MetadataIndex(key, part.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=part.chunk,
                    properties=TensorProperties.create_from_tensor(part.values),
                    size=torch.Size([part.total]),
                ),
            )
            for key, part in self._ranges.items()
        ]
        return dataclasses.replace(plan, items=[*plan.items, *items])

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item of the plan stands for."""
        part = self._ranges.get(index.fqn)
        return super().lookup_object(index) if part is None else part.values


class RangeLoadPlanner(DefaultLoadPlanner):
    """Loads the state dict as the default planner does, and fills this rank's ranges.

    Args:
        ranges: by key; however many ranks wrote them.

    Raises:
        ValueError: while planning, if a saved vector has another length or is not one.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._ranges = ranges

    def create_local_plan(self) -> LoadPlan:
        """The default plan and what covers each range."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = list(plan.items)
        for key, part in self._ranges.items():
            stored = self.metadata.state_dict_metadata[key]
            size = stored.size if isinstance(stored, TensorStorageMetadata) else None
            if not isinstance(stored, TensorStorageMetadata) or size != torch.Size([part.total]):
                raise ValueError(
                    f"the checkpoint must hold {part.total} elements under {key}, but it holds "
                    f"{'no tensor' if size is None else tuple(size)}; load it into the optimizer "
                    "that it was saved from"
                )
            items += create_read_items_for_chunk_list(key, stored, [part.chunk])
        return dataclasses.replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads a value that is no tensor, without running code from it."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the data of an item of the plan go."""
        part = self._ranges.get(index.fqn)
        return super().lookup_tensor(index) if part is None else part.values
