"""One attention problem: what is asked for, apart from the numbers in the tensors.

The public functions turn their keywords into one frozen :class:`Problem`, which is checked once.
Everything below them takes it: the choice of a tier, the reference, the tiled computation and the
launchers of kernels. The registered operators take it as numbers and strings
(:meth:`Problem.pack`), so that compilers can write it to disk.

Legend: B batch, H query heads, G key/value heads (G divides H), N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value, T tokens of a packed batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from flashattn_triton.configs import Tiling

Causal = Literal["none", "top-left", "bottom-right", "bottom-right-window"]
Layout = Literal["bhsd", "bshd"]
Implementation = Literal["auto", "tiled", "triton", "hopper", "reference"]
# What callers write for ``causal``; True is "top-left".
CausalArgument = bool | Literal["top-left", "bottom-right", "bottom-right-window"]
Window = tuple[int | None, int | None]

LAYOUTS = get_args(Layout)
IMPLEMENTATIONS = get_args(Implementation)
# Widest head_dims of query and of value that Triton's kernels compute, by bytes of an element.
# Operands of fp32 are split into three parts, which do not fit registers beyond that.
MAX_HEAD_DIMS = {2: (576, 512), 4: (256, 256)}
# Beyond this head_dim the kernels have no backward pass: dK and dV of a tile do not fit.
MAX_HEAD_DIM_BACKWARD = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of scale and soft-cap: kernels compute in fp32 with either, its inverse, and their product or
# quotient, all times log2(e).
LARGEST_FACTOR = 1e18


class OptionKeywords(TypedDict, total=False):
    """Keywords that are no tensors, layout or ``return_lse``."""

    causal: CausalArgument
    scale: float | None
    window: Window | None
    softcap: float | None
    deterministic: bool | None
    implementation: Implementation
    tiling: Tiling | None
    out_dtype: torch.dtype | None


class PackedKeywords(OptionKeywords, total=False):
    """Keywords of ``flash_attention_varlen`` beside ``return_lse``."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    prefix_lengths: Tensor | None


class Keywords(PackedKeywords, total=False):
    """Keywords of ``flash_attention`` beside ``return_lse``."""

    layout: Layout | None
    bias: Tensor | None
    mask: Tensor | None
    document_ids: Tensor | None
    max_documents: int | None
    key_lengths: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Mask, scale, soft-cap, layout, and who computes; every default is resolved.

    Query i and key j meet on the diagonal where j = i + :func:`diagonal_offset`. A query sees the
    keys from ``window[0]`` before its diagonal to ``window[1]`` after it (None: no limit); a causal
    mask ("top-left" or "bottom-right") also hides every key after the diagonal.

    ``layout`` is that of the tensors of a call: "bhsd", "bshd", or "thd" for packed sequences, the
    longest of which are ``longest`` (queries, keys). ``tiling``: kernel shapes to use instead of
    the shipped table's. ``out_dtype``: of the output; None means that of the inputs.
    ``largest_only``: each query's largest score takes the place of the logsumexp, and there is no
    output.
    """

    causal: Causal = "none"
    scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    deterministic: bool = False
    layout: Literal["bhsd", "bshd", "thd"] = "bhsd"
    longest: tuple[int, int] = (0, 0)
    implementation: Implementation = "auto"
    tiling: Tiling | None = None
    out_dtype: torch.dtype | None = None
    largest_only: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.pack()[:-1], self.tiling))

    def __hash__(self) -> int:
        """Computed once, because every call looks its problem up in the cache."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the hash, which is another one in another process."""
        return Problem.unpack, (self.pack(),)

    @property
    def packed(self) -> bool:
        """Whether sequences are packed one after another."""
        return self.layout == "thd"

    @property
    def bottom_right(self) -> bool:
        """Whether the last query's diagonal ends at the last key."""
        return self.causal in ("bottom-right", "bottom-right-window")

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Visible keys before and after the diagonal, the causal mask included (None: no limit)."""
        left, right = self.window
        return left, 0 if self.causal in ("top-left", "bottom-right") else right

    def pack(self) -> tuple[Any, ...]:
        """As the numbers and strings that the operators take."""
        return (
            self.layout, *self.longest, self.causal, self.scale, *self.window, self.softcap,
            self.deterministic, self.implementation, self.out_dtype, self.largest_only,
            None if self.tiling is None else self.tiling.pack(),
        )  # fmt: skip

    @classmethod
    def unpack(cls, numbers: Sequence[Any]) -> Problem:
        """The problem that :meth:`pack` wrote."""
        layout, longest_q, longest_k, causal, scale, left, right, *others, tiling = numbers
        names = ("softcap", "deterministic", "implementation", "out_dtype", "largest_only")
        return cls(
            layout=layout,
            longest=(longest_q, longest_k),
            causal=causal,
            scale=scale,
            window=(left, right),
            tiling=None if tiling is None else Tiling.unpack(tiling),
            **dict(zip(names, others, strict=True)),
        )


def heads_first(x: Tensor, layout: str) -> Tensor:
    """(B, H, N, D), as kernels see a tensor in ``layout``: a view, or the tensor itself.

    A packed batch is (1, H, T, D). Statistics of rows are (B, H, N), or (H, T) to (1, H, T).
    """
    if layout == "thd":
        return (x.transpose(0, 1) if x.dim() == 3 else x).unsqueeze(0)
    return x.transpose(1, 2) if layout == "bshd" and x.dim() == 4 else x


def as_given(x: Tensor, layout: str) -> Tensor:
    """The inverse of :func:`heads_first`."""
    if layout == "thd":
        return x.squeeze(0).transpose(0, 1) if x.dim() == 4 else x.squeeze(0)
    return x.transpose(1, 2) if layout == "bshd" and x.dim() == 4 else x


def accumulated(x: Tensor) -> Tensor:
    """``x`` in the dtype of scores, sums and the logsumexp: fp32, or fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Products in the dtype of their operands, on the device of ``x``."""
    if x.is_meta:  # for which there is no autocast
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``full``."""
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return len(shape) <= len(full) and all(n in (1, whole) for n, whole in sizes)


