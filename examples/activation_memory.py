"""Activations of a step of ``train_lm.py`` and of recomputed blocks, counted before it runs.

Built on :func:`bench_harness.activations.saved_for_backward`, whose rule and letters it shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from basics_model import ModelConfig
from basics_model.sizes import require_integer
from bench_harness.activations import saved_for_backward

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
    shape: ModelConfig,
    *,
    batch: int,
    seq: int,
    itemsize: int = 2,
    checkpoint_blocks: int = 0,
    keep_attention: bool = False,
    compiled: bool = False,
    device: str = "cuda",
) -> ActivationMemory:
    """Bytes of activations of one training step with fused attention and a chunked loss.

    In eager mode a block keeps what ``saved_for_backward`` lists. A compiled block keeps
    8·e·T·M + 3·e·T·F, at most: the compiler keeps what both passes need, once. While backward goes
    through a block, it also holds gradients with respect to the block's values: of the feed-forward
    layers' inner values (three of width F) and of the residual stream (two of width M).

    Args:
        shape: of the model.
        batch: sequences per rank and backward pass.
        seq: tokens per sequence.
        itemsize: e, bytes of a value in the dtype of the products: 2 for bf16, 4 for fp32.
        checkpoint_blocks: as given to :class:`basics_model.TransformerLM`.
        keep_attention: as given to :class:`basics_model.TransformerLM`.
        compiled: whether ``torch.compile`` compiles the blocks.
        device: "cuda" or "cpu".

    Raises:
        ValueError: a count is no integer, or too small.
    """
    for name, value in (("batch", batch), ("seq", seq), ("itemsize", itemsize)):
        require_integer(name, value, least=1)
    require_integer("checkpoint_blocks", checkpoint_blocks, least=0)
    tokens, width, layers = batch * seq, shape.d_model, shape.num_layers
    precision = "bf16" if itemsize == 2 else "fp32"
    parts = saved_for_backward(
        shape, batch, seq, precision=precision, attention="sdpa", device=device
    )
    kept = parts["attention"] + parts["scores"] + parts["feed-forward"]
    kept += parts["residual stream"] * 2 * layers // (2 * layers + 1)  # the last norm is no block's
    if compiled:
        kept = layers * tokens * (8 * width + 3 * shape.d_ff) * itemsize
    recomputed = 0.0
    if checkpoint_blocks:
        recomputed = min(checkpoint_blocks, layers) * kept / layers
        groups = -(-layers // checkpoint_blocks)
        kept = groups * tokens * width * itemsize * (2 if keep_attention else 1)
    return ActivationMemory(
        kept=float(kept),
        recomputed=recomputed,
        ends=tokens * width * (2 * itemsize + 8) + 4 * shape.vocab_size * width,
        logits=min(tokens, _CHUNK_TOKENS) * shape.vocab_size * _LOGIT_BYTES,
        gradients=float(tokens * (3 * shape.d_ff + 2 * width) * itemsize),
    )
