"""Trains a byte-level language model with all packages together, on any number of GPUs or CPUs.

    python examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --data my.txt --checkpoint-dir runs/my

The model is ``basics_model``'s, its attention ``flashattn_triton``'s; a wrapper of ``ddp_lite``
averages the gradients, and ``shard_optim`` spreads the optimizer's state over the ranks.
"""

import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor
from train_metrics import (
    JsonLines,
    MetricsLogger,
    TensorBoard,
    check_tensorboard,
    find_logger,
    open_logger,
)
from train_report import Report, say
from train_settings import ATTENTIONS, PRECISIONS, WRAPPERS, Settings, application, choose

from basics_model import (
    AdamW,
    Checkpoint,
    CosineSchedule,
    TokenDataset,
    TransformerLM,
    checkpoint_path,
    clip_gradients,
    decode_bytes,
    encode_bytes,
    generate,
    list_checkpoints,
    load_checkpoint,
    model_flops,
    open_tokens,
    prune_checkpoints,
    restore_rng_state,
    rng_state,
    save_checkpoint,
)
from ddp_lite import BucketedDDP
from shard_optim import ShardedOptimizer

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTATION = ("*.md", "docs/**/*.md", "examples/*.md", "packages/*/*.md")


class InputError(Exception):
    """What the user has to change, in one line."""


def join_ranks(device_name: str) -> torch.device:
    """Joins the process group that torchrun describes, or makes one of this process alone."""
    choose("device", dict.fromkeys(("auto", "cuda", "cpu")), device_name)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_name == "cpu" or (device_name == "auto" and not torch.cuda.is_available()):
        device, backend = torch.device("cpu"), "gloo"
    elif local_rank < torch.cuda.device_count():
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        raise ValueError(
            f"each rank of a machine needs its own GPU, got local rank {local_rank} and "
            f"{torch.cuda.device_count()} GPUs; start fewer ranks or use --device cpu"
        )
    device_id = device if backend == "nccl" else None
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, device_id=device_id)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # torch does not declare it
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    return device


def together(action: Callable[[], T]) -> T:
    """Does something on every rank; if it cannot be done on one of them, all say so and end."""
    result, problem = None, None
    try:
        result = action()
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise InputError(found)
    return result  # type: ignore[return-value]


def on_first_rank(action: Callable[[], T]) -> T:
    """Does something on rank 0 and gives every rank the result."""
    results = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def read_tokens(settings: Settings) -> npt.NDArray[Any]:
    """The text's bytes (tokens,)."""
    if settings.data is not None:
        return open_tokens(settings.data)
    paths = sorted(path for pattern in DOCUMENTATION for path in REPOSITORY.glob(pattern))
    if not paths:
        raise ValueError(f"there is no Markdown in {REPOSITORY} to learn; pass --data FILE")
    return np.concatenate([np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths])