def diagonal_offset(n_queries: int, n_keys: int, problem: Problem) -> int:
    """Key index minus query index on the diagonal that masks and windows refer to.

    Zero, or ``n_keys - n_queries`` for "bottom-right" and "bottom-right-window", where the last
    query meets the last key.
    """
    return n_keys - n_queries if problem.bottom_right else 0


def seen_keys(
    n_queries: int | torch.SymInt, n_keys: int | torch.SymInt, problem: Problem
) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """The keys that a causal mask or a window does not hide from all queries, first to last + 1."""
    left, right = problem.band
    # Lengths that an export keeps open must not decide anything; compilers trace max and min.
    is_open = isinstance(n_keys, torch.SymInt) or isinstance(n_queries, torch.SymInt)
    most, least = (torch.sym_max, torch.sym_min) if is_open else (max, min)
    if problem.bottom_right:
        return 0 if left is None else most(0, n_keys - n_queries - left), n_keys
    return 0, n_keys if right is None else least(n_keys, n_queries + right)


def new_problem(
    layout: str | None = None,
    head_dim: int = 0,
    longest: tuple[int, int] = (0, 0),
    causal: CausalArgument = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    out_dtype: torch.dtype | None = None,
) -> Problem:
    """User arguments to a problem, which is found again if they are not new.

    The keywords are those of :func:`~flashattn_triton.flash_attention`. ``layout`` may be "thd" for
    packed sequences, the longest of which have at most ``longest`` queries and keys. ``head_dim`` D
    is for the default scale 1/sqrt(D).
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left = right = None
    if window is not None:
        is_pair = type(window) is tuple and len(window) == 2
        left, right = window if is_pair else _normalise_window(window)
    arguments = (
        layout, head_dim, longest, causal, scale, left, right, softcap, deterministic,
        implementation, tiling, out_dtype,
    )  # fmt: skip
    problem = None
    if not torch.compiler.is_compiling():  # compilers trace a cache's results as constants
        try:
            problem = _cached(*arguments)
        except TypeError:  # of an argument that is not valid: named below
            problem = None
    return problem or _checked(*arguments)


def _checked(
    layout: Any, head_dim: int, longest: Any, causal: Any, scale: Any, left: Any, right: Any,
    softcap: Any, deterministic: Any, implementation: Any, tiling: Any, out_dtype: Any,
) -> Problem:  # fmt: skip
    if out_dtype not in (None, torch.float32):
        raise ValueError(
            f"out_dtype must be torch.float32 or None, but got {out_dtype!r}. None gives the "
            f"output the inputs' dtype."
        )
    if layout != "thd":
        check_layout(layout)
    elif not torch.compiler.is_compiling():
        for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
            if type(length) is int:  # no symbol
                normalise_length(name, length)
    check_choice("implementation", implementation, IMPLEMENTATIONS, "'auto' chooses.")
    if tiling is not None and not isinstance(tiling, Tiling):
        raise TypeError(
            f"tiling must be a Tiling or None, but got {tiling!r}. Use None for the shipped table."
        )
    return Problem(
        causal=_normalise_causal(causal),
        scale=_normalise_scale(scale, head_dim),
        window=_normalise_window((left, right)),
        softcap=_normalise_softcap(softcap),
        deterministic=normalise_flag("deterministic", deterministic),
        layout="bhsd" if layout is None else layout,
        longest=longest,
        implementation=implementation,
        tiling=tiling,
        out_dtype=out_dtype,
    )


# Equal values of unequal types (True and 1) are not equally valid.
_cached = functools.lru_cache(maxsize=4096, typed=True)(_checked)


def normalise_flag(name: str, flag: object) -> bool:
    """``flag``; raises ``ValueError`` with its name unless it is a bool."""
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be True or False, but got {flag!r}. Pass a bool.")
    return flag


def normalise_length(name: str, length: Any) -> int:
    """``length`` as an int; raises ``ValueError`` with its name unless it is an integer >= 0.

    A compiler's symbol is returned as it is.
    """
    if isinstance(length, torch.SymInt):
        return length  # type: ignore[return-value]
    try:
        number = -1 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(
            f"{name} must be an integer >= 0 or None, but got {length!r}. Pass it as a Python int, "
            f"or leave it out."
        )
    return number


def _normalise_causal(causal: Any) -> Causal:
    if isinstance(causal, bool):
        return "top-left" if causal else "none"
    if causal not in get_args(Causal):
        raise ValueError(
            f"causal must be False, True, 'top-left', 'bottom-right' or 'bottom-right-window', but "
            f"got {causal!r}. Use 'top-left' for PyTorch's is_causal=True, 'bottom-right' for "
            f"flash-attn's causal=True."
        )
    return causal  # type: ignore[no-any-return]


def as_number(x: object) -> float:
    """A real number of Python or NumPy as a float; NaN for all others, bools among them."""
    try:
        return math.nan if isinstance(x, bool) or not isinstance(x, numbers.Real) else float(x)
    except OverflowError:  # an int beyond all floats
        return math.nan


def _normalise_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim or 1)  # an empty one is refused with the other shapes
    number = as_number(scale)
    if not abs(number) <= LARGEST_FACTOR:
        raise ValueError(
            f"scale must be a finite number of at most {LARGEST_FACTOR:.0e} in size, or None, "
            f"but got {scale!r}. Use scale=None for 1/sqrt(head_dim)."
        )
    return number


def _normalise_window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        size = window if isinstance(window, int) and window > 1 else 128
        raise ValueError(
            f"window must be None or a pair (left, right) of integers >= 0 or None, but got "
            f"{window!r}. Use ({size}, 0) for {size} keys before a query's own."
        )
    for side, size in zip(("left", "right"), window, strict=True):
        is_integer = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if size is not None and not (is_integer and size >= 0):
            raise ValueError(
                f"window {side} must be an integer >= 0, or None, but got {size!r}. Use None for "
                f"no limit, which is -1 in flash-attn."
            )
    left, right = (None if size is None else int(size) for size in window)
    return left, right


def _normalise_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    number = as_number(softcap)
    if not 1 / LARGEST_FACTOR <= number <= LARGEST_FACTOR:
        raise ValueError(
            f"softcap must be a finite number > 0 (from {1 / LARGEST_FACTOR:.0e} to "
            f"{LARGEST_FACTOR:.0e}), or None, but got {softcap!r}. Use softcap=None for no "
            f"soft-cap, which is 0.0 in flash-attn."
        )
    return number


def check_choice(name: str, value: object, choices: Collection[str], remedy: str) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but got {value!r}. {remedy}")


def check_layout(layout: str | None) -> None:
    """Raises ``ValueError`` unless ``layout`` is one of "bhsd" and "bshd", or None for "bhsd"."""
    if layout is not None:
        remedy = "b is the batch, h heads, s the sequence, d head_dim."
        check_choice("layout", layout, LAYOUTS, remedy)
