"""A cosine learning-rate schedule with warm-up."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def cosine_learning_rate(
    step: int,
    *,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_steps: int,
    total_steps: int,
) -> float:
    """Learning rate of update ``step``, counted from 1 (step 0 is the start of the warm-up).

    It rises linearly from 0 to the maximum at ``warmup_steps``, falls along half a cosine to the
    minimum at ``total_steps`` (Loshchilov & Hutter, arXiv:1608.03983, Eq. 5), and stays there.

    Raises:
        ValueError: ``step`` is negative, ``warmup_steps`` is not between 0 and ``total_steps``, or
            the rates are not in 0 ≤ minimum ≤ maximum.
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, but got {step}.")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            "warmup_steps must be between 0 and total_steps, but got "
            f"warmup_steps={warmup_steps} and total_steps={total_steps}."
        )
    if not 0 <= min_learning_rate <= max_learning_rate:
        raise ValueError(
            "learning rates must satisfy 0 <= minimum <= maximum, but got "
            f"minimum={min_learning_rate} and maximum={max_learning_rate}."
        )
    if step < warmup_steps:
        return max_learning_rate * step / warmup_steps
    if step >= total_steps:
        return min_learning_rate
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    span = max_learning_rate - min_learning_rate
    return min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * span


@dataclass(eq=False)
class CosineSchedule:
    """Sets the learning rate of every parameter group by :func:`cosine_learning_rate`.

    A group's maximum is the rate that it has when the schedule is built, and its minimum that
    rate times ``min_ratio``. The rate of the first update is set at once; call :meth:`step` after
    each update, as with ``torch.optim.lr_scheduler``. The optimizer may be any object with
    ``param_groups``. A rate that is a tensor is filled in place, for CUDA graphs of the update.

    Raises:
        ValueError: as :func:`cosine_learning_rate`; ``min_ratio`` not from 0 to 1; from
            :meth:`step`: parameter groups that were added later.
    """

    optimizer: Optimizer
    _: KW_ONLY
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio must be between 0 and 1, but got {self.min_ratio}.")
        self._set(0, [float(group["lr"]) for group in self.optimizer.param_groups])

    def step(self) -> None:
        """Records an update and sets the rates of the next one."""
        self._set(self.updates + 1, self.max_learning_rates)

    def get_last_lr(self) -> list[float]:
        """Rate of each parameter group, as it is set now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Number of updates and the groups' maximal rates, which a continued run needs."""
        return {"updates": self.updates, "max_learning_rates": list(self.max_learning_rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state and sets the next update's rates.

        Raises:
            ValueError: the state was saved for another number of parameter groups.
        """
        self._set(int(state["updates"]), [float(rate) for rate in state["max_learning_rates"]])

    def _set(self, updates: int, max_learning_rates: list[float]) -> None:
        groups = self.optimizer.param_groups
        if len(max_learning_rates) != len(groups):
            raise ValueError(
                "a schedule must hold one rate per parameter group, but got "
                f"{len(max_learning_rates)} for {len(groups)} groups. Make the schedule after "
                "add_param_group."
            )
        self.updates, self.max_learning_rates = updates, max_learning_rates
        steps = {"warmup_steps": self.warmup_steps, "total_steps": self.total_steps}
        for group, maximum in zip(groups, max_learning_rates, strict=True):
            least = maximum * self.min_ratio
            rate = cosine_learning_rate(
                updates + 1, max_learning_rate=maximum, min_learning_rate=least, **steps
            )
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
