"""The attention problems that scripts/bench_attention.py measures, and who computes them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn_triton import FlashAttention2Triton, choose, flash_attention
from flashattn_triton.options import resolve_options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES = ("forward", "backward", "both")
OURS, PORTABLE, ASSIGNMENT = (
    "flashattn-triton",
    "flashattn-triton, portable tier",
    "FlashAttention2Triton.apply, compiled",
)
FLASH, CUDNN, EFFICIENT, FLEX, FLASH_4 = (
    "SDPA flash",
    "SDPA cuDNN",
    "SDPA memory-efficient",
    "FlexAttention, compiled",
    "FlashAttention-4",
)
# PyTorch's attention, by each of its kernels.
BACKENDS = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
FLEX_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem; ``kv_heads`` None: as many key heads as query heads."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    kv_heads: int | None = None

    @property
    def heads_per_kv(self) -> int:
        """Query heads that read the same key."""
        return self.heads // (self.kv_heads or self.heads)

    def flops(self, which: str) -> float:
        """Two matrix products forward, five backward, half of each under a causal mask."""
        products = {"forward": 2, "backward": 5, "both": 7}[which]
        work = 2 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return work / 2 if self.causal else work

    def leaves(self) -> list[Tensor]:
        """Random query, key and value that require gradients."""
        heads = (self.heads, *[self.kv_heads or self.heads] * 2)
        shapes = [(self.batch, h, self.length, self.head_dim) for h in heads]
        dtype = DTYPES[self.dtype]
        return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = str(self.heads) if self.kv_heads is None else f"{self.heads}/{self.kv_heads}"
        shape = f"{self.batch} x {heads} x {self.length}"
        return f"{self.dtype}, {shape}, head_dim {self.head_dim}, {mask}"


def leaderboard_cases() -> Iterator[Case]:
    """16 heads of 64, 16,384 tokens, bf16, causal."""
    yield Case(batch=1, heads=16, length=16384, head_dim=64, causal=True)


def single_cases() -> Iterator[Case]:
    """The leaderboard's problem without its mask."""
    yield Case(batch=1, heads=16, length=16384, head_dim=64, causal=False)


def length_cases(dtype: str) -> Iterator[Case]:
    """512 to 16,384 tokens at a constant number of tokens in all; 65,536 with few heads."""
    for head_dim in (64, 128):
        for causal in (True, False):
            case = functools.partial(Case, head_dim=head_dim, causal=causal, dtype=dtype)
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                yield case(batch=16384 // length, heads=2048 // head_dim, length=length)
            for length in (32768, 65536):
                yield case(batch=1, heads=262144 // length, length=length)


def grouped_cases() -> Iterator[Case]:
    """Four query heads to a key head, as in many language models."""
    for head_dim in (64, 128):
        for length in (2048, 4096, 8192, 16384):
            yield Case(
                batch=16384 // length,
                heads=32,
                kv_heads=8,
                length=length,
                head_dim=head_dim,
                causal=True,
            )


def small_cases() -> Iterator[Case]:
    """Problems that take a GPU about as long as its host needs to start them."""
    for head_dim in (64, 128):
        for causal in (True, False):
            yield Case(batch=16, heads=16, length=1024, head_dim=head_dim, causal=causal)


def wide_cases() -> Iterator[Case]:
    """The widest head."""
    for causal in (True, False):
        for length in (1024, 8192):
            yield Case(batch=8192 // length, heads=8, length=length, head_dim=256, causal=causal)


def full_precision_cases() -> Iterator[Case]:
    """float32, at true float32 accuracy."""
    for head_dim in (64, 128, 256):
        for causal in (True, False):
            for length in (512, 4096):
                yield Case(
                    batch=8192 // length,
                    heads=8,
                    length=length,
                    head_dim=head_dim,
                    causal=causal,
                    dtype="fp32",
                )


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "leaderboard": leaderboard_cases,
    "small": small_cases,
    "fp32": full_precision_cases,
    "lengths": lambda: length_cases("bf16"),
    "grouped": grouped_cases,
    "wide": wide_cases,
    "single": single_cases,
    "lengths-fp16": lambda: length_cases("fp16"),
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(name: str, case: Case) -> Attention:
    """PyTorch's attention, by the kernel of that name."""
    keywords = {"is_causal": case.causal, "enable_gqa": case.heads_per_kv > 1}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, **keywords)

    return attend


def flex_mask(case: Case) -> Any:
    """The causal block mask, built from its blocks: all pairs of 65,536 tokens fill a GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    if not case.causal:
        return None
    blocks = case.length // FLEX_BLOCK
    index = torch.arange(blocks, device="cuda", dtype=torch.int32)
    one = torch.ones(1, 1, blocks, device="cuda", dtype=torch.int32)
    diagonal = torch.zeros(1, 1, blocks, blocks, device="cuda", dtype=torch.int32)
    diagonal[..., 0] = index
    below = index.expand(1, 1, blocks, blocks).contiguous()
    return BlockMask.from_kv_blocks(
        one,
        diagonal,
        index.view(1, 1, -1).contiguous(),
        below,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(case.length, case.length),
    )


def flex(case: Case) -> Attention:
    """FlexAttention, compiled for the case's shape, with its block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    mask, grouped = flex_mask(case), case.heads_per_kv > 1
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def flash_4(case: Case) -> Attention:
    """The package flash-attn-4, whose layout puts the sequence before the heads."""
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def is_installed(module: str) -> bool:
    """Whether a module can be found, which may be part of a package that is not there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def assignment(case: Case) -> Attention:
    """The leaderboard's form: the compiled autograd function on (heads, length, head_dim)."""
    apply = torch.compile(FlashAttention2Triton.apply)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), case.causal).view(q.shape)

    return attend


def implementations(set_name: str, case: Case) -> dict[str, Callable[[], Attention]]:
    """Ours and its peers, for one case; each is made when it is wanted."""
    ours = functools.partial(flash_attention, causal=case.causal)
    portable = functools.partial(flash_attention, causal=case.causal, implementation="triton")
    x = torch.empty(1, 1, 16, case.head_dim, device="cuda", dtype=DTYPES[case.dtype])
    options = resolve_options(head_dim=case.head_dim, causal=case.causal)
    found: dict[str, Callable[[], Attention]] = {OURS: lambda: ours}
    if choose(x, x, x, options).tier != "triton":
        found[PORTABLE] = lambda: portable
    if set_name == "leaderboard":
        found[ASSIGNMENT] = lambda: assignment(case)
    for name in (EFFICIENT,) if case.dtype == "fp32" else (FLASH, CUDNN):
        found[name] = functools.partial(sdpa, name, case)
    if case.dtype != "fp32":
        found[FLEX] = lambda: flex(case)
        if is_installed("flash_attn.cute"):  # optional, and measured if present
            found[FLASH_4] = lambda: flash_4(case)
    return found
