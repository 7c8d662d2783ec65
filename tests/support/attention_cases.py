"""Problems that attention is tested on: each matrix of cases, and what a case's id spells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashattn_triton.hopper import eligibility
from flashattn_triton.problem import Causal, Problem

DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CAUSAL: tuple[Causal, ...] = ("none", "top-left", "bottom-right")


@dataclass(frozen=True)
class Case:
    """One attention problem. ``lengths`` are (N_q, N_k) of every sequence, or of each if packed."""

    batch: int
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    head_dims: tuple[int, int]
    dtype_name: str
    causal: Causal = "none"
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    scale: float | None = None
    packed: bool = False
    alibi: str | None = None  # slopes for each of "heads", or of "batch" too
    bias: str | None = None  # the dimensions that it has, of "bhqk"
    prefix: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype_name]

    @property
    def seqlens(self) -> tuple[tuple[int, int], ...]:
        return self.lengths

    @property
    def options(self) -> Problem:
        return Problem(
            causal=self.causal,
            scale=self.head_dims[0] ** -0.5 if self.scale is None else self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    @property
    def keywords(self) -> dict[str, Any]:
        window = None if self.window == (None, None) else self.window
        causal = False if self.causal == "none" else self.causal
        return {"causal": causal, "scale": self.scale, "window": window, "softcap": self.softcap}

    def cu_seqlens(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        starts = ([0, *accumulate(column)] for column in zip(*self.lengths, strict=True))
        q, k = (torch.tensor(s, dtype=torch.int32, device=device) for s in starts)
        return q, k

    def __str__(self) -> str:
        lengths = "_".join(f"{q}x{k}" if q != k else f"{q}" for q, k in self.lengths)
        heads, kv_heads = self.heads
        dim, value_dim = self.head_dims
        parts = [
            f"B{self.batch}",
            f"H{heads}x{kv_heads}" if heads != kv_heads else f"H{heads}",
            f"T{lengths}",
            f"D{dim}x{value_dim}" if dim != value_dim else f"D{dim}",
            self.dtype_name,
        ]
        masks = {"top-left": "causal", "bottom-right": "causalbr", "bottom-right-window": "br"}
        parts += [masks[self.causal]] if self.causal != "none" else []
        parts += [f"window{self.window[0]}_{self.window[1]}"] if any_bound(self.window) else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap is not None else []
        parts += [f"scale{self.scale:g}"] if self.scale is not None else []
        parts += [f"alibi_{self.alibi}"] if self.alibi else []
        parts += [f"bias_{self.bias}"] if self.bias else []
        parts += ["prefix"] if self.prefix else []
        return "-".join(parts).replace("None", "inf")


def any_bound(window: tuple[int | None, int | None]) -> bool:
    return window != (None, None)


def dense(
    batch: int,
    heads: int | tuple[int, int],
    n_queries: int,
    n_keys: int,
    head_dim: int | tuple[int, int],
    dtype_name: str,
    **options: Any,
) -> Case:
    heads = heads if isinstance(heads, tuple) else (heads, heads)
    head_dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    return Case(batch, heads, ((n_queries, n_keys),), head_dims, dtype_name, **options)


# Each row is here for its own reason; together they take seconds under the interpreter.
CASES = [
    dense(1, 1, 1, 1, 16, "fp32"),  # the smallest problem
    dense(1, 2, 3, 3, 16, "bf16", causal="top-left"),  # less than a tile in every direction
    dense(2, 2, 64, 64, 64, "fp32", causal="top-left"),  # exactly one tile
    dense(2, 2, 64, 64, 64, "fp16"),
    dense(1, (4, 2), 113, 203, 64, "bf16", causal="top-left"),  # ragged, grouped heads
    dense(1, (2, 1), 113, 203, 64, "fp32", causal="bottom-right"),  # decoding with a cache
    dense(1, 1, 203, 113, 32, "fp32", causal="bottom-right"),  # 90 queries see no key
    dense(1, 1, 203, 113, 32, "bf16", causal="top-left"),  # keys shorter, every query sees one
    dense(1, 2, 1, 239, 64, "fp32", causal="bottom-right"),  # one decoding step
    dense(1, 1, 239, 1, 32, "fp32"),  # one key: P = 1, dQ = dK = 0
    dense(1, 1, 239, 239, 64, "fp16", causal="top-left"),
    dense(1, 1, 129, 129, 128, "bf16", causal="top-left"),  # one row past a tile
    dense(1, 1, 70, 70, 256, "fp32"),  # the widest head
    dense(1, 1, 40, 50, 1, "fp32"),  # head_dims that are padded inside
    dense(1, 2, 65, 65, 40, "fp32", causal="top-left"),
    dense(1, 1, 65, 66, 80, "bf16"),
    dense(1, (2, 1), 70, 70, (64, 32), "fp32", causal="top-left"),  # value narrower
    dense(1, 1, 70, 70, (24, 96), "fp32"),  # value wider
    dense(1, 1, 150, 150, 32, "fp32", causal="top-left", window=(17, None)),
    dense(1, (2, 1), 150, 150, 32, "fp32", window=(16, 8)),
    dense(1, 1, 150, 150, 32, "fp32", window=(None, 0)),  # a causal mask by another name
    dense(1, 1, 100, 130, 32, "fp32", causal="bottom-right", window=(31, 5)),
    dense(1, (2, 1), 90, 130, 32, "fp32", causal="bottom-right-window", window=(9, 40)),
    dense(1, 1, 130, 40, 16, "fp32", window=(20, 20)),  # the last 70 queries see no key
    dense(1, 1, 90, 90, 32, "fp32", causal="top-left", window=(0, 0)),  # each sees itself
    dense(1, 1, 90, 90, 32, "fp32", window=(1000, 1000)),  # wider than the sequence
    dense(1, (2, 1), 100, 100, 32, "fp32", causal="top-left", softcap=2.0),
    dense(1, 1, 100, 100, 32, "bf16", softcap=15.0, window=(40, 40)),
    dense(1, 1, 100, 100, 32, "fp32", causal="top-left", scale=-0.3),  # the order reverses
    dense(1, 1, 70, 70, 32, "fp32", scale=0.0),  # a mean over the values
    dense(1, 1, 70, 70, 32, "fp32", causal="top-left", softcap=3.0, scale=-0.5),
]

STRIDED_LENGTHS = {((113, 203),), ((65, 65),)}


def is_plain(case: Case) -> bool:
    unmasked = case.window == (None, None) and case.causal in ("none", "top-left")
    plain = case.softcap is None and case.scale is None
    return unmasked and plain and case.heads[0] == case.heads[1]


def is_for_hopper(case: Case) -> bool:
    """Whether the Hopper tier takes it."""
    plain = case.softcap is None and case.scale != 0
    dim, value_dim = case.head_dims
    if dim <= 64 and case.window[0] is not None:  # shorter than this tier takes
        return False
    return (
        plain
        and dim == value_dim
        and dim in eligibility.HEAD_DIMS
        and case.dtype_name != "fp32"
        and not case.packed
    )


def packed(
    heads: tuple[int, int],
    lengths: tuple[tuple[int, int], ...],
    head_dims: tuple[int, int],
    dtype_name: str,
    **options: Any,
) -> Case:
    return Case(len(lengths), heads, lengths, head_dims, dtype_name, packed=True, **options)


VARLEN_CASES = [
    packed((1, 1), ((5, 5),), (16, 16), "fp32"),
    packed((2, 2), ((64, 64), (17, 17), (1, 1)), (32, 32), "bf16", causal="top-left"),
    packed((2, 1), ((70, 33), (0, 0), (9, 80)), (32, 32), "fp32", causal="bottom-right"),
    packed((2, 1), ((0, 20), (40, 0), (30, 30)), (32, 32), "fp32"),  # empty on either side
    packed((1, 1), ((3, 3), (100, 100)), (32, 16), "fp32", causal="top-left", window=(9, None)),
    packed((1, 1), ((50, 50), (31, 63)), (16, 16), "fp32", softcap=2.0, scale=-0.4),
    packed(
        (1, 1), ((50, 31), (31, 63)), (16, 16), "fp32", causal="bottom-right-window", window=(5, 7)
    ),
]


TENSOR_CASES = [
    dense(2, (2, 1), 35, 45, 16, "fp32", causal="bottom-right", alibi="batch"),
    dense(1, 1, 45, 35, 16, "bf16", alibi="heads", softcap=5.0),
    dense(2, (2, 1), 35, 45, (16, 24), "fp32", bias="bhqk", softcap=3.0, scale=-0.3),
    dense(2, (2, 1), 33, 33, 16, "bf16", bias="hqk", causal="top-left"),
    dense(2, 1, 20, 40, 16, "fp16", bias="bk"),
    dense(1, (2, 1), 40, 20, 16, "fp32", bias="q", window=(15, 9)),
    dense(1, 1, 33, 17, 16, "fp32", bias="", alibi="heads"),  # one number for all scores
    dense(3, 1, 45, 35, 16, "fp32", causal="top-left", prefix=True),
    dense(2, 1, 35, 45, 32, "bf16", causal="bottom-right", prefix=True, softcap=4.0),
    dense(2, (2, 1), 35, 70, 16, "fp32", causal="bottom-right", prefix=True, bias="hqk",
          alibi="batch"),
    packed((2, 1), ((33, 40), (0, 9), (40, 33)), (16, 16), "fp32", alibi="batch"),
    packed((2, 1), ((40, 33), (9, 0), (9, 45)), (32, 16), "fp32", causal="bottom-right",
           alibi="heads", prefix=True),
    packed((1, 1), ((40, 40), (1, 1), (20, 40)), (16, 16), "bf16", causal="top-left",
           prefix=True),
]  # fmt: skip


def full_tensor_matrix() -> Iterator[Case]:
    """Each feature with each dtype, width and mask; lengths that are no multiples of tiles."""
    features: list[dict[str, Any]] = [
        {"alibi": "heads", "causal": "bottom-right"},
        {"alibi": "batch", "window": (100, 50)},
        {"bias": "bhqk", "causal": "top-left"},
        {"bias": "hqk", "softcap": 15.0},
        {"bias": "bk"},
        {"bias": "q", "causal": "bottom-right"},
        {"prefix": True, "causal": "bottom-right"},
        {"prefix": True, "causal": "top-left", "bias": "hqk", "alibi": "heads"},
    ]
    for dtype_name in DTYPE_NAMES:
        for head_dim in (64, 128, 256) if dtype_name == "bf16" else (64,):
            for feature in features:
                yield dense(2, (4, 2), 799, 1023, head_dim, dtype_name, **feature)
                yield dense(2, (4, 2), 513, 300, head_dim, dtype_name, **feature)
    lengths = ((300, 300), (0, 0), (1, 1), (1023, 799), (64, 512), (0, 77), (65, 0))
    for dtype_name in DTYPE_NAMES:
        for causal in ("top-left", "bottom-right"):
            yield packed((4, 2), lengths, (64, 64), dtype_name, causal=causal, alibi="batch")
            yield packed((4, 2), lengths, (64, 64), dtype_name, causal=causal, prefix=True)


def full_matrix() -> Iterator[Case]:
    """Lengths, widths, dtypes and masks at the sizes where tiles, stages and warps differ.

    Lengths cost nothing, but each new combination of the rest is compiled: bf16 meets everything,
    the other dtypes a part of it.
    """
    lengths = [(1, 1), (3, 799), (64, 64), (113, 203), (239, 1), (799, 799), (1023, 1024)]
    lengths += [(1024, 1023), (2048, 2048)]
    widths: dict[str, list[int | tuple[int, int]]] = {
        "bf16": [16, 32, 40, 80, 96, 160, 192, 256, (192, 128), (64, 256)],
        "fp16": [32, 80, 256],
        "fp32": [16, 80, 256, (192, 128)],
    }
    options: list[dict[str, Any]] = [
        {"window": (100, 50)},
        {"window": (0, 0), "causal": "top-left"},
        {"window": (256, None), "causal": "bottom-right"},
        {"window": (200, 300), "causal": "bottom-right-window"},
        {"softcap": 15.0, "causal": "top-left"},
        {"softcap": 30.0, "window": (300, 0)},
        {"scale": -0.2, "causal": "top-left"},
        {"scale": 0.0},
    ]
    for dtype_name in DTYPE_NAMES:
        for head_dim in (64, 128):
            for causal in CAUSAL:
                for n_queries, n_keys in lengths:
                    yield dense(2, (4, 2), n_queries, n_keys, head_dim, dtype_name, causal=causal)
        for width in widths[dtype_name]:
            yield dense(2, (4, 2), 335, 411, width, dtype_name, causal="top-left")
        for head_dim in (64, 128) if dtype_name == "bf16" else (64,):
            for keywords in options:
                yield dense(2, (4, 2), 799, 1023, head_dim, dtype_name, **keywords)
                yield dense(2, (4, 2), 1023, 799, head_dim, dtype_name, **keywords)
    for head_dim in (64, 128):
        yield dense(2, (4, 2), 4224, 4224, head_dim, "bf16", causal="top-left")
        yield dense(2, (4, 2), 300, 8192, head_dim, "fp32")  # sums over many tiles


def full_varlen_matrix() -> Iterator[Case]:
    lengths = ((300, 300), (0, 0), (1, 1), (1023, 799), (64, 512), (0, 77), (65, 0), (2000, 2000))
    for dtype_name in DTYPE_NAMES:
        for causal in CAUSAL:
            yield packed((4, 2), lengths, (64, 64), dtype_name, causal=causal)
    yield packed((4, 2), lengths, (128, 128), "bf16", causal="bottom-right")
    yield packed((4, 1), lengths, (96, 96), "bf16", causal="top-left", window=(100, None))
    yield packed((2, 2), lengths, (64, 64), "fp32", window=(100, 30), softcap=20.0)
