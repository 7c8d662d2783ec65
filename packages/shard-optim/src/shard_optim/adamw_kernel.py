"""The kernel of ``AdamW``'s step; a module of its own because it needs Triton.

It updates up to 16 tensors, which it is given as addresses: Triton's launcher is slow at tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddp_lite.peer.kernel import DTYPES, blocks, launches, pointer

_BLOCK, _NUM_WARPS = 2048, 8  # elements that one program updates, and the warps that do it


def update(
    tensors: Iterable[tuple[Tensor, ...]], gradients: torch.dtype, group: Mapping[str, Any]
) -> None:
    """Updates fp32 parameters and their moments in place, on the current stream of their device.

    Args:
        tensors: parameter, gradient, both moments and step of each, dense, in one memory order.
        gradients: the dtype of the gradients.
        group: hyperparameters. A tensor ``lr``, fp32 on the device, is read when the kernel runs.
    """
    entries = ((*(t.data_ptr() for t in each), each[0].numel()) for each in tensors)
    lr, betas = group["lr"], group["betas"]
    in_memory = isinstance(lr, Tensor)
    for several, aligned in launches(entries):
        adamw_kernel[(blocks(several, _BLOCK),)](
            *zip(*several, strict=True),
            lr.data_ptr() if in_memory else float(lr),
            *(float(group[name]) for name in ("weight_decay", "eps")),
            *(math.log(beta) if beta else -math.inf for beta in betas),
            *(1.0 - beta for beta in betas),
            in_memory,
            DTYPES[gradients],
            aligned,
            _BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # the same bits in whatever launch a tensor is
        )


@triton.jit(do_not_specialize=["lr"])
def adamw_kernel(  # type: ignore[no-untyped-def]
    parameters,
    grads,
    exp_avgs,
    exp_avg_sqs,
    steps,
    numels,
    lr,
    weight_decay,
    eps,
    log_beta1,
    log_beta2,
    weight1,
    weight2,
    lr_in_memory: tl.constexpr,
    gradients: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """See ``update``; a weight is 1 - beta, ``aligned`` is whether all is divisible by 16."""
    # Which tensor this program works on, and which of its blocks.
    index = tl.program_id(0)
    param, grad, exp_avg, exp_avg_sq = parameters[0], grads[0], exp_avgs[0], exp_avg_sqs[0]
    counter, numel, first_of_own = steps[0], numels[0], 0
    first = tl.cdiv(numels[0], block)
    for i in tl.static_range(1, len(parameters)):
        if index >= first:
            param, grad, exp_avg, exp_avg_sq = parameters[i], grads[i], exp_avgs[i], exp_avg_sqs[i]
            counter, numel, first_of_own = steps[i], numels[i], first
        first += tl.cdiv(numels[i], block)
    offset = (index - first_of_own).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < numel
    p_at = pointer(param, tl.float32, aligned) + offset
    m_at = pointer(exp_avg, tl.bfloat16, aligned) + offset
    v_at = pointer(exp_avg_sq, tl.bfloat16, aligned) + offset
    g = tl.load(pointer(grad, gradients, aligned) + offset, inside).to(tl.float32)
    m = tl.load(m_at, inside).to(tl.float32)
    v = tl.load(v_at, inside).to(tl.float32)
    p = tl.load(p_at, inside)
    step = tl.load(pointer(counter, tl.float32, False))
    rate = tl.load(pointer(lr, tl.float32, False)) if lr_in_memory else lr

    m = m * (1 - weight1) + g * weight1
    v = v * (1 - weight2) + g * g * weight2
    size = rate / _correction(step * log_beta1)
    scale = 1 / tl.sqrt(_correction(step * log_beta2))
    tl.store(p_at, p - (rate * weight_decay * p + size * m / (tl.sqrt(v) * scale + eps)), inside)
    # As ``random_bits`` and ``rounded`` of adamw.py.
    bits = g.to(tl.uint32, bitcast=True) ^ (step.to(tl.uint32) * 0x61C88647)
    bits *= 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x27D4EB2F
    bits ^= bits >> 16
    tl.store(m_at, _rounded(m, bits & 0xFFFF), inside)
    tl.store(v_at, _rounded(v, bits >> 16), inside)


@triton.jit
def _correction(exponent):  # type: ignore[no-untyped-def]
    """1 - exp(exponent), by its series where the difference would lose its digits."""
    series = 1 + exponent / 2 * (1 + exponent / 3 * (1 + exponent / 4 * (1 + exponent / 5)))
    return tl.where(exponent > -0.1, -exponent * series, 1 - tl.exp(exponent))


@triton.jit
def _rounded(value, noise):  # type: ignore[no-untyped-def]
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value == value, bits + noise, bits)  # a NaN stays
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
