"""AdamW whose moments are kept in bfloat16, rounded stochastically.

Decoupled weight decay: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2. Stochastic rounding:
Gupta et al., arXiv:1502.02551. Rounded to nearest, the second moment would stand still: with a
``beta2`` of 0.999 a step changes it by a thousandth at most when gradients shrink, and neighbouring
values of bfloat16 are 1/256 to 1/128 apart.

The random bits are a hash of an element's gradient and of the step. However parameters are cut over
ranks, all elements are rounded alike, and there is no generator whose state has to be saved.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class AdamW(Optimizer):
    """AdamW for fp32 parameters, with moments of 2 bytes per element.

    Beside torch's AdamW it saves 4 of 8 bytes of state per element, and 8 of the 28 that a step
    reads and writes. Each step computes in fp32, and rounds the moments when it stores them. On
    CUDA a Triton kernel updates up to 16 tensors at once; torch's operations do it elsewhere, and
    where Triton is not installed. After the first step a CUDA graph can record it, and follows an
    ``lr`` that is a tensor on the GPU.

    Args:
        params: parameters or groups of them, as of torch's; gradients must be dense.
        lr: a number, or a tensor of one element.
        betas: decay of the first and of the second moment per step.
        eps: added to the root of the second moment.
        weight_decay: times ``lr``, the part of itself that a parameter loses in a step.

    Raises:
        ValueError: for a hyperparameter out of its range.
        TypeError: in ``step()``, for a parameter that is not fp32, or a sparse gradient.
    """

    moments_dtype = torch.bfloat16

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in ("lr", lr), ("eps", eps), ("weight_decay", weight_decay):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, but got {value}. Correct it.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be from 0 to below 1, but got {betas}. Correct them.")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Ends every load, in which torch has given moments the dtype of their parameters."""
        super().__setstate__(state)
        for param, own in self.state.items():
            for key in own.keys() & {"exp_avg", "exp_avg_sq"}:
                own[key] = own[key].to(self.moments_dtype)
            if "step" in own:
                own["step"] = own["step"].to(param.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = []
        for group in self.param_groups:
            held = [param for param in group["params"] if param.grad is not None]
            updated.append((group, [self._tensors(param) for param in held]))
        if steps := [each[-1] for _, several in updated for each in several]:
            torch._foreach_add_(steps, 1)
        for group, several in updated:
            launches = defaultdict(list)
            for each in several:
                if _has_kernel(each[0]) and len({tensor.stride() for tensor in each[:4]}) == 1:
                    launches[each[0].device, each[1].dtype].append(each)
                else:
                    _update(group, *each)
            for (device, dtype), together in launches.items():
                from shard_optim import adamw_kernel

                lr = group["lr"]
                rate = lr.to(device, torch.float32) if isinstance(lr, Tensor) else lr
                with torch.cuda.device_of(together[0][0]):
                    adamw_kernel.update(together, dtype, group | {"lr": rate})
        return loss

    def _tensors(self, param: Tensor) -> tuple[Tensor, ...]:
        """The parameter, its gradient in the same memory order, both moments and the step."""
        grad = param.grad
        assert grad is not None
        if param.dtype != torch.float32 or grad.layout != torch.strided:
            raise TypeError(
                "AdamW of shard_optim must have fp32 parameters with dense gradients, but got "
                f"{param.dtype} and {grad.layout}. Keep parameters in fp32 and compute under "
                "autocast or compute_dtype, and pass sparse=False to embeddings."
            )
        if not (state := self.state[param]):
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in "exp_avg", "exp_avg_sq":
                state[name] = torch.zeros_like(param, dtype=self.moments_dtype)
        grad = grad.detach()
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return param, grad, state["exp_avg"], state["exp_avg_sq"], state["step"]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_kernel(param: Tensor) -> bool:
    return param.is_cuda and param.numel() > 0 and _has_triton()


def _update(group: Mapping[str, Any], *tensors: Tensor) -> None:
    """The kernel's computation by torch's operations."""
    param, grad, exp_avg, exp_avg_sq, step = tensors
    (beta1, beta2), lr = group["betas"], group["lr"]
    grad, m, v = grad.float(), exp_avg.float(), exp_avg_sq.float()
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    correction1, correction2 = (
        -torch.expm1(step * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
    )
    size, scale = lr / correction1, 1 / correction2.sqrt()
    param.sub_(lr * group["weight_decay"] * param + size * m / (v.sqrt() * scale + group["eps"]))
    bits = random_bits(grad, step)
    exp_avg.copy_(rounded(m, bits & 0xFFFF))
    exp_avg_sq.copy_(rounded(v, (bits >> 16) & 0xFFFF))


def random_bits(grad: Tensor, step: Tensor) -> Tensor:
    """A hash of each element of an fp32 gradient and of the step, int32."""
    bits = grad.view(torch.int32) ^ (step.to(torch.int32) * 0x61C88647)
    bits = bits * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * 0x27D4EB2F
    return bits ^ ((bits >> 16) & 0xFFFF)


def rounded(value: Tensor, noise: Tensor) -> Tensor:
    """fp32 values in bfloat16: up with the probability of the part that is cut off.

    ``noise`` is int32, uniform in [0, 2^16). Infinities and NaN stay as they are.
    """
    bits = value.view(torch.int32)
    bits = torch.where(value.isnan(), bits, bits + noise) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)
