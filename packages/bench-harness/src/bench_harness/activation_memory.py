"""Predicts what a step of basics-model's Transformer keeps in memory for its backward pass.

Per token, a block keeps values of the residual stream's width M and of the feed-forward width F in
the dtype of its products (e bytes each), and in eager mode also fp32 values of the norms and of the
rotary positions:

    eager     (6e + 16)·M + 4e·F bytes
    compiled  8e·M + 3e·F bytes, at most: the compiler keeps what both passes need, once

Attention is taken to be one fused operator, which keeps no scores.

While backward goes through a block, it also holds gradients with respect to the block's values: of
the feed-forward layers' inner values (three of width F) and of the residual stream (two of width
M), e·(3·F + 2·M) bytes per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from basics_model.sizes import ModelConfig, require_integer

_CHUNK_TOKENS = 2048  # of linear_cross_entropy
_LOGIT_BYTES = 10  # of a chunk: in fp32, the same again while it is summed, and in 16 bits


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Predicted bytes on one rank, besides parameters, gradients and optimizer state.

    Attributes:
        kept: by the blocks, from forward to backward.
        recomputed: by the blocks that backward recomputes together, while it goes through them.
        ends: by the embedding, the final norm and the loss, gradient of the LM head included.
        logits: of one chunk of the loss.
        gradients: with respect to the values of one block, while backward goes through it.
    """

    kept: float
    recomputed: float
    ends: float
    logits: float
    gradients: float

    @property
    def total(self) -> float:
        """Bytes at the fullest moment: in the loss, or in the first block of the backward pass."""
        return self.kept + self.ends + max(self.logits, self.recomputed + self.gradients)


def activation_memory(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    itemsize: int = 2,
    checkpoint_blocks: int = 0,
    keep_attention: bool = False,
    compiled: bool = False,
) -> ActivationMemory:
    """Bytes of activations of one training step.

    Args:
        config: the model.
        batch: sequences per rank and backward pass.
        seq: tokens per sequence.
        itemsize: bytes of a value in the dtype of the products: 2 for bf16, 4 for fp32.
        checkpoint_blocks: as given to :class:`basics_model.TransformerLM`.
        keep_attention: as given to :class:`basics_model.TransformerLM`.
        compiled: whether ``torch.compile`` compiles the blocks.

    Raises:
        ValueError: a count is no integer, or too small.
    """
    for name, value in (("batch", batch), ("seq", seq), ("itemsize", itemsize)):
        require_integer(name, value, least=1)
    require_integer("checkpoint_blocks", checkpoint_blocks, least=0)
    tokens, width = batch * seq, config.d_model
    block = tokens * (
        (8 * width + 3 * config.d_ff) * itemsize
        if compiled
        else (6 * itemsize + 16) * width + 4 * itemsize * config.d_ff
    )
    stream = tokens * width * itemsize
    kept, recomputed = float(config.num_layers * block), 0.0
    if checkpoint_blocks:
        groups = -(-config.num_layers // checkpoint_blocks)
        kept = groups * stream * (2.0 if keep_attention else 1.0)
        recomputed = float(min(checkpoint_blocks, config.num_layers) * block)
    return ActivationMemory(
        kept=kept,
        recomputed=recomputed,
        ends=tokens * width * (2 * itemsize + 8) + 4 * config.vocab_size * width,
        logits=min(tokens, _CHUNK_TOKENS) * config.vocab_size * _LOGIT_BYTES,
        gradients=float(tokens * (3 * config.d_ff + 2 * width) * itemsize),
    )
