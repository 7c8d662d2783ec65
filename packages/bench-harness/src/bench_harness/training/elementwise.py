"""The elementwise layers of the language model by a library's kernels instead of torch's.

Norms, rotary positions and SwiGLU read and write much memory for little arithmetic. Two ways make
few kernels of them: ``torch.compile``, and kernels written by hand, of which Liger Kernel (Hsu et
al., arXiv:2410.10989) has the widest use. The setting ``elementwise`` of a variant says which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from basics_model.model import RMSNorm, SelfAttention, SwiGLU, shared_input
from bench_harness.core import CaseSkipped

if TYPE_CHECKING:
    from torch import Tensor, nn

    Apply = Callable[..., Any]


def use_liger(module: nn.Module) -> None:
    """Lets the norms, rotary positions and SwiGLU of a language model run by Liger's kernels.

    Parameters and their names stay as they are.

    Raises:
        CaseSkipped: the package is missing, or its kernels have no device to run on here.
        ValueError: the model has no layer that they can replace.
    """
    if not torch.cuda.is_available():
        raise CaseSkipped(
            "elementwise must be torch without a CUDA device, but got liger. Remove it."
        )
    _functions()  # says at once whether the package is there
    replaced = 0
    for layer in module.modules():
        liger = _LIGER.get(type(layer))
        if liger is not None:
            layer.__class__ = liger
            replaced += 1
    if not replaced:
        raise ValueError(
            f"elementwise must be torch for a model without layers of basics_model, but got liger "
            f"for {type(module).__name__}. Remove it."
        )


@functools.cache
def _functions() -> tuple[Apply, Apply, Apply]:
    """Liger's functions for norms, SwiGLU and rotary positions of neighbouring pairs."""
    try:
        from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise CaseSkipped(
            f"elementwise must be importable, but got an error: {error}. Install "
            "bench-harness[liger], or remove elementwise."
        ) from error
    return LigerRMSNormFunction.apply, LigerSiLUMulFunction.apply, LigerLlama4RopeFunction.apply


class _LigerNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        norm, _, _ = _functions()
        return cast("Tensor", norm(x, self.weight, self.eps))


class _LigerSwiGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        _, silu_times, _ = _functions()
        x = shared_input(x)
        return cast("Tensor", self.down(silu_times(self.gate(x), self.up(x))))


class _LigerAttention(SelfAttention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, _, rotate = _functions()
        x = shared_input(x)
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, D]
            for projection in (self.query, self.key, self.value)
        )
        # Of each pair's two entries in the tables, the second sine has the sign of the angle.
        query, key = rotate(query, key, torch.stack((cos[:, ::2], sin[:, 1::2]), -1).flatten(-2))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = self.attention(query, key, value)  # [B, H, S, D]
        return cast("Tensor", self.output(mixed.transpose(1, 2).flatten(-2)))


_LIGER: dict[type, type] = {
    RMSNorm: _LigerNorm,
    SwiGLU: _LigerSwiGLU,
    SelfAttention: _LigerAttention,
}
