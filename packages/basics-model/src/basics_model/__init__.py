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
    SAMPLE_TEXT,
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
from basics_model.weights import load_safetensors, save_safetensors

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SAMPLE_TEXT",
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
    "load_safetensors",
    "model_config",
    "open_tokens",
    "restore_rng_state",
    "rng_state",
    "save_checkpoint",
    "save_safetensors",
    "sdpa_attention",
]
