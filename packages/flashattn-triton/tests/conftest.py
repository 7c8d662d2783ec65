"""What every attention test shares: cases, inputs, the tolerance table, and the comparison.

Ask for them by name; nothing is imported from here.

``case``, ``gpu_case``
    A test with one of these arguments runs once for each :class:`Case`: ``case`` is the small
    matrix (CPU, Triton interpreter), ``gpu_case`` the full one (mark such tests ``gpu``). A
    case's id spells it: B2-H4x2-T113x203-D64-bf16-causal. ``case.options`` is the
    ``AttentionOptions``; ``case.keywords`` the arguments of ``flash_attention`` that mean the same.

``strided_case``, ``plain_case``, ``plain_causal_case``
    Parts of ``case``: the few worth repeating for every ``layout``; those that the assignment's
    Function can express (equal heads, no mask or the causal one, the default scale); one of these.

``hopper_case``
    The part of ``gpu_case`` that the Hopper tier takes.

``varlen_case``, ``gpu_varlen_case``
    The same for packed batches; ``case.seqlens`` holds (queries, keys) for each sequence.

``tensor_case``, ``dense_tensor_case``, ``gpu_tensor_case``
    The same for calls with ALiBi slopes, a bias or prefixes, which ``inputs.tensors`` holds under
    the names of ``flash_attention``'s arguments.

``dense_case(...)``, ``packed_case(...)``
    Make a :class:`Case` of one's own.

``make_inputs(case, device="cpu", layout="bhsd")``
    An :class:`Inputs`: query, key, value (views shaped (B, H, N, D) that require gradients;
    packed (T, H, D) for varlen cases), a bias if the case has one, and random gradients
    of output and logsumexp.
    ``layout``: "bhsd" contiguous, "bshd" (heads and sequence transposed), "padded" (rows with gaps
    full of NaN), "strided" (last stride 2, gaps full of NaN), "expanded" (stride-0 key heads).

``assert_close_to_oracle(attend, inputs)``
    ``attend(query, key, value)`` returns (output, logsumexp), or the output alone. Compares
    output, logsumexp and the three gradients with the fp32/fp64 oracle. The backward pass
    starts from both gradients of ``inputs``; with ``lse_gradient=False``, or where only the output
    is returned, from the output's alone.

``assert_results_close(inputs, results, lse_gradient=True)``
    The same for results computed without autograd: a mapping with any of "out", "lse", "dq", "dk",
    "dv", for tests of launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import background
from flashattn_triton.hopper import eligibility
from flashattn_triton.mask_and_bias import NAMES, MaskAndBias, resolve_mask_and_bias
from flashattn_triton.options import AttentionOptions
from flashattn_triton.reference import attention_reference, attention_reference_varlen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    background.put_last(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    background.start_all(session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    background.stop_all(session)


@pytest.fixture(scope="session", autouse=True)
def _scalar_code() -> Iterator[None]:
    """Compiled for a CPU: torch else asks, in a process for each set of vector instructions."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False}):
        yield


