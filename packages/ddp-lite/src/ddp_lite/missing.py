"""Side task: parameters without a gradient, on which the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.engine import ABSENT, Engine, SideTask
from ddp_lite.errors import MissingGradientError
from ddp_lite.ranks import name_ranks

Policy = Literal["skip-if-all", "zeros", "error"]


class MissingGradients(SideTask):
    """Carries out one of the policies for parameters without a gradient.

    The presence of each gradient travels with the last bucket, so agreeing costs no collective.

    Args:
        policy: ``missing_gradients`` of ``DataParallelBase``.

    Raises:
        ValueError: an unknown policy.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in get_args(Policy):
            raise ValueError(
                f"missing_gradients must be one of {get_args(Policy)}, but got {policy!r}. Choose "
                "one of them"
            )
        self._policy = policy
        self._absent: set[int] = set()  # parameters without a gradient on this rank
        self._presence: Tensor | None = None  # for each parameter, the share of ranks that have it

    def begin(self, engine: Engine) -> None:
        """Forgets the last step."""
        self._absent, self._presence = set(), None

    def taken(self, engine: Engine, bucket: Bucket, absent: Sequence[int], again: bool) -> None:
        """Notes which parameters got no gradient; under "error", from this step's backward."""
        if self._policy == "error":
            marks = engine.arrivals.marks
            absent = [index for index in bucket.indices if marks[index] == ABSENT]
        if again:
            self._absent -= set(bucket.indices) - set(absent)
        elif absent:
            self._absent.update(absent)

    def message(self, engine: Engine, dtype: torch.dtype, again: bool) -> Tensor | None:
        """1 for each parameter that has a gradient on this rank, else 0."""
        if self._policy == "zeros":
            return None
        self._presence = torch.ones(len(engine.specs), dtype=dtype, device=engine.ranks.device)
        if self._absent:
            self._presence[list(self._absent)] = 0
        return self._presence

    def averaged(self, engine: Engine) -> None:
        """Raises, or takes zeros back where no rank had a gradient.

        Raises:
            MissingGradientError: policy "error", on every rank.
        """
        if self._presence is None:
            return
        if self._policy == "error":
            if float(self._presence.float().min()) < 1 - 0.5 / engine.ranks.size:
                raise self._error(engine)
        elif self._absent:
            anywhere = self._presence.tolist()
            for index in self._absent:
                if anywhere[index] == 0:
                    engine.parameters[index].grad = None

    def _error(self, engine: Engine) -> MissingGradientError:
        """The same on every rank. Collective."""
        ranks = engine.ranks
        absent = [engine.specs[index].name for index in sorted(self._absent)]
        what = "the exchange of missing gradients' names"
        ranks_by_name: dict[str, list[int]] = {}
        for rank, names in enumerate(ranks.together(what, ranks.gather, absent)):
            for name in names:
                ranks_by_name.setdefault(name, []).append(rank)
        shown = "; ".join(f"{name} on {name_ranks(r)}" for name, r in ranks_by_name.items())
        return MissingGradientError(
            "with missing_gradients='error' every trainable parameter must get a gradient on every "
            f"rank, but in step {ranks.step} these got none: {shown}. Use them in the loss, freeze "
            "them with requires_grad_(False), or choose missing_gradients='skip-if-all' or 'zeros'"
        )
