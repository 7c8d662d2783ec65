"""Which gradients travel together.

A plan is a list of groups of parameter indices, in the order in which the groups are reduced.
Backward produces gradients roughly in the reverse of the order in which modules were registered,
so that reversed order is the first guess; the order really observed can replace it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What planning needs to know about one parameter.

    Attributes:
        index: position in the module's registration order, shared parameters counted once.
        name: the first name under which the module registered it.
        numel: number of elements.
        dtype: gradients of different dtypes never share a bucket.
    """

    index: int
    name: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        index: position in the order of reduction.
        names: the parameters' names in the module.
        indices: their positions in the module's order of trainable parameters.
        parameters: the parameters.
        slices: where each one's gradient, row-major, lies in the flat tensor.
        numel: elements of all gradients.
        padded_numel: length of the flat tensor, a multiple of the world size; zeros fill it up.
        dtype: of the gradients and the flat tensor.
        device: of the same.
        process_group: the ranks to reduce over.
        nbytes: size of the gradients in bytes, padding left out.
        flat: this step's flat gradients, from the bucket's completion until the bucket's next
            completion or ``release()``; None before, and always None for buckets reduced in
            place.
    """

    index: int
    names: tuple[str, ...]
    indices: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    slices: tuple[slice, ...]
    numel: int
    padded_numel: int
    dtype: torch.dtype
    device: torch.device
    process_group: dist.ProcessGroup
    flat: Tensor | None = field(default=None, repr=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """The bucket's reduction in words, for errors."""
        if len(self.names) == 1:
            return f"the reduction of {self.names[0]}"
        return (
            f"the reduction of {len(self.names)} gradients from {self.names[0]} to {self.names[-1]}"
        )

    def release(self) -> None:
        """Drops the flat tensor; its memory is free once no gradient is a view of it."""
        self.flat = None


def one_per_parameter(specs: Iterable[ParameterSpec]) -> list[tuple[int, ...]]:
    """Every parameter alone, in the order given."""
    return [(spec.index,) for spec in specs]


def one_per_kind(specs: Iterable[ParameterSpec]) -> list[tuple[int, ...]]:
    """One group per dtype, each in the order given."""
    kinds: dict[torch.dtype, list[int]] = {}
    for spec in specs:
        kinds.setdefault(spec.dtype, []).append(spec.index)
    return [tuple(indices) for indices in kinds.values()]


def make_buckets(
    plan: Sequence[tuple[int, ...]],
    specs: Sequence[ParameterSpec],
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
) -> list[Bucket]:
    """The buckets of a plan; ``specs`` and ``parameters`` are all parameters, by index."""
    buckets = []
    for bucket_index, indices in enumerate(plan):
        ends = list(itertools.accumulate(specs[index].numel for index in indices))
        first = specs[indices[0]]
        bucket = Bucket(
            index=bucket_index,
            names=tuple(specs[index].name for index in indices),
            indices=indices,
            parameters=tuple(parameters[index] for index in indices),
            slices=tuple(map(slice, [0, *ends], ends)),
            numel=ends[-1],
            padded_numel=-(-ends[-1] // group.size()) * group.size(),
            dtype=first.dtype,
            device=parameters[indices[0]].device,
            process_group=group,
        )
        buckets.append(bucket)
    return buckets
