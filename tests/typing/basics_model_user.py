"""A user's program on every public name of basics-model, for type checkers."""

from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

import basics_model
from basics_model import (
    BYTE_VOCAB_SIZE,
    SIZES,
    Checkpoint,
    CosineSchedule,
    ModelConfig,
    TokenDataset,
    TransformerLM,
)
from basics_model.attention import (
    Attention,
    apply_rotary,
    rotary_tables,
    softmax_attention,
)
from basics_model.captured_step import CaptureError
from basics_model.checkpoint import restore_rng_state, rng_state
from basics_model.generation import filter_logits
from basics_model.loss import linear_cross_entropy
from basics_model.model import RMSNorm, SwiGLU
from basics_model.schedule import cosine_learning_rate
from basics_model.sizes import SizeName, model_flops


def model_and_data(path: Path, device: torch.device) -> float:
    size: ModelConfig = SIZES["small"]
    name: SizeName = "small"
    config: ModelConfig = basics_model.model_config(
        name, vocab_size=BYTE_VOCAB_SIZE, context_length=64, num_layers=2, num_heads=size.num_heads
    )
    attention: Attention = softmax_attention
    model = TransformerLM(config, attention=attention, device=device, dtype=torch.float32)
    sample: Path = basics_model.SAMPLE_TEXT
    data = TokenDataset(basics_model.open_tokens(sample), 64)
    data = TokenDataset(basics_model.open_tokens(path), 64, seed=1, rank=0, world_size=2)
    inputs, targets = data.get_batch(8, device=device)
    for more_inputs, _ in data.sequential_batches(4):
        inputs = more_inputs
    data.load_state_dict(data.state_dict())
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    schedule = CosineSchedule(optimizer, warmup_steps=1, total_steps=10, min_ratio=0.1)
    rates: list[float] = schedule.get_last_lr()
    loss: Tensor = basics_model.cross_entropy(model.forward(inputs), targets)
    hidden = torch.zeros(4, config.d_model)
    loss += linear_cross_entropy(hidden, model.lm_head.weight, targets, chunk_tokens=2)
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # torch.optim's own
    schedule.step()
    schedule.load_state_dict(schedule.state_dict())
    rate: float = cosine_learning_rate(
        1, max_learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=1, total_steps=10
    )
    flops: int = model_flops(config, batch=8, seq=64)
    return sum(rates) + loss.item() + rate + flops


def checkpoints(folder: Path, model: TransformerLM) -> Checkpoint:
    path = folder / "3.pt"
    state = Checkpoint(step=3, model=model.state_dict(), rng=rng_state())
    basics_model.save_checkpoint(path, state)
    loaded: Checkpoint = basics_model.load_checkpoint(path, map_location="cpu")
    restore_rng_state(loaded.rng)
    basics_model.save_safetensors(folder / "model.safetensors", model)
    same: TransformerLM = basics_model.load_safetensors(
        folder / "model.safetensors", attention=softmax_attention, device="cpu"
    )
    same.load_state_dict(dict(loaded.model))
    return loaded


def recorded(model: TransformerLM, inputs: Tensor, targets: Tensor) -> Tensor:
    def step(tokens: Tensor, wanted: Tensor) -> Tensor:
        return basics_model.cross_entropy(model.forward(tokens), wanted)

    try:
        captured: basics_model.CapturedStep[Tensor] = basics_model.CapturedStep(
            step, inputs, targets
        )
    except CaptureError:
        return step(inputs, targets)
    loss: Tensor = captured(inputs, targets)
    return loss + captured.outputs


def text(model: TransformerLM) -> str:
    prompt: Tensor = basics_model.encode_bytes("The ")[None]
    tokens: Tensor = basics_model.generate(
        model, prompt, max_new_tokens=8, temperature=0.8, top_k=5, top_p=0.9, stop_token=10
    )
    filter_logits(torch.zeros(1, 256), top_k=3, top_p=None)
    return basics_model.decode_bytes(tokens[0])


def parts(query: Tensor, device: torch.device) -> Tensor:
    cos, sin = rotary_tables(torch.arange(16, device=device), 8, 10_000.0)
    turned: Tensor = apply_rotary(query, cos, sin)
    out: Tensor = softmax_attention(turned, query, query)
    out = out + basics_model.sdpa_attention(query, query, query)
    out = RMSNorm(8, eps=1e-5).forward(out)
    return SwiGLU(8, 16, device=device).forward(out)
