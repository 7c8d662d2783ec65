"""A small, exact Transformer language model with its optimizer, data pipeline and checkpoints."""

from basics_model.attention import (
    Attention,
    apply_rotary,
    attention_output,
    attention_scores,
    attention_softmax,
    rotary_tables,
    sdpa_attention,
    softmax_attention,
)
from basics_model.captured_step import CapturedStep, CaptureError
from basics_model.checkpoint import (
    Checkpoint,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
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
from basics_model.generation import filter_logits, generate
from basics_model.loss import cross_entropy, linear_cross_entropy
from basics_model.memory import ActivationMemory, activation_memory
from basics_model.model import RMSNorm, SwiGLU, TransformerLM
from basics_model.optimizer import (
    AdamW,
    CosineSchedule,
    clip_gradients,
    cosine_learning_rate,
)
from basics_model.sizes import SIZES, ModelConfig, ModelSize, SizeName, model_config, model_flops

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SIZES",
    "ActivationMemory",
    "AdamW",
    "Attention",
    "CaptureError",
    "CapturedStep",
    "Checkpoint",
    "CosineSchedule",
    "ModelConfig",
    "ModelSize",
    "RMSNorm",
    "SizeName",
    "SwiGLU",
    "TokenDataset",
    "TransformerLM",
    "activation_memory",
    "apply_rotary",
    "attention_output",
    "attention_scores",
    "attention_softmax",
    "checkpoint_path",
    "clip_gradients",
    "cosine_learning_rate",
    "cross_entropy",
    "decode_bytes",
    "encode_bytes",
    "filter_logits",
    "generate",
    "linear_cross_entropy",
    "list_checkpoints",
    "load_checkpoint",
    "model_config",
    "model_flops",
    "open_tokens",
    "prune_checkpoints",
    "restore_rng_state",
    "rng_state",
    "rotary_tables",
    "save_checkpoint",
    "sdpa_attention",
    "softmax_attention",
]
