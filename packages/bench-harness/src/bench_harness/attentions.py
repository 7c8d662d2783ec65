"""Implementations of attention by name: what the experiment ``attention`` compares.

A preset names an implementation in one of three ways:

- a name of :data:`BUILT_IN`;
- a name that an installed package registers in the entry-point group ``bench_harness.attentions``;
- ``package.module:callable``.

Each is a function ``attend(query, key, value, *, causal, **settings) -> output``. Query is (batch,
heads, sequence, head_dim), key and value have the key/value heads, and the output has the query's
heads and the value's head_dim. ``settings`` holds only what the problem asks for:

- ``window``: (left, right) numbers of visible keys beside the diagonal, None for no limit;
- ``softcap``: c, which maps a scaled score s to c·tanh(s/c);
- ``deterministic``: True;
- ``sinks``, ``alibi_slopes`` or ``bias``: tensors that mean what they mean to
  ``flashattn_triton.flash_attention``;
- ``cu_seqlens`` and ``max_seqlen``: of sequences packed into tensors of (tokens, heads, head_dim).

An implementation whose signature has no such keyword, whose package is missing, or that raises
:class:`CaseSkipped`, ``ValueError`` or ``NotImplementedError`` is skipped with that reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from bench_harness.core import CaseSkipped, registered
from bench_harness.workload import imported

if TYPE_CHECKING:
    from torch import Tensor

Attend: TypeAlias = "Callable[..., Tensor]"
Window: TypeAlias = tuple[int | None, int | None]

ENTRY_POINT_GROUP = "bench_harness.attentions"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: "plain" has none; ratios of the others are to it.
FEATURES = ("plain", "sinks", "alibi", "bias", "deterministic")
PASSES = ("forward", "training forward", "backward", "forward+backward", "forward+sum+backward")
CLOCKS = ("device", "cool", "wall", "host")


def names() -> list[str]:
    """Names of all implementations: the built-in ones first, then those of entry points."""
    return list(dict.fromkeys([*BUILT_IN, *registered(ENTRY_POINT_GROUP)]))


def check(name: str) -> None:
    """Checks a name without importing anything.

    Raises:
        ValueError: it is no registered name and no ``package.module:callable``.
    """
    if ":" not in name and name not in names():
        raise ValueError(
            f"variants must be {', '.join(names())} or package.module:callable, but got {name!r}. "
            "Correct the name or install the package that registers it."
        )


def stores_scores(name: str) -> bool:
    """Whether an implementation keeps all scores in memory, as far as its name tells."""
    return name.startswith("naive")


def forward_only(name: str) -> bool:
    """Whether an implementation has no backward, so that only its output is compared and timed."""
    return name == "fa3-fwd"


def find(name: str) -> Attend:
    """Makes a new callable for an implementation. A compiled one compiles at its first call.

    Raises:
        CaseSkipped: it cannot be imported here.
        ValueError: unknown name.
    """
    check(name)
    try:
        if name in BUILT_IN:
            return BUILT_IN[name]()
        target = name if ":" in name else registered(ENTRY_POINT_GROUP)[name]
        found: Attend = imported(target, "attention")
        return found
    except (ImportError, ValueError) as error:
        raise CaseSkipped(
            f"{name} must be importable, but got an error: {error.__cause__ or error}. Install its "
            "package, or leave it out of variants."
        ) from error


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: Window | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """softmax(Q·Kᵀ/√D)·V in the inputs' dtype, with all scores stored.

    Args:
        first: position of the first query, where the queries are some of the sequence.
    """
    import torch

    ratio = query.shape[1] // key.shape[1]
    if ratio > 1:
        key, value = (x.repeat_interleave(ratio, dim=1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + _alibi(alibi_slopes, scores.shape[-2], scores.shape[-1], first).to(
            scores.dtype
        )
    if bias is not None:
        scores = scores + bias
    scores = _masked(scores, causal, window, first)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1] @ value
    return torch.softmax(scores, dim=-1) @ value


def _masked(scores: Tensor, causal: bool, window: Window | None = None, first: int = 0) -> Tensor:
    """Scores with -inf where the mask hides a key."""
    import torch

    left, right = window or (None, None)
    right = 0 if causal else right
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = [] if right is None else [everything.triu(first + right + 1)]
    hidden += [] if left is None else [everything.tril(first - left - 1)]
    if not hidden:
        return scores
    return scores.masked_fill(functools.reduce(operator.or_, hidden), float("-inf"))


def _alibi(slopes: Tensor, queries: int, keys: int, first: int = 0) -> Tensor:
    """ALiBi's bias, (heads, queries, keys) in fp32, from (heads,) slopes."""
    import torch

    positions = torch.arange(first, first + queries, device=slopes.device)
    distances = positions[:, None] - torch.arange(keys, device=slopes.device)
    return -slopes[:, None, None] * distances.abs()


