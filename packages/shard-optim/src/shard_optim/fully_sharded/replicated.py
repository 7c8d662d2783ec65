"""Small parameters, which every rank keeps whole, and the one all-reduce of a backward pass.

Their gradients are averaged in one flat vector. It also tells which parameters of the whole model,
sharded ones included, received a gradient on any rank: one number each. Two more numbers tell
whether all ranks gathered and reduced the same units in the same order, with the same parameters
trainable: otherwise parameters of equal size would be mixed up without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddp_lite.ranks import all_reduce
from ddp_lite.reduce import with_zeros
from shard_optim.communication import check_gradient
from shard_optim.fully_sharded.gradient_store import GradientStore
from shard_optim.fully_sharded.unit_plan import is_quantised
from shard_optim.history import LateComparison
from shard_optim.mesh import Mesh

_WORDS = "the all-reduce of small parameters' gradients"
_REMEDY = (
    ". Also call the same units in the same order, with the same parameters trainable, "
    "zero_grad(), step() and hyperparameters on every rank"
)


class ReplicatedParameters:
    """The small parameters of a model; sums of their gradients are made on ``device``."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        ranks: Mesh,
        compute_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.names, self.params = list(names), list(params)
        self.gradients = GradientStore(self.params, sharded=False)
        self._ranks = ranks
        self._device = device
        self._dtype = torch.float32
        for param in self.params:
            if not is_quantised(param.dtype):
                self._dtype = torch.promote_types(self._dtype, param.dtype)
        self._resting = [param.data for param in self.params]
        self._cast = [
            (param, torch.empty_like(resting, dtype=compute_dtype), resting)
            for param, resting in zip(self.params, self._resting, strict=True)
            if compute_dtype not in (None, resting.dtype) and not is_quantised(resting.dtype)
        ]
        self.at_rest = True
        self._comparison = LateComparison(ranks, device, _REMEDY)

    def refresh(self) -> None:
        """Casts the present values to the dtype of the computation."""
        if self._cast:
            torch._foreach_copy_(
                [computing for _, computing, _ in self._cast],
                [resting for _, _, resting in self._cast],
            )

    def materialize(self) -> None:
        """Makes the values that the model computes with the parameters' data."""
        if self.at_rest:
            self.at_rest = False
            for param, computing, _ in self._cast:
                param.data = computing

    def rest(self) -> None:
        """Makes the values that the optimizer updates the parameters' data."""
        if not self.at_rest:
            self.at_rest = True
            for param, _, resting in self._cast:
                param.data = resting

    def reduce(self, present: Sequence[bool], order_digest: int, history: str) -> list[bool]:
        """Averages this backward pass's gradients over the ranks.

        Args:
            present: for each sharded parameter, whether it had a gradient on this rank.
            order_digest: of the order in which this rank has gathered and reduced units.
            history: words for what else it has done.

        Returns:
            The same for any rank. On CUDA, reading that makes the host wait, so it is read only
            by a rank that lacked some gradient.

        Raises:
            StepMismatchError: if another rank's order or history was another one.
            RuntimeError: if a parameter has no gradient while a CUDA graph is recorded.
        """
        self._comparison.compare()
        given = []
        flags = list(present)
        for position, (param, name) in enumerate(zip(self.params, self.names, strict=True)):
            [grad] = self.gradients.take([position]) if param.requires_grad else [None]
            check_gradient(grad, name)
            given.append(grad)
            flags.append(grad is not None or not param.requires_grad)
        grads = with_zeros(self.params, given)
        if all(flags):
            present_flags = torch.ones(len(flags), dtype=self._dtype, device=self._device)
        else:
            present_flags = torch.tensor(flags, dtype=self._dtype, device=self._device)
        if len({grad.dtype for grad in grads}) > 1:
            grads = [grad.to(self._dtype) for grad in grads]
        # One kernel flattens them all, and one more widens them.
        packed = [torch._utils._flatten_dense_tensors(grads).to(self._dtype)] if grads else []
        digest = hash((order_digest, zlib.crc32(history.encode())))
        message = self._comparison.message(digest, self._dtype)
        flat = torch.cat([*packed, present_flags, *message])
        for ranks in reversed(self._ranks.levels):  # sharded gradients take this order too
            ranks.together(_WORDS, all_reduce, ranks.communicator, flat, dist.ReduceOp.AVG)
        sizes = [param.numel() for param in self.params]
        *averages, anywhere, mean = flat.split([*sizes, len(flags), 2])
        words = f"{history}, and used units in the order {order_digest % 2**24:06x}"
        self._comparison.averaged(digest, words, mean)
        if self._comparison.recording and not all(flags):
            raise RuntimeError(
                "every parameter must get a gradient in a step that is recorded as a CUDA graph, "
                f"but {flags.count(False)} got none, and whether other ranks have one would have "
                "to be read. Freeze them, or do not record the step."
            )
        if not all(flags):
            flags = [flag > 0 for flag in anywhere.tolist()]
        for position, (param, part) in enumerate(zip(self.params, averages, strict=True)):
            if param.requires_grad and flags[len(present) + position]:
                whole = part.view(param.shape).to(self._resting[position].dtype)
                self.gradients.add([position], [whole])
        return flags[: len(present)]
