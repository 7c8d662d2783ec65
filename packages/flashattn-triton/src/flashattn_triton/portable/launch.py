"""How tensors of one kind become launches of the portable kernels, and their compile-time options.

Kernels name the same things alike: a launch looks up which of them its kernel has parameters for.

Options are one object, which is one parameter of a kernel. In a kernel an attribute of it is a
Python number or string. Where Triton 3.6 wants a ``constexpr`` (shapes, ranges, strings as
arguments), kernels bind the attribute to a ``tl.constexpr`` name first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    POINTERS,
    Launch,
    Number,
    Strides,
    can_use_tma,
    dot_precision,
    option_numbers,
    padded,
    stride_numbers,
    tile_view,
    tiles_of_head,
)
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import Problem
from flashattn_triton.triton_versions import Parameter

_LARGEST_TILE = 256


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """What kernels and their functions are specialised on, besides D, tiles and ``is_causal``.

    e: head_dim of value.
    d_padded: and ``e_padded``: the powers of two at which D and E are computed.
    packed: sequences are packed. bottom_right: the last query's diagonal ends at the last key.
    has_left: no query sees a key more than a window before its diagonal.
    alibi: 0 without slopes, ``primitives.CAUSAL_ALIBI`` where no key behind the diagonal is seen,
        else 1.
    has_mask: some keys are hidden from all queries, by a mask (B, N_k).
    wide: rows of one tile can be more than 2^31 elements apart.
    precision: of products, see :func:`~flashattn_triton.launch.dot_precision`.
    interpreted: Triton's interpreter runs the kernel.
    use_tma: operands are loaded by the TMA, from descriptors. bias_tma: so is the bias.
    reloads: wide fp32 operands are loaded once more by it, see ``primitives.tma_reload``.
    adds: gradients are added to what is in memory, in fp32.
    largest_only: the forward kernel computes each query's largest score alone.
    dq_mode: how the key pass adds its part of dQ. statistics_by_tma: it loads them from a
        descriptor.
    columns: of operands that the bias pass multiplies at a time.
    shared_by_queries: the bias has one row for all queries. shared_by_keys: one column for all
        keys.
    """

    e: int
    d_padded: int
    e_padded: int
    packed: bool
    bottom_right: bool
    has_left: bool
    has_softcap: bool
    has_prefix: bool
    alibi: int
    has_bias: bool
    has_mask: bool
    wide: bool
    precision: str
    interpreted: bool
    use_tma: bool
    reloads: bool
    adds: bool
    bias_tma: bool = False
    has_sinks: bool = False
    largest_only: bool = False
    negative_scale: bool = False
    dq_mode: int = 0
    statistics_by_tma: bool = False
    columns: int = 0
    shared_by_queries: bool = False
    shared_by_keys: bool = False


@dataclass(frozen=True)
class KernelInputs:
    """One kind of input of the portable kernels. Tensors are (B, H, N, D), with unit last strides.

    Attributes:
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
    given: Given = NOTHING
    grad_out: Tensor | None = None
    results: Mapping[str, Strides] = field(default_factory=dict)
    n_padded: int = 0
    adds: bool = False

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
        return not self.given.packed and all(map(can_use_tma, read))

    def _options(self, kernel: Any, tiles: Tiles, **others: Any) -> KernelOptions:
        """The compile-time options of ``kernel``; ``others`` are those of this kernel alone.

        ``tiles.use_tma`` counts only where the TMA can read the tensors.
        """
        left, right = self.problem.band
        given, dtype = self.given, self.query.dtype
        has_prefix = given.prefix_lengths is not None
        one_sided = right is not None and right <= 0 and not has_prefix
        strides = self.strides.values()
        d_padded, value_dim = padded(self.query.shape[3], dtype), self.value.shape[3]
        precision, use_tma = dot_precision(dtype), tiles.use_tma and self.readable_by_tma
        return KernelOptions(
            e=value_dim,
            d_padded=d_padded,
            e_padded=padded(value_dim, dtype),
            packed=given.packed,
            bottom_right=self.problem.bottom_right,
            has_left=left is not None,
            has_softcap=self.problem.softcap is not None,
            has_prefix=has_prefix,
            alibi=0 if given.alibi_slopes is None else 1 + one_sided,
            has_bias=given.bias is not None,
            has_mask=given.mask is not None,
            wide=any(abs(rows) * _LARGEST_TILE >= 2**31 for _, _, rows, *_ in strides),
            precision=precision,
            interpreted=not isinstance(kernel, triton.JITFunction),
            use_tma=use_tma,
            reloads=use_tma and precision == "bf16x6" and d_padded > 128,
            adds=self.adds,
            **others,
        )

    def _tensors(self, tiles: Tiles, by_tma: Collection[str]) -> dict[str, Parameter]:
        """The kernels' parameters for tensors, tiles of those that the TMA loads."""
        fp32 = torch.float32
        of_gradients = fp32 if self.adds else self.query.dtype
        tensors: dict[str, Parameter] = {
            **dict.fromkeys(("dQ_ptr", "dK_ptr", "dV_ptr"), of_gradients),
            **dict.fromkeys(("L_ptr", "statistics_ptr"), fp32),
            **{n: x if x is None else x.dtype for n, x in zip(POINTERS, self.given, strict=True)},
        }
        for name, x, rows in (
            ("Q_ptr", self.query, tiles.queries),
            ("K_ptr", self.key, tiles.keys),
            ("V_ptr", self.value, tiles.keys),
            ("dO_ptr", self.grad_out, tiles.queries),
        ):
            tensors[name] = self.query.dtype
            if x is not None and name in by_tma:
                block = [1, 1, rows, padded(x.shape[3], x.dtype)]
                tensors[name] = tile_view(x.shape, x.stride(), block, x.dtype)
        return tensors

    def launch(
        self,
        kernel: Any,
        tiles: Tiles,
        parameters: Mapping[str, Parameter],
        numbers: Mapping[str, Number] | None = None,
        programs: int | None = None,
        *,
        walked: Collection[str],
        **options: Any,
    ) -> Launch:
        """The launch of ``kernel`` with this shape and these compile-time options of its own.

        ``parameters``: its tensors that others lack, or have in another form. ``numbers``: its
        arguments that no other kernel has. ``programs``: the grid; None if each program owns a
        tile of one head's queries. ``walked``: inputs that the TMA loads if it can.
        """
        known_options = self._options(kernel, tiles, **options)
        (_, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = self.query.shape, self.key.shape
        registers = None
        if programs is None:
            programs = tiles_of_head(self.query.shape, tiles.queries, self.given) * heads
            # Without ALiBi a thread takes 140 to 158 registers, and three programs of 4 warps share
            # a multiprocessor of sm_90. With it the compiler would take up to 217.
            narrow = self.query.dtype.itemsize == 2 and max(head_dim, self.value.shape[3]) <= 64
            is_crowded = narrow and tiles.use_tma and tiles.warps == 4
            registers = 168 if is_crowded and self.given.alibi_slopes is not None else None
        outer = {name: stride[:3] for name, stride in self.strides.items()}
        if self.given.packed:  # sequences start where cu_seqlens says
            outer = {name: (0, *stride[1:]) for name, stride in outer.items()}
        bias, known = self.given.bias, set(kernel.arg_names)
        of_bias = dict.fromkeys(("stride_bb", "stride_bh", "stride_bq", "stride_bk"))
        if bias is not None:  # 0 in dimensions that share it
            sizes = zip(of_bias, bias.shape, bias.stride(), strict=True)
            of_bias = {name: 0 if n == 1 else stride for name, n, stride in sizes}
        every: dict[str, Number] = {
            **stride_numbers(**outer),
            **of_bias,
            "N_PADDED": self.n_padded,
            "N_QUERIES": n_queries,
            "N_KEYS": n_keys,
            "N_HEADS": heads,
            "N_KV_HEADS": kv_heads,
            "HEADS_PER_KV": heads // kv_heads,
            **option_numbers(self.problem),
            **(numbers or {}),
        }
        tensors = self._tensors(tiles, walked if known_options.use_tma else ())
        return Launch(
            kernel,
            self.query.device,
            programs,
            {**{name: x for name, x in tensors.items() if name in known}, **parameters},
            {name: x for name, x in every.items() if name in known},
            {
                "D": head_dim,
                "Q_TILE_SIZE": tiles.queries,
                "K_TILE_SIZE": tiles.keys,
                "is_causal": self.problem.band[1] is not None,
                "OPTIONS": known_options,
            },
            warps=tiles.warps,
            stages=tiles.stages,
            registers=registers,
        )
