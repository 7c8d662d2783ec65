"""Trains a language model that is too large for one GPU: parameters, gradients and state in shards.

    torchrun --nproc-per-node 2 examples/train_sharded.py                  # 8 billion parameters
    torchrun --nproc-per-node 2 examples/train_sharded.py --checkpoint-dir runs/8b
    python examples/train_sharded.py --dry-run --ranks 2                   # only predicts memory

No rank ever holds the whole model: it is made on the meta device, and ``shard_optim`` gives it
memory one block at a time. The text is learned byte by byte.
"""

import os
import time
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer

from basics_model import (
    SAMPLE_TEXT,
    SIZES,
    ModelConfig,
    TokenDataset,
    TransformerLM,
    model_config,
    open_tokens,
)
from basics_model.sizes import SizeName
from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    load,
    save,
)
from shard_optim.accounting import fully_sharded_buffers, rank_memory

GIB = 2**30
CHUNK_MB = 64  # of parameters whose optimizer state is on the device at once


def predicted(
    config: ModelConfig, ranks: int, *, compute_bytes: int, keep: bool, offload_state: bool = False
) -> str:
    """What a rank will hold besides activations, in words.

    Args:
        config: the model.
        ranks: how many share it.
        compute_bytes: of a gathered parameter and of its gradient.
        keep: whether gathered parameters are kept between forward and backward.
        offload_state: whether optimizer state rests in host memory.
    """
    model = TransformerLM(config, device="meta")
    matrices = [p.numel() for p in model.blocks[0].parameters() if p.ndim > 1]
    repeated = [sum(matrices)] * config.num_layers
    others = [config.vocab_size * config.d_model] * 2
    buffers = fully_sharded_buffers(
        repeated,
        others,
        gathered=compute_bytes,
        reduced=compute_bytes,
        reshard_after_forward=not keep,
    )
    largest_shard = max(*matrices, *others) / ranks
    held = rank_memory(
        config.num_parameters,
        world_size=ranks,
        stage=3,
        in_flight=buffers,
        offloaded_chunk=max(CHUNK_MB * 2**20 / 4, largest_shard) if offload_state else None,
    )
    in_host_memory = f", in host memory {held.host_state / GIB:.2f}" if offload_state else ""
    return (
        f"{config.num_parameters:,} parameters on {ranks} ranks, GiB per rank: "
        f"parameters {held.parameters / GIB:.2f}, gradients {held.gradients / GIB:.2f}, "
        f"optimizer state {held.optimizer_state / GIB:.2f}, buffers at most "
        f"{held.buffers / GIB:.2f}, together {held.total / GIB:.2f} and activations{in_host_memory}"
    )


def join_ranks() -> torch.device:
    """Joins torchrun's process group; a process started alone is the only rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # torch does not declare it
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def newest(folder: Path | None) -> Path | None:
    """The last complete checkpoint of a folder."""
    if folder is None:
        return None
    steps = [each.parent for each in folder.glob("*/.metadata") if each.parent.name.isdecimal()]
    return max(steps, key=lambda path: int(path.name), default=None)


def main(
    size: Annotated[str, typer.Option(metavar="|".join(SIZES))] = "8B",
    num_layers: Annotated[int | None, typer.Option(help="Instead of the size's own.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Instead of the size's own.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Instead of the size's own.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Instead of the size's own.")] = None,
    vocab_size: Annotated[int, typer.Option(min=256, help="Bytes take the first 256.")] = 151_936,
    data: Annotated[Path, typer.Option(help="Text or .npy file of tokens.")] = SAMPLE_TEXT,
    context: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-4,
    keep: Annotated[bool, typer.Option(help="Gather once a step, not twice.")] = False,
    offload_state: Annotated[bool, typer.Option(help="Adam's moments in host memory.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compile the blocks.")] = True,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Saved at the end.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Predict memory, and stop.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Of the prediction.")] = 2,
) -> None:
    """Trains, from the newest checkpoint if there is one, and saves."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}, but got {size!r}.")
    try:
        config = model_config(
            cast(SizeName, size),
            vocab_size=vocab_size,
            context_length=context,
            d_model=d_model,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
        )
        tokens = open_tokens(data)
        if checkpoint_dir is not None and not dry_run:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)  # not only after the last step
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        typer.echo(
            predicted(config, ranks, compute_bytes=2, keep=keep, offload_state=offload_state)
        )
        return
    if len(tokens) <= context or int(tokens.max()) >= vocab_size:
        raise typer.BadParameter(
            f"--data must hold more tokens than --context {context}, all below --vocab-size "
            f"{vocab_size}, but {data} has {len(tokens)}, up to {tokens.max()}. Use another text."
        )
    device = join_ranks()
    first, world_size = dist.get_rank() == 0, dist.get_world_size()
    compute_dtype = torch.bfloat16 if device.type == "cuda" else None
    if first:
        compute_bytes = 2 if compute_dtype else 4
        typer.echo(
            predicted(
                config,
                world_size,
                compute_bytes=compute_bytes,
                keep=keep,
                offload_state=offload_state,
            )
        )

    torch.manual_seed(0)
    module = TransformerLM(config, device="meta")
    if compiled:
        for block in module.blocks:
            block.compile()
    model = FullyShardedDataParallel(
        module, compute_dtype=compute_dtype, reshard_after_forward=not keep, device=device
    )
    settings: dict[str, Any] = {"lr": learning_rate, "fused": device.type == "cuda"}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if offload_state:
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, offload_state=True, **settings
        )
    checkpoint = newest(checkpoint_dir)
    done = 0
    if checkpoint is not None:
        load(checkpoint, model, optimizer)
        done = int(checkpoint.name)
    dataset = TokenDataset(tokens, context, seed=done, rank=dist.get_rank(), world_size=world_size)

    for step in range(done, done + steps):
        start = time.perf_counter()
        inputs, targets = dataset.get_batch(batch_size, device=device)
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        value = loss.item()  # waits for the device
        if first:
            took = 1e3 * (time.perf_counter() - start)
            typer.echo(f"step {step + 1}: loss {value:.3f}, {took:.0f} ms")
    if first and device.type == "cuda":
        typer.echo(f"peak memory {torch.cuda.max_memory_allocated() / GIB:.2f} GiB")
    if checkpoint_dir is not None:
        save(checkpoint_dir / str(done + steps), model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
