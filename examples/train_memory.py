"""Predicts memory and recomputation of ``train_lm.py``, before anything is allocated.

The prediction is an upper bound, so that what is said to fit does fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from activation_memory import activation_memory
from train_settings import Settings, recomputation, uses_gpus

from basics_model import ModelConfig, TransformerLM
from basics_model.sizes import model_flops
from shard_optim.accounting import DtypePolicy, Stage, fully_sharded_buffers, rank_memory

GIB = 2**30
#: Of a GPU, for its driver's context, the communicator, and what the allocator cannot use.
RESERVED = 3 * GIB
#: What ``ddp_lite.peer.PeerMemory`` takes for copies between GPUs.
SHARED_MEMORY = GIB / 2
#: What cuBLAS keeps on a GPU, at most 64 MiB for each stream with products of matrices, and a
#: quarter of a GiB for what recorded steps have held beyond that.
WORKSPACES = 3 * GIB / 4


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes on one rank at the fullest moment of a step.

    Attributes:
        held: parameters, gradients and optimizer state.
        buffers: gathered parameters and gradients on their way.
        activations: what forward keeps, and what the loss and the backward pass need.
        replaced: of the gradients or the activations, those that are not there together: backward
            frees the activations of a block before it makes the gradients of the next one.
        recomputed: operations that backward repeats, as a part of the step's others.
    """

    held: float
    buffers: float
    activations: float
    replaced: float
    recomputed: float

    @property
    def total(self) -> float:
        """Bytes at that moment."""
        return self.held + self.buffers + self.activations - self.replaced

    def __str__(self) -> str:
        replaced = (
            f", less {written(self.replaced)} of activations that are freed before all gradients "
            "are there"
            if self.replaced
            else ""
        )
        return (
            f"{written(self.total)} per rank (parameters, gradients and optimizer state "
            f"{written(self.held)}, buffers {written(self.buffers)}, activations "
            f"{written(self.activations)}{replaced})"
        )

    def recomputation(self) -> str:
        """What recomputation costs, in words; nothing if there is none."""
        if not self.recomputed:
            return ""
        return f"recomputation adds {self.recomputed:.0%} to the operations of a step"


def written(size: float) -> str:
    """A number of bytes in GiB, or in MiB if it is less than one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"


def recomputed_share(
    config: ModelConfig, *, seq: int, checkpoint_blocks: int, keep_attention: bool
) -> float:
    """Operations of matrix products that backward repeats, as a part of all others of a step.

    Backward repeats the forward pass of each group of recomputed blocks up to the group's last
    product, whose result no gradient needs. A step takes three times the forward pass's operations
    (``basics_model.model_flops``) without recomputation.

    Args:
        config: the model.
        seq: tokens per sequence.
        checkpoint_blocks: as given to ``TransformerLM``; 0 recomputes nothing.
        keep_attention: as given to ``TransformerLM``.
    """
    if not checkpoint_blocks:
        return 0.0
    forward = model_flops(config, batch=1, seq=seq)
    repeated = forward - 2 * seq * config.d_model * config.vocab_size
    groups = -(-config.num_layers // checkpoint_blocks)
    repeated -= groups * 2 * seq * config.d_ff * config.d_model
    if keep_attention:
        repeated -= config.num_layers * 4 * seq**2 * config.d_model
    return repeated / (3 * forward)


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
        config.num_parameters,
        world_size=world_size,
        stage=stage,
        policy=DtypePolicy(state=4 if settings.moments == "bf16" else 8),
        in_flight=in_flight,
    )
    checkpoint_blocks, keep_attention = recomputation(settings.recompute)
    activations = activation_memory(
        config,
        batch=settings.batch_size,
        seq=config.context_length // settings.context_parallel,
        itemsize=itemsize,
        checkpoint_blocks=checkpoint_blocks,
        keep_attention=keep_attention,
        compiled=settings.compile,
    )
    # Stage 3 makes gradients while backward frees activations. With accumulation they are there
    # from the first backward on, and of the other stages it has not been measured.
    gradual = stage == 3 and settings.accumulate == 1
    return Prediction(
        held=memory.total - memory.buffers,
        buffers=memory.buffers + copies + (WORKSPACES if uses_gpus(settings) else 0.0),
        activations=activations.total,
        replaced=min(memory.gradients, activations.kept) if gradual else 0.0,
        recomputed=recomputed_share(
            config,
            seq=config.context_length,
            checkpoint_blocks=checkpoint_blocks,
            # Attention that is not one fused operator is computed again.
            keep_attention=keep_attention and settings.attention != "softmax",
        ),
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
        smaller = predict(fitting, config, world_size)
        cost = f"; {smaller.recomputation()}" if smaller.recomputed else ""
        remedy = f"Use {' '.join(options)}, which needs {written(smaller.total)}{cost}."
    raise ValueError(
        f"the memory of a rank must be what a step is predicted to need, {prediction}, but got "
        f"{written(available)}. {remedy}"
    )
