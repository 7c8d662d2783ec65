"""A pre-norm decoder-only Transformer language model.

Token embedding → blocks of [RMSNorm → causal self-attention with rotary positions → residual,
RMSNorm → SwiGLU → residual] → RMSNorm → untied LM head. No biases, no dropout.

Dimensions in comments: B batch, S sequence, H heads, D head_dim, M d_model, F d_ff, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from basics_model.attention import Attention, apply_rotary, rotary_tables, sdpa_attention
from basics_model.loss import linear_cross_entropy
from basics_model.recomputation import attention_kept
from basics_model.sizes import ModelConfig, require_integer


class Placement(TypedDict, total=False):
    """Keywords that every layer hands on to the parameters it makes."""

    device: torch.device | str | None
    dtype: torch.dtype | None


@torch.no_grad()
def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fills ``weight`` in place from N(0, std²), cut at three standard deviations.

    Uniform numbers go through the inverse of the cumulative distribution function. Newer versions
    of ``nn.init.trunc_normal_`` draw again whatever lies outside; this allocates nothing, never
    waits for a GPU, and gives the same weights under every version of torch.
    """
    edge = math.erf(3 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2)).clamp_(-3 * std, 3 * std)


class Linear(nn.Linear):
    """Bias-free linear map, initialised from N(0, 2 / (in + out)) cut at three deviations."""

    def __init__(self, in_features: int, out_features: int, **placement: Unpack[Placement]) -> None:
        super().__init__(in_features, out_features, bias=False, **placement)

    def reset_parameters(self) -> None:
        """Draws the weight anew from torch's global generator."""
        truncated_normal_(self.weight, math.sqrt(2 / (self.in_features + self.out_features)))


class LMHead(Linear):
    """Scores of all tokens from the last hidden state, or the loss of them."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Maps (..., M) to (..., V); with targets (...), to their mean cross-entropy.

        The loss is computed here, not in the model, because wrappers that shard parameters, or
        gather them late, have to see that this module is what reads its weight.
        """
        if targets is not None:
            return linear_cross_entropy(hidden, self.weight, targets)
        return super().forward(hidden)


class Embedding(nn.Embedding):
    """Token embedding, initialised from N(0, 1) cut at ±3."""

    def reset_parameters(self) -> None:
        """Draws the weight anew from torch's global generator."""
        truncated_normal_(self.weight, 1.0)


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · weight over the last dimension (Zhang & Sennrich, arXiv:1910.07467).

    Computes in fp32, or in the input's dtype where that is wider, and returns the input's dtype.
    """

    def __init__(self, d_model: int, *, eps: float = 1e-5, **placement: Unpack[Placement]) -> None:
        super().__init__(d_model, eps=eps, **placement)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (..., d_model)."""
        # The fused kernel takes one dtype, and sums in fp32 whatever it is.
        common = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(common)
        return F.rms_norm(x.to(common), weight.shape, weight, self.eps).to(x.dtype)


