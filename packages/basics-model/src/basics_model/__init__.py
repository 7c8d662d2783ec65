"""A small, exact Transformer language model with its optimizer, data pipeline and checkpoints."""

from basics_model.attention import sdpa_attention
from basics_model.captured_step import CapturedStep
from basics_model.checkpoint import (
    Checkpoint,
    load_checkpoint,
    restore_rng_state,
    rng_state,
    save_checkpoint,
)
from basics_model.data import (
    BYTE_VOCAB_SIZE,
    TokenDataset,
    decode_bytes,
    encode_bytes,
    open_tokens,
)
from basics_model.generation import generate
from basics_model.loss import cross_entropy, linear_cross_entropy
from basics_model.model import TransformerLM
from basics_model.optimizer import AdamW, CosineSchedule, clip_gradients
from basics_model.sizes import SIZES, ModelConfig, model_config

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SIZES",
    "AdamW",
    "CapturedStep",
    "Checkpoint",
    "CosineSchedule",
    "ModelConfig",
    "TokenDataset",
    "TransformerLM",
    "clip_gradients",
    "cross_entropy",
    "decode_bytes",
    "encode_bytes",
    "generate",
    "linear_cross_entropy",
    "load_checkpoint",
    "model_config",
    "open_tokens",
    "restore_rng_state",
    "rng_state",
    "save_checkpoint",
    "sdpa_attention",
]
