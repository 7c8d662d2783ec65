"""Mistakes in calls of basics-model: type checkers refuse the marked lines and no others."""

import torch

from basics_model import (
    ModelConfig,
    TransformerLM,
    generate,
    load_checkpoint,
    load_safetensors,
    model_config,
)


def mistakes(model: TransformerLM, tokens: torch.Tensor) -> None:
    model_config("smal")  # refused
    model_config("small", num_layer=2)  # refused
    model_config("small", num_layers="2")  # refused
    load_safetensors("a.safetensors", dtype=torch.float32)  # refused
    ModelConfig(64, 64, 256, 2, 4)  # refused
    TransformerLM(model_config("small"), attention="sdpa")  # refused
    generate(model, tokens, max_new_tokens=8, temprature=0.8)  # refused
    generate(model, tokens, 8)  # refused
    print(load_checkpoint("folder/3.pt").steps)  # refused
