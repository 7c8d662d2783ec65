"""Where a tensor lies whose elements the ranks share: in which order, which of them, in which form.

Elements are counted in the memory order of the whole tensor, so that places of every stage and of
any number of ranks speak of the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Attribute of a parameter of a FullyShardedDataParallel: a ``Sharded``, which says where it lies.
SHARDED = "_sharded"


def check_layout(param: Tensor, name: str, seen: dict[int, str]) -> None:
    """Raises ValueError unless the elements are a dense block of memory, of no tensor ``seen``."""
    if param.layout != torch.strided or not _is_dense(param):
        strides = param.stride() if param.layout == torch.strided else "none"
        raise ValueError(
            f"parameters and buffers must occupy one dense block of memory, but {name} has layout "
            f"{param.layout}, shape {tuple(param.shape)}, strides {strides}. "
            "Replace it first: by its to_dense() if it is sparse, else by a contiguous() copy."
        )
    if (first := seen.setdefault(param.data_ptr() or id(param), name)) != name:  # 0: no memory
        raise ValueError(
            f"parameters must have memory of their own, but {name} lies where {first} does, and "
            "would be moved away from it. Tie modules by giving both one parameter."
        )


def _is_dense(param: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a vector in the memory order of ``like``, which has the same shape.

    A view if their strides agree, else a copy.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_slice(
    whole: Tensor, size: torch.Size, stride: tuple[int, ...], first: int, count: int
) -> Tensor:
    """Elements ``[first, first + count)`` of a tensor in the memory order of a parameter."""
    like = torch.empty_strided(size, stride, dtype=whole.dtype, device="meta")
    return in_memory_order(whole.detach(), like)[first : first + count]


@dataclass(frozen=True, eq=False)
class Place:
    """Which elements of one tensor this rank holds, and the form in which it holds them."""

    name: str  # of the parameter or buffer, for errors
    size: torch.Size  # of the whole tensor
    stride: tuple[int, ...]  # of the whole tensor, whose elements are counted in memory order
    # The first element that this rank holds and their number; None if it keeps no state of the
    # tensor.
    owned: tuple[int, int] | None
    form: torch.Size  # size of the tensor that holds this rank's elements
    replicated: bool = False  # whether every rank holds all elements

    @property
    def span(self) -> tuple[int, int]:
        """The first element that this rank holds, and their number."""
        return self.owned or (0, 0)

    @property
    def held(self) -> bool:
        """Whether this rank keeps state of the tensor."""
        return self.owned is not None

    @property
    def whole_here(self) -> bool:
        """Whether this rank's tensor has the size of the whole one."""
        return self.form == self.size

    def flat(self, held: Tensor) -> Tensor:
        """This rank's elements as a vector, from the tensor that holds them."""
        if not self.whole_here:
            return held.detach().reshape(-1)
        return flat_slice(held, self.size, self.stride, 0, self.size.numel())

    def shaped(self, flat: Tensor) -> Tensor:
        """The tensor that holds this rank's elements, from a vector of them."""
        return flat.as_strided(self.size, self.stride) if self.whole_here else flat.view(self.form)

    def beside(self, size: torch.Size) -> Place:
        """Where a tensor of another size lies that belongs to this one, which has one owner."""
        return replace(
            self,
            size=size,
            stride=torch.empty(size, device="meta").stride(),
            owned=(0, size.numel()) if self.held else None,
            form=size if self.whole_here else torch.Size([0]),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One tensor of a training run's state: where its elements lie, and this rank's of them."""

    place: Place
    tensor: Tensor

    @property
    def flat(self) -> Tensor:
        """This rank's elements, as a vector."""
        return self.place.flat(self.tensor)

    @property
    def described(self) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """What the other ranks are told: dtype, shape of the whole, first element, their number."""
        return self.tensor.dtype, tuple(self.place.size), *self.place.span

    def copied(self) -> Row:
        """A copy on the CPU, which training does not change."""
        return Row(place=self.place, tensor=self.tensor.detach().to("cpu", copy=True))


def replicated_place(name: str, tensor: Tensor) -> Place:
    """Where a tensor lies that every rank holds whole."""
    size = tensor.size()
    stride = tensor.stride() if _is_dense(tensor) else torch.empty(size, device="meta").stride()
    return Place(name, size, stride, (0, size.numel()), form=size, replicated=True)