def split_tokens(
    tokens: npt.NDArray[Any], settings: Settings
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Cuts off the held-out end, at least one window long."""
    window = settings.context + 1
    if len(tokens) < 2 * window:
        raise ValueError(
            f"a context of {settings.context} needs at least {2 * window} bytes of text, to train "
            f"and to validate, got {len(tokens)}; use a longer text or a shorter --context"
        )
    held_out = max(window, int(len(tokens) * settings.validation_fraction))
    return tokens[:-held_out], tokens[-held_out:]


class Inputs:
    """What the settings name, looked up and read; raises before anything is allocated."""

    def __init__(self, settings: Settings) -> None:
        self.config = settings.model_config()
        self.attention = choose("attention", ATTENTIONS, settings.attention)
        self.wrapper = choose("wrapper", WRAPPERS, settings.wrapper)
        self.dtype = choose("precision", PRECISIONS, settings.precision)
        if settings.tensorboard is not None:
            check_tensorboard()
        if settings.logger is not None:
            find_logger(settings.logger)
        tokens = read_tokens(settings)
        training, held_out = split_tokens(tokens, settings)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.training = TokenDataset(
            training, settings.context, seed=settings.seed, rank=rank, world_size=world_size
        )
        self.validation = TokenDataset(held_out, settings.context)
        # What decides the weights. The rest, such as the wrapper or the number of ranks that share
        # the same batch, only decides how they are computed, and may change when a run continues.
        self.identity: dict[str, Any] = asdict(self.config) | {
            "sequences_per_update": settings.batch_size * settings.accumulate * world_size,
            "training_tokens": len(training),
            "text_sha256": hashlib.sha256(tokens[: 2**20].tobytes()).hexdigest(),
        }
        for name in (
            "seed",
            "steps",
            "learning_rate",
            "min_ratio",
            "warmup_fraction",
            "weight_decay",
            "max_norm",
            "precision",
        ):
            self.identity[name] = getattr(settings, name)


def open_checkpoints(settings: Settings, identity: Mapping[str, Any]) -> Checkpoint | None:
    """Makes the folder, proves that it can be written, and reads its newest checkpoint.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds a run that this one does not continue.
    """
    folder = settings.checkpoint_dir
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    existing = list_checkpoints(folder)
    if not existing:
        return None
    if not settings.resume:
        raise ValueError(
            f"--no-resume needs a folder without checkpoints, but {folder} holds "
            f"{existing[-1].name}; choose another --checkpoint-dir"
        )
    checkpoint = load_checkpoint(existing[-1])
    saved = checkpoint.extra.get("identity", {})
    names = [name for name in identity if saved.get(name) != identity[name]]
    if names:
        changes = ", ".join(f"{name} {saved.get(name)} -> {identity[name]}" for name in names)
        raise ValueError(
            f"{folder} holds another run ({changes}); use its settings, or another --checkpoint-dir"
        )
    return checkpoint


class Trainer:
    """One run: what changes from update to update, and how.

    Every rank makes the same calls. Only rank 0 writes files, and only its console prints.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        checkpoint: Checkpoint | None,
        device: torch.device,
        console: Console,
    ) -> None:
        self.settings, self.inputs, self.device = settings, inputs, device
        self.console = console
        torch.manual_seed(settings.seed)
        model = TransformerLM(
            inputs.config,
            attention=inputs.attention,
            checkpoint_blocks=settings.checkpoint_blocks,
            device=device,
        )
        if checkpoint is not None:  # on rank 0 alone: the wrapper gives its weights to the others
            model.load_state_dict(checkpoint.model)
        if settings.compile:
            for block in model.blocks:
                block.compile()
        self.model = model
        self.wrapped = (
            BucketedDDP(model, bucket_size_mb=settings.bucket_size_mb)
            if inputs.wrapper is BucketedDDP
            else inputs.wrapper(model)
        )
        lr, decay = settings.learning_rate, settings.weight_decay
        self.optimizer: AdamW | ShardedOptimizer = (
            ShardedOptimizer(model.parameters(), AdamW, lr=lr, weight_decay=decay)
            if settings.sharded
            else AdamW(model.parameters(), lr=lr, weight_decay=decay)
        )
        self.schedule = CosineSchedule(
            self.optimizer,
            warmup_steps=round(settings.steps * settings.warmup_fraction),
            total_steps=settings.steps,
            min_ratio=settings.min_ratio,
        )
        self.step = 0
        self.gradient_norm = torch.zeros(())
        self._continue_from(checkpoint)
        self.loggers: list[MetricsLogger] = together(self._open_loggers)

    def _open_loggers(self) -> list[MetricsLogger]:
        """The loggers that the settings ask for, on rank 0."""
        loggers: list[MetricsLogger] = []
        if dist.get_rank() != 0:
            return loggers
        if self.settings.metrics is not None:
            loggers.append(JsonLines(self.settings.metrics, self.step))
        if self.settings.tensorboard is not None:
            loggers.append(TensorBoard(self.settings.tensorboard, self.step))
        if self.settings.logger is not None:
            loggers.append(open_logger(self.settings.logger))
        return loggers

    def _continue_from(self, checkpoint: Checkpoint | None) -> None:
        """Takes over everything but the weights from rank 0's checkpoint, on every rank."""
        state = on_first_rank(
            lambda: (
                None
                if checkpoint is None
                else {"step": checkpoint.step, "rng": checkpoint.rng, **checkpoint.extra}
            )
        )
        if state is None:
            return
        self.step = state["step"]
        saved = {} if checkpoint is None else dict(checkpoint.optimizer)
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.load_full_state_dict(saved)
        else:
            self.optimizer.load_state_dict(on_first_rank(lambda: saved))
        self.schedule.load_state_dict(state["schedule"])
        self.inputs.training.load_state_dict(state["data"])
        restore_rng_state(state["rng"])

    def train(self) -> None:
        """Makes the updates that are left."""
        settings = self.settings
        losses: list[Tensor] = []
        with Report(self.console, settings.steps, self.step) as report:
            while self.step < settings.steps:
                losses.append(self.update())
                self.step += 1
                last = self.step == settings.steps
                if last or self.step == 1 or self.step % settings.log_every == 0:
                    loss = self.average(torch.stack(losses).sum(), len(losses))
                    if not math.isfinite(loss):
                        raise InputError(
                            f"the loss must stay finite, got {loss} by step {self.step}; lower "
                            "--learning-rate or --max-norm, or raise --warmup-fraction"
                        )
                    sequences = len(losses) * self.inputs.identity["sequences_per_update"]
                    speed = report.update(self.step, loss, sequences * settings.context)
                    losses.clear()
                    self.log_metrics(loss, speed)
                with report.paused():
                    if last or self.step % settings.validate_every == 0:
                        held_out = self.validate()
                        report.line(f"step {self.step}: validation loss {held_out:.3f}")
                        for logger in self.loggers:
                            logger.log({"validation_loss": held_out}, step=self.step)
                    if last or self.step % settings.checkpoint_every == 0:
                        self.save()

        for logger in self.loggers:
            logger.finish()

    def log_metrics(self, loss: float, tokens_per_second: float) -> None:
        """Writes what the updates since the last report came to, on rank 0.

        A trained token costs three times a forward pass's matrix products, which ``model_flops``
        counts (recomputation is not counted: it is a cost, not progress).
        """
        if not self.loggers:
            return
        context = self.settings.context
        flops = 3 * model_flops(self.inputs.config, batch=1, seq=context) / context
        tflops = tokens_per_second * flops / dist.get_world_size() / 1e12
        values = {
            "loss": loss,
            "tokens_per_second": tokens_per_second,
            "tflops_per_rank": tflops,
            "learning_rate": self.schedule.get_last_lr()[0],
            "gradient_norm": float(self.gradient_norm),
        }
        if self.settings.peak_tflops:
            values["mfu"] = tflops / self.settings.peak_tflops
        if self.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        for logger in self.loggers:
            logger.log(values, step=self.step)

    def update(self) -> Tensor:
        """One update of the weights; returns this rank's loss, a scalar on its device."""
        total = torch.zeros((), device=self.device)
        for turn in range(self.settings.accumulate):
            inputs, targets = self.inputs.training.get_batch(
                self.settings.batch_size, device=self.device
            )
            last = turn == self.settings.accumulate - 1
            with nullcontext() if last else self.wrapped.no_sync():
                loss = self.loss(self.wrapped, inputs, targets) / self.settings.accumulate
                loss.backward()
            total += loss.detach()
        self.wrapped.finish_gradient_synchronization()
        self.gradient_norm = clip_gradients(self.model.parameters(), self.settings.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total

    def loss(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of a batch (batch, context), in nats per byte."""
        bf16 = self.inputs.dtype is torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss: Tensor = model(inputs, targets)
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on the held-out text; the ranks share its batches."""
        batches = self.inputs.validation.sequential_batches(
            self.settings.batch_size, device=self.device
        )
        limited = itertools.islice(batches, self.settings.validation_batches)
        total, count = torch.zeros((), device=self.device), 0
        for inputs, targets in itertools.islice(
            limited, dist.get_rank(), None, dist.get_world_size()
        ):
            total += self.loss(self.model, inputs, targets) * len(inputs)
            count += len(inputs)
        return self.average(total, count)

    def average(self, total: Tensor, count: int) -> float:
        """Mean over all ranks, from each one's sum and count."""
        both = torch.stack([total, torch.tensor(float(count), device=self.device)])
        dist.all_reduce(both)
        return float(both[0] / both[1])

    def save(self) -> None:
        """Writes a checkpoint on rank 0."""
        folder = self.settings.checkpoint_dir
        if folder is None:
            return
        optimizer = (
            self.optimizer.full_state_dict()
            if isinstance(self.optimizer, ShardedOptimizer)
            else self.optimizer.state_dict()
        )

        def write() -> None:
            save_checkpoint(
                checkpoint_path(folder, self.step),
                Checkpoint(
                    step=self.step,
                    model=self.model.state_dict(),
                    optimizer=optimizer or {},
                    rng=rng_state(),
                    extra={
                        "identity": self.inputs.identity,
                        "data": self.inputs.training.state_dict(),
                        "schedule": self.schedule.state_dict(),
                    },
                ),
            )
            prune_checkpoints(folder, self.settings.keep)

        on_first_rank(write)

    def sample(self) -> str:
        """The prompt and its continuation."""
        settings = self.settings
        prompt = encode_bytes(settings.prompt).to(self.device)
        with torch.compiler.set_stance("force_eager"):  # every new token is a new length
            tokens = generate(
                self.model,
                prompt[None],
                max_new_tokens=settings.sample_length,
                temperature=settings.temperature,
                top_p=settings.top_p,
                generator=torch.Generator(self.device).manual_seed(settings.seed),
            )
        return decode_bytes(tokens[0])


def run(settings: Settings) -> None:
    """Trains as the settings say, from joining the ranks to the sample.

    Raises:
        InputError: on every rank, for anything the user has to change.
    """
    try:
        device = join_ranks(settings.device)
    except ValueError as error:
        raise InputError(str(error)) from None
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    inputs = together(lambda: Inputs(settings))
    checkpoint = together(lambda: open_checkpoints(settings, inputs.identity) if first else None)
    trainer = Trainer(settings, inputs, checkpoint, device, console)
    say(
        console,
        f"{inputs.config.num_parameters:,} parameters, {len(inputs.training.tokens):,} training "
        f"tokens, {dist.get_world_size()} ranks on {device.type}, {settings.attention} attention",
    )
    say(console, trainer.wrapped.explain())
    if trainer.step:
        say(console, f"continuing from step {trainer.step}")
    trainer.train()
    if settings.sample_length and first:
        say(console, f"sample: {trainer.sample()}")
    dist.barrier()  # no rank leaves while rank 0 still samples


def complain(text: str) -> None:
    """One line on standard error, from rank 0 or from a rank that could not join."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        typer.echo(f"train_lm.py: {text}", err=True)


def main(settings: Settings) -> None:
    """Runs, and turns what the user can change into one line and exit code 2."""
    code = 0
    try:
        run(settings)
    except InputError as error:
        code = 2
        complain(str(error))
    except KeyboardInterrupt:
        complain("interrupted; with --checkpoint-dir the same command continues")
        raise typer.Exit(130) from None  # the other ranks may be anywhere: do not wait for them
    if dist.is_initialized():
        dist.destroy_process_group()
    raise typer.Exit(code)


if __name__ == "__main__":
    application(main)()
