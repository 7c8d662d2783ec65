"""One attention problem: its shape, the arguments of an implementation, and its least work.

A problem has at most one feature, which adds a keyword argument of ``flash_attention`` to the call:

- "sinks": a learned logit per head in the softmax's denominator;
- "alibi": ALiBi's slopes, one per head, as constants (arXiv:2108.12409);
- "bias": a learned bias of (1, heads, sequence, sequence), shared by the batch;
- "prefix": the first quarter of every sequence is visible to all of its queries;
- "documents": four documents of about the same length share every row;
- "deterministic": gradients must be the same, bit for bit, from run to run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench_harness.attentions import Window
from bench_harness.core import Row
from bench_harness.flops import attention_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: "plain" has none; ratios of the others are to it.
FEATURES = ("plain", "sinks", "alibi", "bias", "prefix", "documents", "deterministic")
_DOCUMENTS = 4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Attributes:
        kv_heads: key and value heads; they divide ``heads``.
        value_head_dim: of value and output.
        window: (left, right) visible keys beside the diagonal, None for no limit.
        lengths: of sequences packed one after another; the batch is 1 and ``sequence`` their sum.
        feature: one of :data:`FEATURES`; "deterministic" sets ``deterministic`` too.
    """

    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    value_head_dim: int
    dtype: str
    causal: bool
    window: Window | None = None
    softcap: float | None = None
    deterministic: bool = False
    lengths: tuple[int, ...] = ()
    feature: str = "plain"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random query, key and value that need gradients, and the output's gradient."""
        import torch

        torch.manual_seed(0)

        def random(heads: int, width: int) -> Tensor:
            shape: tuple[int, ...] = (self.batch, heads, self.sequence, width)
            if self.lengths:
                shape = (self.sequence, heads, width)
            return torch.randn(shape, device=device, dtype=getattr(torch, DTYPES[self.dtype]))

        query = random(self.heads, self.head_dim).requires_grad_()
        key = random(self.kv_heads, self.head_dim).requires_grad_()
        value = random(self.kv_heads, self.value_head_dim).requires_grad_()
        return query, key, value, random(self.heads, self.value_head_dim)

    def settings(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of an implementation: ``causal``, and what is not the default."""
        import torch

        given: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            given["window"] = self.window
        if self.softcap is not None:
            given["softcap"] = self.softcap
        if self.deterministic:
            given["deterministic"] = True
        if self.lengths:
            starts = [0, *itertools.accumulate(self.lengths)]
            given["cu_seqlens"] = torch.tensor(starts, device=device, dtype=torch.int32)
            given["max_seqlen"] = max(self.lengths)
        return {**given, **self._feature_arguments(device)}

    def _feature_arguments(self, device: torch.device) -> dict[str, Tensor]:
        """The tensor that the feature adds to the call; what is learned requires a gradient."""
        import torch

        torch.manual_seed(1)
        like: dict[str, Any] = {"device": device, "dtype": getattr(torch, DTYPES[self.dtype])}
        if self.feature == "sinks":
            return {"sinks": torch.randn(self.heads, **like).requires_grad_()}
        if self.feature == "alibi":
            ranks = torch.arange(1, self.heads + 1, device=device, dtype=torch.float32)
            return {"alibi_slopes": torch.exp2(-8 * ranks / self.heads)}
        if self.feature == "bias":
            shape = (1, self.heads, self.sequence, self.sequence)
            return {"bias": torch.randn(shape, **like).requires_grad_()}
        if self.feature == "prefix":
            lengths = torch.full((self.batch,), self._prefix, device=device, dtype=torch.int32)
            return {"prefix_lengths": lengths}
        if self.feature == "documents":
            each = torch.tensor(self.documents, device=device)
            numbers = torch.repeat_interleave(torch.arange(len(each), device=device), each)
            return {"document_ids": numbers.expand(self.batch, -1).contiguous()}
        return {}

    @property
    def _prefix(self) -> int:
        return max(1, self.sequence // 4)

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents of a row, which differ by at most one token; most have one."""
        count = min(_DOCUMENTS, self.sequence) if self.feature == "documents" else 1
        return [(self.sequence + i) // count for i in range(count)]

    def flops(self, name_of_pass: str) -> int:
        """Operations of a pass; hidden scores are not counted."""
        lengths = list(self.lengths) or self.documents
        if self.feature == "prefix":
            # The mask hides half of the prefix's square, which the prefix shows again.
            lengths = [self.sequence, self._prefix]
        forward, backward = (
            sum(
                attention_flops(
                    self.batch,
                    self.heads,
                    length,
                    self.head_dim,
                    value_head_dim=self.value_head_dim,
                    causal=self.causal,
                    window=self.window,
                    backward=is_backward,
                )
                for length in lengths
            )
            for is_backward in (False, True)
        )
        return of_pass(name_of_pass, forward, backward)

    def least_bytes(self, name_of_pass: str) -> int:
        """Memory traffic that a pass cannot do without: its inputs and results, once each."""
        size = 4 if self.dtype == "fp32" else 2
        tokens = self.batch * self.sequence * size
        inputs = tokens * (self.heads + self.kv_heads) * self.head_dim
        inputs += tokens * self.kv_heads * self.value_head_dim
        if self.feature == "bias":
            inputs += self.heads * self.sequence**2 * size // (2 if self.causal else 1)
        output = tokens * self.heads * self.value_head_dim
        # Backward reads inputs, output and its gradient, and writes the inputs' gradients.
        return of_pass(name_of_pass, inputs + output, 2 * inputs + 2 * output)

    def predicted_bytes(self) -> Row:
        """What naive attention keeps for backward, and what it needs at its peak.

        Saved: the softmax output (B·H·S²), which both the softmax and the second product need; a
        causal mask (S² booleans); the output (B·H·S·E). Query, key and value exist anyway. The peak
        of backward adds three more B·H·S² matrices: the gradient of the softmax output, its product
        with that output, which PyTorch's softmax computes first, and the gradient of the scores.
        """
        size = 4 if self.dtype == "fp32" else 2
        scores = self.batch * self.heads * self.sequence**2 * size
        output = self.batch * self.heads * self.sequence * self.value_head_dim * size
        saved = scores + self.causal * self.sequence**2 + output
        return {"predicted_saved_bytes": saved, "predicted_peak_bytes": saved + 3 * scores}

    @property
    def name(self) -> str:
        """The problem's name within its case: its length, and its feature if it has one."""
        return f"length {self.sequence}" + f", {self.feature}" * (self.feature != "plain")

    @property
    def is_plain(self) -> bool:
        """Whether :meth:`predicted_bytes` holds: nothing but a mask and as many key heads."""
        special = self.window or self.softcap or self.lengths or self.feature != "plain"
        return not special and self.kv_heads == self.heads


def of_pass(name: str, forward: int, backward: int) -> int:
    """Operations or bytes of a pass, from those of forward and of backward."""
    alone = {"forward": forward, "training forward": forward, "backward": backward}
    return alone.get(name, forward + backward)


def learned(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments that have a gradient: sinks or a bias."""
    return {
        name: settings[name]
        for name in ("sinks", "bias")
        if name in settings and settings[name].requires_grad
    }