def shared_input(x: Tensor) -> Tensor:
    """``x`` in the dtype of the products under autocast: one cast for all of them, not one each."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class SelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions around a given attention callable."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention = attention
        self.query, self.key, self.value, self.output = (
            Linear(config.d_model, config.d_model, **placement) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps (B, S, M) to (B, S, M); ``cos`` and ``sin`` are the rotary tables (S, D)."""
        x = shared_input(x)
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, D]
            for layer in (self.query, self.key, self.value)
        )
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        mixed = self.attention(*(x.transpose(1, 2) for x in (query, key, value)))  # [B, H, S, D]
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(-2)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ∘ up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.gate = Linear(d_model, d_ff, **placement)
        self.up = Linear(d_model, d_ff, **placement)
        self.down = Linear(d_ff, d_model, **placement)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., M) to (..., M) through (..., F)."""
        x = shared_input(x)
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """One pre-norm block: attention, then feed-forward, each added to the residual stream.

    The stream goes through blocks as two terms. The next block adds them where its norm reads the
    sum, so that a compiler makes one kernel of sum and norm. With ``keep_attention`` the block
    checkpoints itself (:mod:`basics_model.recomputation`), so that ``torch.compile`` of a block
    sees the checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        *,
        keep_attention: bool = False,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.keep_attention = keep_attention
        self.attention_norm = RMSNorm(config.d_model, **placement)
        self.attention = SelfAttention(config, attention, **placement)
        self.feed_forward_norm = RMSNorm(config.d_model, **placement)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff, **placement)

    def forward(self, x: Tensor, delta: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the terms of the residual stream, each (B, S, M), to those of its next state."""
        x = x + delta  # before the checkpoint, which then keeps one tensor
        if self.keep_attention and torch.is_grad_enabled():
            kept: tuple[Tensor, Tensor] = checkpoint(
                self._layers, x, cos, sin, use_reentrant=False, context_fn=attention_kept
            )
            return kept
        return self._layers(x, cos, sin)

    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x, self.feed_forward(self.feed_forward_norm(x))


class TransformerLM(nn.Module):
    """Decoder-only language model.

    Args:
        config: hyperparameters.
        attention: maps query, key, value (batch, heads, seq, head_dim) to an output of that shape,
            with the causal mask inside. All are views of (batch, seq, heads, head_dim) memory.
        checkpoint_blocks: how many consecutive blocks are recomputed together in the backward pass
            (activation checkpointing, Chen et al., arXiv:1604.06174); 0 keeps everything. With n,
            the input of every n-th block is kept, and backward holds the activations of n blocks at
            a time; n = 1 needs the least memory. A step takes a quarter to a third longer.
        keep_attention: with ``checkpoint_blocks=1``, also keep the outputs of fused attention
            (:mod:`basics_model.recomputation`). It changes nothing for attention that is not fused.
        device: where parameters are made; "meta" allocates nothing.
        dtype: of the parameters.

    Raises:
        ValueError: ``checkpoint_blocks`` is no integer, below 0, or not 1 with ``keep_attention``.

    The state dict holds parameters only: rotary tables are computed in each forward, once for all
    blocks, so a model accepts any sequence length and can be moved or cast without harming them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: Attention = sdpa_attention,
        checkpoint_blocks: int = 0,
        keep_attention: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_integer("checkpoint_blocks", checkpoint_blocks, least=0)
        if keep_attention and checkpoint_blocks != 1:
            raise ValueError(
                f"checkpoint_blocks must be 1 beside keep_attention, but got {checkpoint_blocks}. "
                "Blocks that keep the output of their attention are recomputed one at a time."
            )
        self.config = config
        # Blocks that keep the output of their attention checkpoint themselves.
        self.checkpoint_blocks = 0 if keep_attention else checkpoint_blocks
        placement: Placement = {"device": device, "dtype": dtype}
        self.embedding = Embedding(config.vocab_size, config.d_model, **placement)
        self.blocks = nn.ModuleList(
            Block(config, attention, keep_attention=keep_attention, **placement)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, **placement)
        self.lm_head = LMHead(config.d_model, config.vocab_size, **placement)

    def forward(
        self, token_ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Scores of the next token at every position, or their mean loss.

        Args:
            token_ids: (batch, seq) int64, each from 0 to ``vocab_size - 1``.
            targets: (batch, seq) int64, the token that follows each position.
            positions: (seq,) integers, the tokens' positions in their sequence, where that is
                spread over ranks; None stands for 0 to seq - 1.

        Returns:
            Without targets, logits (batch, seq, vocab_size), in the parameters' dtype or
            autocast's. With targets, the mean cross-entropy in nats, a scalar in fp32 or fp64; all
            logits are never in memory at once (:func:`basics_model.loss.linear_cross_entropy`).

        Raises:
            ValueError: ``token_ids`` is not (batch, seq) int64, or the others do not fit it.
        """
        if token_ids.ndim != 2 or token_ids.dtype != torch.int64:
            raise ValueError(
                f"token_ids must be (batch, seq) int64, but got shape {tuple(token_ids.shape)} "
                f"and {token_ids.dtype}."
            )
        if positions is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        elif positions.shape != token_ids.shape[1:]:
            raise ValueError(
                f"positions must be ({token_ids.shape[1]},), one for each token of a sequence, but "
                f"got shape {tuple(positions.shape)}."
            )
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embedding(token_ids)  # [B, S, M]
        if self.checkpoint_blocks and torch.is_grad_enabled():
            for first in range(0, len(self.blocks), self.checkpoint_blocks):
                blocks = range(first, min(first + self.checkpoint_blocks, len(self.blocks)))
                x = checkpoint(self._run_blocks, blocks, x, cos, sin, use_reentrant=False)
        else:
            x = self._run_blocks(range(len(self.blocks)), x, cos, sin)
        return cast(Tensor, self.lm_head(self.norm(x), targets))

    def _run_blocks(self, indices: range, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        delta = torch.zeros_like(x)
        for index in indices:
            x, delta = self.blocks[index](x, delta, cos, sin)
        return x + delta