def _naive_compiled() -> Attend:
    import torch

    compiled: Attend = torch.compile(naive)
    return compiled


def _flashattn_triton(implementation: str) -> Attend:
    from flashattn_triton import flash_attention, flash_attention_varlen

    dense: Attend = flash_attention
    packed: Attend = flash_attention_varlen

    def attend(
        *inputs: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int = 0, **settings: Any
    ) -> Tensor:
        if implementation in ("triton", "hopper"):
            _refuse_cpu(inputs[0], "the Triton tiers")
        settings["implementation"] = implementation
        if cu_seqlens is None:
            return dense(*inputs, layout="bhsd", **settings)
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return packed(*inputs, *lengths, **settings)

    return attend


def _flashattn_triton_compiled() -> Attend:
    """The form in which the public leaderboard calls the package."""
    import torch

    from flashattn_triton import FlashAttention2Triton

    apply: Callable[..., Tensor] = torch.compile(FlashAttention2Triton.apply)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        _refuse_cpu(query, "FlashAttention2Triton")
        out = apply(*(x.flatten(0, 1) for x in (query, key, value)), causal)
        return out.view(*query.shape[:-1], -1)

    return attend


def _sdpa(backend: str | None) -> Attend:
    """PyTorch's attention by one kernel, or the one it chooses; ALiBi and a bias are ``attn_mask``.

    PyTorch takes no ``is_causal`` beside an ``attn_mask``, so the causal mask is written into it:
    once for ALiBi, which is constant, and in every call for a bias, which is learned.
    """
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = None if backend is None else getattr(SDPBackend, backend)
    constants: dict[int, Tensor] = {}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        length, mask = query.shape[-2], bias
        if alibi_slopes is not None:
            if length not in constants:
                added = _alibi(alibi_slopes, length, length)[None].to(query.dtype)
                constants[length] = _masked(added, causal)
            mask = constants[length]
        elif bias is not None:
            mask = _masked(bias, causal)
        try:
            with contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen):
                return F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=causal and mask is None,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
        except RuntimeError as error:
            # torch's words for a problem that the kernel does not take, and for a device without it
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
            raise CaseSkipped(
                f"the problem must be one that PyTorch's {backend} kernel takes, but got another. "
                "Use sdpa, which chooses a kernel itself."
            ) from error

    return attend


