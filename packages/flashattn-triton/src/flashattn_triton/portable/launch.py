"""How tensors of one kind become launches of the portable kernels.

Kernels name the same things alike: a launch looks up which of them its kernel has parameters for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    Launch,
    Number,
    Packing,
    Parameter,
    Strides,
    TileView,
    can_use_tma,
    dot_precision,
    given_parameters,
    is_wide,
    option_numbers,
    padded,
    register_limit_of_alibi,
    stride_numbers,
    tile_view,
    tiles_of_head,
)
from flashattn_triton.mask_and_bias import MaskAndBias
from flashattn_triton.portable.options import KernelOptions
from flashattn_triton.problem import Problem

_Options = TypeVar("_Options", bound=KernelOptions)


def tma_tiles(x: Tensor, rows: int) -> TileView:
    """Tiles of so many rows of a (B, H, N, D) tensor, as wide as kernels compute them."""
    return tile_view(x.shape, x.stride(), [1, 1, rows, padded(x.shape[3], x.dtype)], x.dtype)


@dataclass(frozen=True, kw_only=True)
class KernelInputs:
    """One kind of input of the portable kernels. Tensors are (B, H, N, D), with unit last strides.

    Attributes:
        packing: where packed sequences start, else None.
        grad_out: dO, of a backward pass.
        results: strides of the output and the logsumexp, or of the gradients, by the letters that
            the kernels' parameters have.
        n_padded: queries that have statistics, of a backward pass; see ``preprocess``.
        adds: whether gradients are added to fp32 tensors.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    problem: Problem
    mask_and_bias: MaskAndBias
    packing: Packing | None = None
    grad_out: Tensor | None = None
    results: Mapping[str, Strides] = field(default_factory=dict)
    n_padded: int = 0
    adds: bool = False

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of dQ, dK and dV."""
        return torch.float32 if self.adds else self.query.dtype

    @property
    def strides(self) -> dict[str, Strides]:
        """Strides of all tensors that the kernels read or write."""
        read = {"q": self.query.stride(), "k": self.key.stride(), "v": self.value.stride()}
        if self.grad_out is not None:
            read["do"] = self.grad_out.stride()
        return {**read, **self.results}

    @property
    def readable_by_tma(self) -> bool:
        """Whether the TMA can read what kernels walk over."""
        read = [self.key, self.value]
        if self.grad_out is not None:
            read += [self.query, self.grad_out]
        return self.packing is None and all(map(can_use_tma, read))

    def options(self, kind: type[_Options], kernel: Any, tiles: Tiles, **others: Any) -> _Options:
        """The compile-time options of ``kernel``, of class ``kind``.

        ``tiles.use_tma`` counts only where the TMA can read the tensors. ``others``: what only
        ``kind`` has, and options that are not as most launches have them.
        """
        left, right = self.problem.band
        given, dtype = self.mask_and_bias, self.query.dtype
        has_prefix = given.prefix_lengths is not None
        one_sided = right is not None and right <= 0 and not has_prefix
        head_dim, value_dim = self.query.shape[3], self.value.shape[3]
        return kind(
            e=value_dim,
            d_padded=padded(head_dim, dtype),
            e_padded=padded(value_dim, dtype),
            packed=self.packing is not None,
            bottom_right=self.problem.bottom_right,
            has_left=left is not None,
            has_softcap=self.problem.softcap is not None,
            has_prefix=has_prefix,
            alibi=0 if given.alibi_slopes is None else 1 + one_sided,
            has_bias=given.bias is not None,
            has_mask=given.mask is not None,
            wide=is_wide(*self.strides.values()),
            precision=dot_precision(dtype),
            interpreted=not isinstance(kernel, triton.JITFunction),
            use_tma=tiles.use_tma and self.readable_by_tma,
            adds=self.adds,
            **others,
        )

    def launch(
        self,
        kernel: Any,
        tiles: Tiles,
        options: KernelOptions,
        parameters: Mapping[str, Parameter],
        numbers: Mapping[str, Number] | None = None,
        programs: int | None = None,
        **strides: Strides,
    ) -> Launch:
        """The launch of ``kernel`` with this shape and these compile-time options.

        ``parameters``: its tensors, but for most of those of ``packing`` and ``mask_and_bias``.
        ``numbers``: its arguments that no other kernel has. ``programs``: the grid; None if each
        program owns a tile of one head's queries. ``strides`` take the place of ``results`` of the
        same names.
        """
        (_, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = self.query.shape, self.key.shape
        registers = None
        if programs is None:
            programs = tiles_of_head(self.query.shape, tiles.queries, self.packing) * heads
            if self.mask_and_bias.alibi_slopes is not None:
                width = max(head_dim, options.e)
                registers = register_limit_of_alibi(tiles, self.query.dtype, width)
        outer = {name: stride[:3] for name, stride in {**self.strides, **strides}.items()}
        if self.packing is not None:  # sequences start where it says
            outer = {name: (0, *stride[1:]) for name, stride in outer.items()}
        names = ("stride_bb", "stride_bh", "stride_bq", "stride_bk")
        known = set(kernel.arg_names)
        every: dict[str, Number] = {
            **stride_numbers(**outer),
            **dict(zip(names, self.mask_and_bias.bias_strides, strict=True)),
            "N_PADDED": self.n_padded,
            "N_QUERIES": n_queries,
            "N_KEYS": n_keys,
            "N_HEADS": heads,
            "N_KV_HEADS": kv_heads,
            "HEADS_PER_KV": heads // kv_heads,
            **option_numbers(self.problem),
            **(numbers or {}),
        }
        given = given_parameters(self.packing, self.mask_and_bias)
        return Launch(
            kernel,
            self.query.device,
            programs,
            {**{name: x for name, x in given.items() if name in known}, **parameters},
            {name: x for name, x in every.items() if name in known},
            {
                "D": head_dim,
                "Q_TILE_SIZE": tiles.queries,
                "K_TILE_SIZE": tiles.keys,
                "is_causal": self.problem.band[1] is not None,
                "OPTIONS": options,
            },
            warps=tiles.warps,
            stages=tiles.stages,
            registers=registers,
        )