# ---- tolerances ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What an error may be for one dtype.

    Output and gradients: max|x - oracle| <= ratio · max|same - oracle| + rounding + unstored, where
    ``same`` is the same computation in PyTorch at the same precision; rounding is the most that
    2 · |((x + 0.3) - 0.3) - x| can be in that dtype, one rounding of the result itself; and
    unstored (of gradients only) is the effect of recomputing P and dS instead of storing P: see
    :func:`off_by_rounding`.

    Logsumexp: |x - oracle| <= logsumexp · max(1, |oracle|).
    """

    oracle: torch.dtype
    ratio: float
    logsumexp: float


TOLERANCES = {
    # The oracle must be more precise than the tested computation, hence fp64.
    torch.float32: Tolerance(oracle=torch.float64, ratio=2.0, logsumexp=1e-5),
    # Rounding P, dS and the results to 2^-11 or 2^-8 hides what fp32 accumulation adds, so the
    # oracle is fp32. The logsumexp never leaves fp32: exact products of half inputs, summed and
    # exponentiated in fp32, so it is as good as for fp32 inputs.
    torch.float16: Tolerance(oracle=torch.float32, ratio=2.0, logsumexp=1e-5),
    torch.bfloat16: Tolerance(oracle=torch.float32, ratio=2.0, logsumexp=1e-5),
}
# Whatever the dtype, L and D = rowsum(dO ∘ O) are kept in fp32, whose unit roundoff is 2^-24.
# P = exp(S - L) inherits L's absolute error: a rounding of the maximum's logarithm and of the sum.
LOGSUMEXP_ROUNDINGS = 2
# dS = P ∘ (dP - D) cancels. In a row with one visible key both terms are equal, and what is left
# over is the order in which E products were summed twice: of the order of √E roundings. PyTorch's
# softmax happens to leave exactly nothing there; no formula that recomputes P does.
D_ROUNDINGS = 16
# The ratio compares two largest errors. PyTorch's largest over few elements is a sample
# of almost nothing, and may be small by chance (hypothesis looks for just such cases).
SMALL_RESULT = 1024
SMALL_RESULT_RATIO = 4.0
# With a soft-cap the kernels and PyTorch compute tanh and its derivative by different formulas.
SOFTCAP_RATIO = 3.0


def tolerance_of(dtype: torch.dtype, options: AttentionOptions) -> Tolerance:
    tolerance = TOLERANCES[dtype]
    return tolerance if options.softcap is None else replace(tolerance, ratio=SOFTCAP_RATIO)


# ---- cases ---------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CAUSAL = ("none", "top-left", "bottom-right")


@dataclass(frozen=True)
class Case:
    """One attention problem. ``lengths`` are (N_q, N_k) of every sequence, or of each if packed."""

    batch: int
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    head_dims: tuple[int, int]
    dtype_name: str
    causal: str = "none"
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
    def options(self) -> AttentionOptions:
        return AttentionOptions(
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


@pytest.fixture(scope="session")
def dense_case() -> Callable[..., Case]:
    return dense


@pytest.fixture(scope="session")
def packed_case() -> Callable[..., Case]:
    return packed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    matrices: dict[str, Callable[[], list[Case]]] = {
        "case": lambda: CASES,
        "strided_case": lambda: [c for c in CASES if c.lengths in STRIDED_LENGTHS],
        "plain_case": lambda: [c for c in CASES if is_plain(c)],
        "plain_causal_case": lambda: [c for c in CASES if is_plain(c) and c.lengths == ((65, 65),)],
        "tensor_case": lambda: TENSOR_CASES,
        "dense_tensor_case": lambda: [c for c in TENSOR_CASES if not c.packed],
        "gpu_tensor_case": lambda: TENSOR_CASES + list(full_tensor_matrix()),
        "varlen_case": lambda: VARLEN_CASES,
        "gpu_case": lambda: CASES + list(full_matrix()),
        "gpu_varlen_case": lambda: VARLEN_CASES + list(full_varlen_matrix()),
        "hopper_case": lambda: [c for c in full_matrix() if is_for_hopper(c)],
    }
    for name, cases in matrices.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases(), ids=str)


# ---- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case. ``grad_lse`` is zero where the logsumexp is -inf for every input."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    tensors: dict[str, Tensor]

    @property
    def bias(self) -> Tensor | None:
        return self.tensors.get("bias")

    @property
    def mask_and_bias(self) -> MaskAndBias:
        given = dict.fromkeys(NAMES) | self.tensors | {"bias": None}
        resolved = resolve_mask_and_bias(
            **given,
            leading=(self.case.batch,),
            heads=self.case.heads[0],
            lengths=self.case.lengths[0],
            device=self.query.device,
        )
        return replace(resolved, bias=self.bias)  # may be of a dtype that only the oracle takes

    @property
    def options(self) -> AttentionOptions:
        return self.case.options


def gapped(x: Tensor, *, row_gap: int = 0, last_stride: int = 1) -> Tensor:
    """The same values as a view into a larger tensor; what lies between them is NaN."""
    *leading, rows, width = x.shape
    storage = x.new_full((*leading, rows, width * last_stride + row_gap), float("nan"))
    view = storage[..., : width * last_stride : last_stride]
    view.copy_(x)
    return view


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "bshd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "padded":
        return gapped(x, row_gap=8)
    if layout == "strided":
        return gapped(x, last_stride=2)
    assert layout in ("bhsd", "expanded"), layout
    return x


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., Inputs]:
    def make(case: Case, device: torch.device | str = "cpu", layout: str = "bhsd") -> Inputs:
        generator = torch.Generator(device).manual_seed(1)
        (heads, kv_heads), (dim, value_dim) = case.heads, case.head_dims
        n_queries, n_keys = (sum(column) for column in zip(*case.lengths, strict=True))

        def random(count: int, length: int, *width: int, dtype: torch.dtype) -> Tensor:
            shape = (count, length, *width) if case.packed else (case.batch, count, length, *width)
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            return x.transpose(0, 1).contiguous() if case.packed and width else x

        def leaf(count: int, length: int, width: int) -> Tensor:
            x = random(count, length, width, dtype=case.dtype)
            return laid_out(x, layout).detach().requires_grad_()

        def key_leaf(width: int) -> Tensor:
            if layout != "expanded":
                return leaf(kv_heads, n_keys, width)
            shared = random(1, n_keys, width, dtype=case.dtype)
            shape = (-1, kv_heads, -1) if case.packed else (-1, kv_heads, -1, -1)
            return shared.expand(shape).detach().requires_grad_()

        tensors: dict[str, Tensor] = {}
        if case.alibi is not None:
            shape = (heads,) if case.alibi == "heads" else (case.batch, heads)
            tensors["alibi_slopes"] = torch.rand(shape, generator=generator, device=device) / 4
        if case.bias is not None:
            sizes = zip("bhqk", (case.batch, heads, n_queries, n_keys), strict=True)
            shape = tuple(n if name in case.bias else 1 for name, n in sizes)
            bias = torch.randn(shape, generator=generator, device=device).to(case.dtype)
            tensors["bias"] = bias.requires_grad_()
        if case.prefix:  # some keys, none, more than there are
            lengths = [n // 2 + 1 for _, n in case.lengths] * (1 if case.packed else case.batch)
            lengths[1:3] = [0, lengths[-1] * 3][: len(lengths) - 1]
            tensors["prefix_lengths"] = torch.tensor(lengths, device=device)
        return Inputs(
            case=case,
            tensors=tensors,
            query=leaf(heads, n_queries, dim),
            key=key_leaf(dim),
            value=key_leaf(value_dim),
            grad_out=random(heads, n_queries, value_dim, dtype=case.dtype),
            grad_lse=random(heads, n_queries, dtype=torch.float32),
        )

    return make


# ---- comparison ----------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | Tensor]


def differentiate(attend: Attend, inputs: Inputs, lse_gradient: bool) -> dict[str, Tensor]:
    """Runs ``attend`` and its backward pass on the inputs."""
    leaves = [inputs.query, inputs.key, inputs.value]
    result = attend(*leaves)
    leaves += [] if inputs.bias is None else [inputs.bias]
    out, lse = result if isinstance(result, tuple) else (result, None)
    loss = (out.double() * inputs.grad_out.double()).sum()
    if lse is not None and lse_gradient:
        finite = torch.isfinite(lse)  # the gradient of a constant -inf would be 0 · -inf in the sum
        loss = loss + torch.where(finite, lse, 0.0).mul(inputs.grad_lse).sum()
    gradients = torch.autograd.grad(loss, leaves)
    results = dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))
    results["out"] = out.detach()
    return results if lse is None else results | {"lse": lse.detach()}


def reference(inputs: Inputs, dtype: torch.dtype, lse_gradient: bool) -> dict[str, Tensor]:
    """The definition's results in ``dtype``, gradients included."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem = (inputs.options, converted.mask_and_bias)
        if not inputs.case.packed:
            return attention_reference(q, k, v, *problem, dtype=dtype)
        starts = inputs.case.cu_seqlens("cpu")
        return attention_reference_varlen(q, k, v, *starts, *problem, dtype=dtype)

    query, key, value = (
        x.detach().to(dtype).requires_grad_() for x in (inputs.query, inputs.key, inputs.value)
    )
    tensors = dict(inputs.tensors)
    if inputs.bias is not None:
        tensors["bias"] = inputs.bias.detach().to(dtype).requires_grad_()
    converted = replace(inputs, query=query, key=key, value=value, tensors=tensors)
    return differentiate(attend, converted, lse_gradient)