def _flex() -> Attend:
    """FlexAttention, compiled, with the block mask of the problem it sees first."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masks: dict[tuple[Any, ...], Any] = {}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        window: Window | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        _refuse_cpu(query, "compiled FlexAttention")
        problem = (query.shape[-2], causal, window)
        if problem not in masks:
            masks[problem] = _block_mask(*problem, query.device)
        out: Tensor = compiled(
            query,
            key,
            value,
            block_mask=masks[problem],
            score_mod=_score_function(softcap, alibi_slopes, bias),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    return attend


def _refuse_cpu(query: Tensor, name: str) -> None:
    if query.device.type != "cuda":
        raise CaseSkipped(f"{name} must get CUDA tensors, but got others. Use flashattn-triton.")


#: Longest sequence whose block mask is made without compiling: its pairs take 64 MiB.
_EAGER_BLOCK_MASK = 8192


def _block_mask(length: int, causal: bool, window: Window | None, device: Any) -> Any:
    """FlexAttention's mask; compiled for long ones, whose pairs of tokens would fill a GPU."""
    import torch
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    left, right = window or (None, None)
    right = 0 if causal else right

    def after(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j - i <= right  # type: ignore[operator]

    def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j <= left  # type: ignore[operator]

    limits = [limit for limit, side in ((after, right), (before, left)) if side is not None]
    if not limits:
        return None
    make = torch.compile(create_block_mask) if length > _EAGER_BLOCK_MASK else create_block_mask
    return make(and_masks(*limits), None, None, length, length, device=device)


def _score_function(
    softcap: float | None, alibi_slopes: Tensor | None = None, bias: Tensor | None = None
) -> Callable[..., Any] | None:
    """FlexAttention's ``score_mod``, which is compiled into the kernel; None without any."""
    import torch

    if softcap is None and alibi_slopes is None and bias is None:
        return None
    by_head = None if bias is None else bias.squeeze(0)  # the batch shares it

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * (i - j).abs()
        if by_head is not None:
            score = score + by_head[h, i, j]
        return score

    return change


def _flash_attn_4() -> Attend:
    """The package flash-attn-4."""
    cute = importlib.import_module("flash_attn.cute")

    def attend(
        *inputs: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int = 0, **settings: Any
    ) -> Tensor:
        for ours, theirs in (("window", "window_size"), ("sinks", "learnable_sink")):
            if ours in settings:
                settings[theirs] = settings.pop(ours)
        for name in ("alibi_slopes", "bias"):
            if name in settings:
                raise CaseSkipped(
                    f"the problem must have no {name} for flash-attn-4, but got one. Leave it out "
                    "of variants."
                )
        with refusals("flash-attn-4", AssertionError):
            return _heads_last(cute, inputs, cu_seqlens, max_seqlen, **settings)

    return attend


def _fa3_fwd() -> Attend:
    """FlashAttention-3 without backward, by fa3-fwd."""
    package = importlib.import_module("fa3_fwd_interface")

    def attend(
        *inputs: Tensor, causal: bool, cu_seqlens: Tensor | None = None, max_seqlen: int = 0
    ) -> Tensor:
        _refuse_cpu(inputs[0], "fa3-fwd")
        inputs = tuple(x.detach() for x in inputs)
        with refusals("fa3-fwd", RuntimeError):
            return _heads_last(package, inputs, cu_seqlens, max_seqlen, causal=causal)

    return attend


def _heads_last(
    of: Any, inputs: Sequence[Tensor], starts: Tensor | None, longest: int, **settings: Any
) -> Tensor:
    """FlashAttention's functions, whose layout puts the sequence before the heads."""
    if starts is not None:
        settings |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        settings |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return _first(of.flash_attn_varlen_func(*inputs, **settings))
    heads_last = (x.transpose(1, 2) for x in inputs)
    return _first(of.flash_attn_func(*heads_last, **settings)).transpose(1, 2)


@contextlib.contextmanager
def refusals(name: str, kind: type[Exception]) -> Iterator[None]:
    """Skips a problem that a library refuses by an error of a kind; lack of memory is raised."""
    try:
        yield
    except kind as error:
        if "out of memory" in str(error):
            raise
        raise CaseSkipped(
            f"the problem must be one that {name} takes, but got an error: {error}. Leave it out "
            "of variants."
        ) from error


def _first(out: Any) -> Tensor:
    """The output, which some versions return together with the logsumexp."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


#: Name → what makes a fresh callable. ``flashattn-triton`` takes the tier that the package itself
#: chooses on this device; ``-portable`` and ``-tiled`` insist on one.
BUILT_IN: dict[str, Callable[[], Attend]] = {
    "flashattn-triton": functools.partial(_flashattn_triton, "auto"),
    "flashattn-triton-portable": functools.partial(_flashattn_triton, "triton"),
    "flashattn-triton-hopper": functools.partial(_flashattn_triton, "hopper"),
    "flashattn-triton-tiled": functools.partial(_flashattn_triton, "tiled"),
    "flashattn-triton-compiled": _flashattn_triton_compiled,
    "naive": lambda: naive,
    "naive-compiled": _naive_compiled,
    "sdpa": functools.partial(_sdpa, None),
    "sdpa-flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa-cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa-efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "sdpa-math": functools.partial(_sdpa, "MATH"),
    "flex": _flex,
    "flash-attn-4": _flash_attn_4,
    "fa3-fwd": _fa3_fwd,
}
