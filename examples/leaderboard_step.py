"""Times a whole training step of 8 billion parameters, as the course's leaderboard of 2026 asks.

    torchrun --nproc-per-node 2 examples/leaderboard_step.py

Forward, loss, backward and AdamW of a model with d_model 4096, d_ff 11008, 34 layers, 32 heads and
151,936 tokens, in bf16, causal, with one sequence of 32,768 tokens on each of two GPUs. As
``triton.testing.do_bench`` does, it warms up for 10 s and measures for 30 s; ranks must run equally
many steps, so rank 0 counts them for all. It begins with empty compile caches, which the board
allows ten minutes for. ``--row FILE`` appends what was measured as a line of JSON.
"""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from basics_model import ModelConfig, TransformerLM
from flashattn_triton import flash_attention
from shard_optim import FullyShardedDataParallel

GIB = 2**30


def join_ranks() -> torch.device:
    """Joins torchrun's process group."""
    if not dist.is_torchelastic_launched():
        raise typer.BadParameter("Start the program with torchrun --nproc-per-node 2.")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


class Step:
    """The model, its optimizer and a random batch; a call is one step and returns the loss."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        cuda = device.type == "cuda"
        module = TransformerLM(
            config,
            attention=partial(flash_attention, causal=True, layout="bhsd"),
            checkpoint_blocks=1,  # each block is recomputed in backward,
            keep_attention=cuda,  # except the output of its attention
            device="meta",
        )
        if cuda:
            for block in module.blocks:
                block.compile()
        bf16 = torch.bfloat16 if cuda else None
        self.model = FullyShardedDataParallel(
            module, compute_dtype=bf16, reduce_dtype=bf16, device=device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=cuda)
        torch.manual_seed(1 + dist.get_rank())  # each rank its own sequence
        tokens = torch.randint(config.vocab_size, (1, config.context_length + 1), device=device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]

    def __call__(self) -> torch.Tensor:
        """Forward, loss, backward and AdamW; returns the rank's loss before the update."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.inputs, self.targets)
        loss.backward()
        self.model.finish_gradient_synchronization()
        self.optimizer.step()
        return loss.detach()


def steps_in(seconds: float, step: Step, device: torch.device) -> int:
    """How many steps take so long, at least one, as rank 0 finds with one step of its own."""
    _ = times(step, 1, device)
    count = torch.tensor([seconds / times(step, 1, device)[0]], device=device)
    dist.broadcast(count, 0)
    return max(1, int(count))


def times(step: Step, count: int, device: torch.device) -> list[float]:
    """Seconds of each of so many steps, with the device synchronised after each."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def main(
    d_model: Annotated[int, typer.Option(min=1)] = 4096,
    d_ff: Annotated[int, typer.Option(min=1)] = 11_008,
    num_layers: Annotated[int, typer.Option(min=1)] = 34,
    num_heads: Annotated[int, typer.Option(min=1)] = 32,
    vocab_size: Annotated[int, typer.Option(min=1)] = 151_936,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 32_768,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 10.0,
    measured: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 30.0,
    row: Annotated[Path | None, typer.Option(help="Append the times to this file.")] = None,
) -> None:
    """Prints the mean and the fastest step, the slower rank's, with the losses' change."""
    try:
        config = ModelConfig(
            vocab_size=vocab_size,
            context_length=context,
            d_model=d_model,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
        )
        if row:
            row.open("a").close()  # not only after the last step
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    device = join_ranks()
    step = Step(config, device)
    first = float(step())
    times(step, steps_in(warmup, step, device), device)
    slowest = torch.tensor(times(step, steps_in(measured, step, device), device), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    last = float(step())
    if dist.get_rank() == 0:
        found = {
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
            "parameters": config.num_parameters,
            "tokens": dist.get_world_size() * context,
            "steps_s": [round(seconds, 4) for seconds in slowest.tolist()],
            "first_loss": first,
            "last_loss": last,
        }
        if device.type == "cuda":
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        typer.echo(
            f"{config.num_parameters:,} parameters, {dist.get_world_size()} × {context:,} tokens: "
            f"{slowest.mean():.3f} s a step, fastest {slowest.min():.3f} s, {len(slowest)} steps"
        )
        typer.echo(f"loss {first:.3f} in the first step, {last:.3f} in the last")
        if "peak_gib" in found:
            typer.echo(f"peak memory {found['peak_gib']} GiB")
        if row:
            with row.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