def off_by_rounding(inputs: Inputs, lse: Tensor) -> Inputs:
    """Inputs whose gradients are what errors in L and in D change the true gradients by.

    P = exp(S - L) is linear in exp(-L), and gradients are linear in dO and dL, so an error of L_i
    is a factor on row i of both. D - dL is all that the backward pass knows of dL, so an error of
    D is a dL of the same size: that of a sum of E products, ‖dO_i‖ · rms(V).
    """
    sign = torch.where(inputs.grad_lse < 0, -1.0, 1.0) * 2.0**-24
    of_lse = sign * LOGSUMEXP_ROUNDINGS * lse.abs().clamp(min=1).nan_to_num(posinf=0.0)
    terms = inputs.grad_out.float().norm(dim=-1) * inputs.value.float().square().mean().sqrt()
    of_d = sign * D_ROUNDINGS * (terms.transpose(0, 1) if inputs.case.packed else terms)
    per_row = of_lse.transpose(0, 1) if inputs.case.packed else of_lse  # (H, T) to (T, H)
    return replace(
        inputs,
        grad_out=inputs.grad_out.double() * per_row[..., None],
        grad_lse=(inputs.grad_lse.double() * of_lse + of_d).detach(),
    )


def check_results(inputs: Inputs, results: Mapping[str, Tensor], lse_gradient: bool) -> None:
    case = inputs.case
    tolerance = tolerance_of(case.dtype, case.options)
    oracle = reference(inputs, tolerance.oracle, lse_gradient)
    same = reference(inputs, case.dtype, lse_gradient)
    unstored = reference(off_by_rounding(inputs, oracle["lse"]), torch.float64, True)
    failures = []
    for name, actual in results.items():
        expected = oracle[name]
        assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
        if name == "lse":
            assert actual.dtype == torch.float32, f"lse is {actual.dtype}"
            torch.testing.assert_close(  # -inf equals -inf and nothing else
                actual.to(expected.dtype),
                expected,
                rtol=tolerance.logsumexp,
                atol=tolerance.logsumexp,
                msg=lambda text: f"lse: {text}",
            )
            continue
        assert actual.dtype == case.dtype, f"{name} is {actual.dtype}, not {case.dtype}"
        assert torch.isfinite(actual).all(), f"{name} has non-finite elements"
        if expected.numel() == 0:
            continue
        rounding = torch.finfo(case.dtype).eps * (expected.abs().max().item() + 0.3)
        error = (actual.to(expected.dtype) - expected).abs().max().item()
        baseline = (same[name].to(expected.dtype) - expected).abs().max().item()
        ratio = tolerance.ratio if expected.numel() >= SMALL_RESULT else SMALL_RESULT_RATIO
        allowed = ratio * baseline + rounding
        if name != "out":
            allowed += unstored[name].abs().max().item()
        if not error <= allowed:
            failures.append(f"{name}: error {error:.3e} > {allowed:.3e} (PyTorch: {baseline:.3e})")
    assert not failures, f"{case}: " + "; ".join(failures)


@pytest.fixture(scope="session")
def assert_results_close() -> Callable[..., None]:
    def check(inputs: Inputs, results: Mapping[str, Tensor], *, lse_gradient: bool = True) -> None:
        check_results(inputs, results, lse_gradient)

    return check


@pytest.fixture(scope="session")
def assert_close_to_oracle() -> Callable[..., None]:
    def check(attend: Attend, inputs: Inputs, *, lse_gradient: bool = True) -> None:
        results = differentiate(attend, inputs, lse_gradient)
        check_results(inputs, results, lse_gradient and "lse" in results)

    return check
