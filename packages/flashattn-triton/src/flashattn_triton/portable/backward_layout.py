"""What the launches of the backward pass's kernels have in common: shapes, strides and problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    Number,
    Packing,
    Parameter,
    Strides,
    can_use_tma,
    given_parameters,
    option_numbers,
    outer,
    padded,
    stride_numbers,
)
from flashattn_triton.mask_and_bias import MaskAndBias, MaskAndBiasSpecialization
from flashattn_triton.portable.options import KernelOptions, kernel_options
from flashattn_triton.problem import Problem

_Options = TypeVar("_Options", bound=KernelOptions)


@dataclass(frozen=True, kw_only=True)
class BackwardLayout:
    """One kind of input of the key pass, the query pass or the bias pass.

    shapes: of Q, K and V.
    strides: of Q, K, V and dO.
    gradient_strides: of dQ, or of the fp32 sum that the fused form adds to, of dK and of dV; none
        of the bias pass.
    packing: where packed sequences start, else None.
    n_padded: queries that have statistics; see ``preprocess``.
    given: parameters for the tensors that come with them.
    readable_by_tma: whether the TMA can read Q, K, V and dO.
    adds: whether gradients are added to fp32 tensors.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    strides: tuple[Strides, Strides, Strides, Strides]
    gradient_strides: tuple[Strides, ...]
    packing: Packing | None
    problem: Problem
    specialization: MaskAndBiasSpecialization
    given: Mapping[str, Parameter]
    n_padded: int
    readable_by_tma: bool
    adds: bool = False

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        gradient_strides: tuple[Strides, ...],
        problem: Problem,
        packing: Packing | None,
        mask_and_bias: MaskAndBias,
        n_padded: int,
        *,
        adds: bool = False,
    ) -> BackwardLayout:
        """The layout of Q, K, V and dO; the rest is as said above."""
        query, key, value, grad_out = tensors
        return cls(
            device=query.device,
            dtype=query.dtype,
            shapes=(query.shape, key.shape, value.shape),
            strides=(query.stride(), key.stride(), value.stride(), grad_out.stride()),
            gradient_strides=gradient_strides,
            packing=packing,
            problem=problem,
            specialization=mask_and_bias.specialization,
            given=given_parameters(packing, mask_and_bias),
            n_padded=n_padded,
            readable_by_tma=packing is None and all(map(can_use_tma, tensors)),
            adds=adds,
        )

    @property
    def heads(self) -> tuple[int, int]:
        """H and G."""
        return self.shapes[0][1], self.shapes[1][1]

    @property
    def widths(self) -> tuple[int, int]:
        """The powers of two at which D and E are computed."""
        return padded(self.shapes[0][3], self.dtype), padded(self.shapes[2][3], self.dtype)

    @property
    def do_shape(self) -> tuple[int, int, int, int]:
        """The shape of dO."""
        batch, heads, n_queries, _ = self.shapes[0]
        return batch, heads, n_queries, self.shapes[2][3]

    def outer_gradients(self) -> tuple[Strides, Strides, Strides]:
        """Batch, head and row strides of dQ, dK and dV."""
        dq, dk, dv = (outer(stride, self.packing is not None) for stride in self.gradient_strides)
        return dq, dk, dv

    def numbers(self) -> dict[str, Number]:
        """The kernels' arguments that are numbers, but for heads and strides of gradients."""
        q, k, v, do = (outer(stride, self.packing is not None) for stride in self.strides)
        heads, kv_heads = self.heads
        return {
            **stride_numbers(q=q, k=k, v=v, do=do),
            **self.specialization.numbers,
            "N_PADDED": self.n_padded,
            "N_QUERIES": self.shapes[0][2],
            "N_KEYS": self.shapes[1][2],
            "HEADS_PER_KV": heads // kv_heads,
            **option_numbers(self.problem),
        }

    def constants(self, tiles: Tiles, options: KernelOptions) -> dict[str, Any]:
        """The compile-time arguments of all of these kernels."""
        return {
            "D": self.shapes[0][3],
            "Q_TILE_SIZE": tiles.queries,
            "K_TILE_SIZE": tiles.keys,
            "is_causal": self.problem.band[1] is not None,
            "OPTIONS": options,
        }

    def options(self, kind: type[_Options], kernel: Any, tiles: Tiles, **others: Any) -> _Options:
        """The options of a kernel, which are of that kind."""
        return kernel_options(
            kind,
            kernel,
            self.problem,
            self.specialization,
            (self.shapes[0][3], self.shapes[2][3]),
            self.dtype,
            (*self.strides, *self.gradient_strides),
            packed=self.packing is not None,
            use_tma=self.use_tma(tiles),
            adds=self.adds,
            **others,
        )

    def use_tma(self, tiles: Tiles) -> bool:
        """Whether the TMA reads operands."""
        return self.readable_by_tma and tiles.use_tma
