"""Predicts the memory of one rank of ``train_lm.py``, before anything is allocated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from train_settings import Settings, recomputation

from basics_model import ModelConfig, TransformerLM, activation_memory
from shard_optim.accounting import Stage, fully_sharded_buffers, rank_memory

GIB = 2**30
#: Of a GPU, for its driver's context, the communicator, and what the allocator cannot use.
RESERVED = 3 * GIB
#: What ``ddp_lite.peer.PeerMemory`` takes for copies between GPUs.
SHARED_MEMORY = GIB / 2


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes on one rank at the fullest moment of a step.

    Attributes:
        held: parameters, gradients and optimizer state.
        buffers: gathered parameters and gradients on their way.
        activations: what forward keeps, and what the loss needs.
    """

    held: float
    buffers: float
    activations: float

    @property
    def total(self) -> float:
        """The sum, in bytes."""
        return self.held + self.buffers + self.activations

    def __str__(self) -> str:
        return (
            f"{written(self.total)} per rank (parameters, gradients and optimizer state "
            f"{written(self.held)}, buffers {written(self.buffers)}, activations "
            f"{written(self.activations)})"
        )


def written(size: float) -> str:
    """A number of bytes in GiB, or in MiB if it is less than one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"


def predict(settings: Settings, config: ModelConfig, world_size: int) -> Prediction:
    """What a rank needs for a step with these settings.

    Args:
        settings: wrapper, precision, batch, compilation and recomputation.
        config: the model.
        world_size: ranks.
    """
    itemsize = 2 if settings.precision == "bf16" else 4
    kept = settings.wrapper == "stage-3-kept"
    stage: Stage = 1 if settings.sharded else 0
    if settings.wrapper == "stage-2":
        stage = 2
    in_flight, copies = 0.0, 0.0
    if settings.wrapper in ("stage-3", "stage-3-kept"):
        stage = 3
        block = TransformerLM(replace(config, num_layers=1), device="meta").blocks[0]
        matrices = sum(p.numel() for p in block.parameters() if p.ndim > 1)
        in_flight = fully_sharded_buffers(
            [matrices] * config.num_layers,
            [config.vocab_size * config.d_model] * 2,
            gathered=itemsize,
            reduced=itemsize,
            reshard_after_forward=not kept,
        )
        if settings.communication != "nccl":  # "auto" may need none
            in_flight += SHARED_MEMORY
    else:
        # Under autocast, backward keeps the copies of the weights that the products used.
        copies = 0.0 if itemsize == 4 else float(itemsize * config.num_parameters)
        if stage == 2:
            in_flight = float(GIB)
        large = settings.wrapper == "bucketed" and settings.bucket_size_mb >= 100
        if large or settings.wrapper == "peer-copy":  # large buckets may need none
            in_flight += SHARED_MEMORY
    memory = rank_memory(
        config.num_parameters, world_size=world_size, stage=stage, in_flight=in_flight
    )
    checkpoint_blocks, keep_attention = recomputation(settings.recompute)
    activations = activation_memory(
        config,
        batch=settings.batch_size,
        seq=config.context_length,
        itemsize=itemsize,
        checkpoint_blocks=checkpoint_blocks,
        keep_attention=keep_attention,
        compiled=settings.compile,
    )
    return Prediction(
        held=memory.total - memory.buffers,
        buffers=memory.buffers + copies,
        activations=activations.total,
    )


def alternatives(settings: Settings) -> Iterator[Settings]:
    """Settings with the same result that need less and less memory, the fastest first."""
    order = ("stage-2", "stage-3-kept", "stage-3")
    wrappers = order[order.index(settings.wrapper) :] if settings.wrapper in order else order
    strategies: tuple[str, ...] = ("none", "block-keep-attention", "block")
    if settings.recompute in strategies:
        strategies = strategies[strategies.index(settings.recompute) :]
    for strategy in strategies:
        for wrapper in dict.fromkeys((settings.wrapper, *wrappers)):
            yield replace(settings, wrapper=wrapper, recompute=strategy)
    for batch_size in range(settings.batch_size - 1, 0, -1):
        if settings.batch_size * settings.accumulate % batch_size == 0:
            accumulate = settings.batch_size * settings.accumulate // batch_size
            yield replace(
                settings,
                wrapper="stage-3",
                recompute="block",
                batch_size=batch_size,
                accumulate=accumulate,
            )


def check_memory(
    settings: Settings, config: ModelConfig, world_size: int, device: torch.device
) -> Prediction:
    """Refuses settings that are predicted not to fit, and names the nearest ones that do.

    Raises:
        ValueError: the prediction is more than the device has, or than ``--memory-gib``.
    """
    prediction = predict(settings, config, world_size)
    available = None if settings.memory_gib is None else settings.memory_gib * GIB
    if available is None and device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory - RESERVED
    if available is None or prediction.total <= available:
        return prediction
    fitting = next(
        (
            each
            for each in alternatives(settings)
            if predict(each, config, world_size).total <= available
        ),
        None,
    )
    remedy = "Use a smaller model, a shorter --context or more ranks."
    if fitting is not None:
        names = ("wrapper", "recompute", "batch_size", "accumulate")
        options = [
            f"--{name.replace('_', '-')} {getattr(fitting, name)}"
            for name in names
            if getattr(fitting, name) != getattr(settings, name)
        ]
        remedy = (
            f"Use {' '.join(options)}, which needs "
            f"{written(predict(fitting, config, world_size).total)}."
        )
    raise ValueError(
        f"the memory of a rank must be what a step is predicted to need, {prediction}, but got "
        f"{written(available)}. {remedy}"
    )
