"""A small, exact Transformer language model with its data pipeline and checkpoints."""

from typing import Never

from basics_model.attention import sdpa_attention
from basics_model.captured_step import CapturedStep
from basics_model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from basics_model.data import (
    BYTE_VOCAB_SIZE,
    SAMPLE_TEXT,
    TokenDataset,
    decode_bytes,
    encode_bytes,
    open_tokens,
)
from basics_model.generation import generate
from basics_model.loss import cross_entropy
from basics_model.model import TransformerLM
from basics_model.schedule import CosineSchedule
from basics_model.sizes import SIZES, ModelConfig, model_config
from basics_model.weights import load_safetensors, save_safetensors

__version__ = "0.1.0"

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SAMPLE_TEXT",
    "SIZES",
    "CapturedStep",
    "Checkpoint",
    "CosineSchedule",
    "ModelConfig",
    "TokenDataset",
    "TransformerLM",
    "cross_entropy",
    "decode_bytes",
    "encode_bytes",
    "generate",
    "load_checkpoint",
    "load_safetensors",
    "model_config",
    "open_tokens",
    "save_checkpoint",
    "save_safetensors",
    "sdpa_attention",
]

_ELSEWHERE = {
    "AdamW": "torch.optim",
    "clip_gradients": "torch.nn.utils, where its name is clip_grad_norm_",
    "linear_cross_entropy": "basics_model.loss",
    "restore_rng_state": "basics_model.checkpoint",
    "rng_state": "basics_model.checkpoint",
}


def __getattr__(name: str) -> Never:
    if name in _ELSEWHERE:
        raise ImportError(f"{name} must be imported from {_ELSEWHERE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
