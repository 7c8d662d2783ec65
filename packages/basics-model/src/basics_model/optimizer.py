"""AdamW, a cosine learning-rate schedule with warm-up, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101, Algorithm 2).

    Update t of a parameter θ with gradient g:

        θ ← θ - lr·weight_decay·θ
        m ← β₁·m + (1 - β₁)·g
        v ← β₂·v + (1 - β₂)·g²
        θ ← θ - lr·m̂ / (√v̂ + ε),   m̂ = m / (1 - β₁ᵗ),   v̂ = v / (1 - β₂ᵗ)

    This is ``torch.optim.AdamW``'s update, with the same defaults and the same names in its state
    (``step``, ``exp_avg``, ``exp_avg_sq``), so either one loads the other's state. The moments have
    the parameter's dtype: 8 bytes of state per fp32 parameter. One update at a time allocates a
    temporary as large as its parameter.

    Args:
        params: parameters, named parameters, or dictionaries that describe parameter groups.
        lr: learning rate, at least 0.
        betas: decay rates of the two moments, each at least 0 and below 1.
        eps: added to the denominator, at least 0.
        weight_decay: decoupled decay, at least 0.

    Raises:
        ValueError: a hyperparameter outside its range, in the defaults or in any group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_hyperparameters(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with their own hyperparameters; missing ones take the defaults."""
        _check_hyperparameters(self.defaults | param_group)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients, called first if given.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise ValueError(
                "AdamW needs dense gradients, but got a sparse one of shape "
                f"{tuple(gradient.shape)}. Build the embedding with sparse=False."
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = float(state["step"])  # kept on the CPU, so this does not wait for a device
        first: Tensor = state["exp_avg"]
        second: Tensor = state["exp_avg_sq"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))


def _check_hyperparameters(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, but got {group[name]!r}.")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers of at least 0 and below 1, but got {betas!r}.")


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


class HasParamGroups(Protocol):
    """Anything with the parameter groups of a ``torch.optim.Optimizer``."""

    param_groups: list[dict[str, Any]]


class CosineSchedule:
    """Sets the learning rate of every parameter group by :func:`cosine_learning_rate`.

    A group's maximum is the rate that it has when the schedule is built, and its minimum that
    rate times ``min_ratio``. The rate of the first update is set at once; call :meth:`step` after
    each update, as with ``torch.optim.lr_scheduler``. The optimizer may be any object with
    ``param_groups``. A rate that is a tensor is filled in place, so that a CUDA graph of the update
    sees it.

    Raises:
        ValueError: as :func:`cosine_learning_rate`, or ``min_ratio`` is not between 0 and 1.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        warmup_steps: int,
        total_steps: int,
        min_ratio: float = 0.1,
    ) -> None:
        if not 0 <= min_ratio <= 1:
            raise ValueError(f"min_ratio must be between 0 and 1, but got {min_ratio}.")
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_ratio = min_ratio
        self.max_learning_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.updates = 0
        self._set()

    def step(self) -> None:
        """Records an update and sets the rates of the next one."""
        self.updates += 1
        self._set()

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
        rates = [float(rate) for rate in state["max_learning_rates"]]
        if len(rates) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the schedule's state must hold one rate per parameter group, but got "
                f"{len(rates)} for {len(self.optimizer.param_groups)} groups."
            )
        self.updates = int(state["updates"])
        self.max_learning_rates = rates
        self._set()

    def _set(self) -> None:
        for group, maximum in zip(
            self.optimizer.param_groups, self.max_learning_rates, strict=True
        ):
            rate = cosine_learning_rate(
                self.updates + 1,
                max_learning_rate=maximum,
                min_learning_rate=maximum * self.min_ratio,
                warmup_steps=self.warmup_steps,
                total_steps=self.total_steps,
            )
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, *, eps: float = 1e-6) -> Tensor:
    """Scales all gradients in place so that their joint L2 norm is at most ``max_norm``.

    Gradients g become g·min(1, max_norm / (‖g‖ + eps)), where the norm runs over every value of
    every gradient (Pascanu et al., arXiv:1211.5063) and accumulates in fp32 or wider. Nothing waits
    for the device.

    Args:
        parameters: those without a gradient are skipped; all gradients on one device.

    Returns:
        The norm before clipping, a scalar tensor on the gradients' device (0 without gradients).

    Raises:
        ValueError: ``max_norm`` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, but got {max_norm}.")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (total + eps)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return total
