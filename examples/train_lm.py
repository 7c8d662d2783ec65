"""Trains a byte-level language model with all packages together, on any number of GPUs or CPUs.

    python examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --data my.txt --checkpoint-dir runs/my
    torchrun --nproc-per-node 2 examples/train_lm.py --preset fast --size xl --context 2048
    torchrun --nproc-per-node 4 examples/train_lm.py --context 8192 --context-parallel 4

The model is ``basics_model``'s, its attention ``flashattn_triton``'s. The ranks hold replicas,
whose gradients a wrapper of ``ddp_lite`` averages, or shards, which ``shard_optim`` makes.
"""

import hashlib
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy.typing as npt
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor
from train_checkpoints import (
    CheckpointWriter,
    check_export,
    differences,
    export,
    lock_folder,
    open_checkpoints,
)
from train_context import Context
from train_memory import check_memory
from train_metrics import (
    JsonLines,
    MetricsLogger,
    TensorBoard,
    check_tensorboard,
    find_logger,
    known_peak_tflops,
    open_logger,
)
from train_parallel import Parallelism, Replicas, make_parallelism
from train_report import Report, say
from train_settings import (
    ATTENTIONS,
    PRECISIONS,
    PRODUCTS,
    WRAPPERS,
    Settings,
    application,
    choose,
    recomputation,
    with_preset,
)

from basics_model import (
    BYTE_VOCAB_SIZE,
    CapturedStep,
    Checkpoint,
    CosineSchedule,
    TokenDataset,
    TransformerLM,
    decode_bytes,
    encode_bytes,
    generate,
    open_tokens,
)
from basics_model.checkpoint import restore_rng_state
from basics_model.products import use_float8_products
from basics_model.sizes import model_flops
from ddp_lite import PeerFailureError
from flashattn_triton.context_parallel import RankLostError
from shard_optim import CollectiveError

T = TypeVar("T")

#: For compilation and for the optimizer's state.
UPDATES_BEFORE_RECORDING = 3

CONTINUE = "with --checkpoint-dir the same command continues"


class InputError(Exception):
    """What the user has to change, in one line."""


class LostRankError(Exception):
    """Another rank has ended, or did not come in time."""


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Names what the ranks did together where the backend's error does not."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"every rank must take part in {what}, but it failed on rank {dist.get_rank()} of "
            f"{dist.get_world_size()}: {error}"
        ) from error


@contextmanager
def reading_tokens() -> Iterator[None]:
    """Tells the user of a batch that cannot be read, as of a file that became shorter."""
    try:
        yield
    except ValueError as error:
        raise InputError(str(error)) from error


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
            f"each rank of a machine must have its own GPU, but got local rank {local_rank} and "
            f"{torch.cuda.device_count()} GPUs. Start fewer ranks or use --device cpu."
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
    with collective("the exchange of problems"):
        dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise InputError(found)
    return result  # type: ignore[return-value]


def on_first_rank(action: Callable[[], T]) -> T:
    """Does something on rank 0 and gives every rank the result."""
    results = [together(lambda: action() if dist.get_rank() == 0 else None)]
    with collective("the broadcast of what rank 0 has read or written"):
        dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def read_tokens(settings: Settings) -> npt.NDArray[Any]:
    """The text's bytes, or the file's token ids (tokens,).

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no tokens, or some that the model has no embedding for.
    """
    tokens = open_tokens(settings.data)
    least, most = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if least < 0 or most >= settings.vocab_size:
        raise ValueError(
            f"token ids must be from 0 to --vocab-size - 1 = {settings.vocab_size - 1}, but "
            f"got {least if least < 0 else most} in {settings.data}. Use the vocabulary size "
            "of the tokenizer that wrote the file, or another file."
        )
    return tokens


def check_prompt(settings: Settings) -> None:
    """Refuses a prompt that the model could not continue, before it has learned anything.

    Raises:
        ValueError: it is empty, or holds bytes that the model has no embedding for.
    """
    if not settings.sample_length:
        return
    prompt = encode_bytes(settings.prompt)
    if not len(prompt) or int(prompt.max()) >= settings.vocab_size:
        raise ValueError(
            f"--prompt must be at least one byte, all of them below --vocab-size "
            f"{settings.vocab_size}, but got {settings.prompt!r}. Use --sample-length 0 for tokens "
            "that are not bytes."
        )


def check_float8(settings: Settings, device: torch.device) -> None:
    """Refuses float8 products where they cannot be computed.

    Raises:
        ValueError: without torchao, a GPU that multiplies in float8, or bf16 around the products.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            f"the package torchao must be installed for --products {settings.products}, but got "
            'none here. Give pip install "basics-model[float8]".'
        )
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not capable or settings.precision != "bf16":
        raise ValueError(
            f"--products {settings.products} must come with --precision bf16 on a GPU of compute "
            f"capability 8.9 or more, but got {settings.precision} on {device.type}. Use "
            "--products plain."
        )


def split_tokens(
    tokens: npt.NDArray[Any], settings: Settings
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Cuts off the held-out end, at least one window long."""
    window = settings.context + 1
    if len(tokens) < 2 * window:
        raise ValueError(
            f"the text must have at least {2 * window} tokens, to train and to validate with a "
            f"context of {settings.context}, but got {len(tokens)}. Use a longer text or a shorter "
            "--context."
        )
    held_out = max(window, int(len(tokens) * settings.validation_fraction))
    return tokens[:-held_out], tokens[-held_out:]


class Inputs:
    """What the settings name, looked up and read; raises before anything is allocated."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.config = settings.model_config()
        self.attention = choose("attention", ATTENTIONS, settings.attention)
        choose("wrapper", WRAPPERS, settings.wrapper)
        self.dtype = choose("precision", PRECISIONS, settings.precision)
        recomputation(settings.recompute)
        check_prompt(settings)
        self.memory = check_memory(settings, self.config, dist.get_world_size(), device)
        if settings.tensorboard is not None:
            check_tensorboard()
        if settings.logger is not None:
            find_logger(settings.logger)
        tokens = read_tokens(settings)
        training, held_out = split_tokens(tokens, settings)
        self.context = Context(settings, device)
        rank, world_size = self.context.data_rank, self.context.data_size
        self.training = TokenDataset(
            training,
            settings.context,
            seed=settings.seed,
            rank=rank,
            world_size=world_size,
            vocab_size=settings.vocab_size,
        )
        self.validation = TokenDataset(held_out, settings.context, vocab_size=settings.vocab_size)
        # What decides the weights. The rest, such as the wrapper or the number of ranks that share
        # the same batch, only decides how they are computed, and may change when a run continues.
        self.identity: dict[str, Any] = asdict(self.config) | {
            "sequences_per_update": settings.batch_size * settings.accumulate * world_size,
            "training_tokens": len(training),
            "text_sha256": hashlib.sha256(tokens.data).hexdigest(),
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
        if settings.moments != "fp32":
            self.identity["precision"] += f" with {settings.moments} moments"
        if PRODUCTS[settings.products]:
            check_float8(settings, device)
            self.identity["precision"] += f" with {settings.products} products"


def check_agreement(settings: Settings, inputs: Inputs) -> None:
    """Refuses ranks that were started with other settings or another text, as on a second machine.

    Names of files may differ: each machine has its own.

    Raises:
        InputError: on every rank.
    """
    own: dict[str, Any] = {
        name: isinstance(value, Path) or value for name, value in vars(settings).items()
    } | inputs.identity
    first = [own]
    with collective("the comparison of settings"):
        dist.broadcast_object_list(first, src=0)

    def compare() -> None:
        if changes := differences(first[0], own):
            raise ValueError(
                f"every rank must be started with the same settings and text, but got on rank "
                f"{dist.get_rank()} others than on rank 0 ({changes}). Start all with one command."
            )

    together(compare)


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
        if settings.cuda_graph:  # which cannot be recorded on the default stream
            torch.cuda.set_stream(torch.cuda.Stream())
        torch.manual_seed(settings.seed)
        checkpoint_blocks, keep_attention = recomputation(settings.recompute)
        shared = settings.context_parallel > 1
        inputs.context.join()
        model = TransformerLM(
            inputs.config,
            attention=inputs.context.attention if shared else inputs.attention,
            checkpoint_blocks=checkpoint_blocks,
            keep_attention=keep_attention,
            device=device,
        )
        if checkpoint is not None:  # on rank 0 alone: the others are given its weights
            model.load_state_dict(checkpoint.model)
        if recipe := PRODUCTS[settings.products]:
            together(lambda: use_float8_products(model, recipe))
        if settings.compile:
            for block in model.blocks:
                block.compile()
        self.parallel: Parallelism = together(lambda: make_parallelism(settings, model))
        self.optimizer = self.parallel.optimizer
        # Forward passes without backward: of replicas each rank makes its own.
        self.model = model if isinstance(self.parallel, Replicas) else self.parallel.module
        self.schedule = CosineSchedule(
            self.optimizer,
            warmup_steps=round(settings.steps * settings.warmup_fraction),
            total_steps=settings.steps,
            min_ratio=settings.min_ratio,
        )
        self.step = 0
        self.updates = 0  # by this process
        self.captured: CapturedStep[tuple[Tensor, Tensor]] | None = None
        self.gradient_norm = torch.zeros(())
        folder = settings.checkpoint_dir
        first = dist.get_rank() == 0
        self.writer = CheckpointWriter(folder, settings.keep) if folder and first else None
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
        optimizer = {} if checkpoint is None else checkpoint.optimizer
        for group in optimizer.get("param_groups", []):  # as this run computes, not the saved one
            if "fused" in group:
                group["fused"] = self.settings.fused or None
        self.parallel.load(optimizer)
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
                    losses.clear()
                    values = self.metrics(loss, report.speed(sequences * settings.context))
                    report.update(self.step, values)
                    self.log(values)
                with report.paused():
                    if last or self.step % settings.validate_every == 0:
                        held_out = self.validate()
                        report.line(f"step {self.step}: validation loss {held_out:.3f}")
                        self.log({"validation_loss": held_out})
                    if last or self.step % settings.checkpoint_every == 0:
                        self.save()

        self.finish_saving()
        for logger in self.loggers:
            logger.finish()

    def log(self, values: dict[str, float]) -> None:
        """Hands values to rank 0's loggers; if they cannot be written, all ranks say so and end."""
        settings = self.settings
        if settings.metrics or settings.tensorboard or settings.logger:
            together(lambda: self._log_here(values))

    def _log_here(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(values, step=self.step)

    def metrics(self, loss: float, tokens_per_second: float) -> dict[str, float]:
        """Loss, speed, learning rate, gradient norm and memory since the last report.

        A trained token costs three times a forward pass's matrix products, which ``model_flops``
        counts (recomputation is not counted: it is a cost, not progress).
        """
        context = self.settings.context
        flops = 3 * model_flops(self.inputs.config, batch=1, seq=context) / context
        tflops = tokens_per_second * flops / dist.get_world_size() / 1e12
        values = {
            "loss": loss,
            "tokens_per_second": tokens_per_second,
            "tflops_per_rank": tflops,
            "learning_rate": self.schedule.get_last_lr()[0],
        }
        if self.settings.max_norm:
            values["gradient_norm"] = float(self.gradient_norm)
        peak = self.settings.peak_tflops or known_peak_tflops(self.device, self.inputs.dtype)
        if peak:
            values["mfu"] = tflops / peak
        if self.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return values

    def update(self) -> Tensor:
        """One update of the weights; returns this rank's loss, a scalar on its device."""
        settings = self.settings
        # Drawn as one batch: the data of an update do not depend on how its sequences are divided.
        rows = settings.batch_size * settings.accumulate
        with reading_tokens():
            whole = self.inputs.training.get_batch(rows, device=self.device)
        inputs, targets = (tensor.chunk(settings.accumulate) for tensor in whole)
        tensors = [tensor for batch in zip(inputs, targets, strict=True) for tensor in batch]
        if settings.cuda_graph and self.updates == UPDATES_BEFORE_RECORDING:
            for group in self.optimizer.param_groups:  # read on the device from now on
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
                if "capturable" in group:
                    group["capturable"] = True
            after_replay = getattr(self.parallel, "after_replay", None)
            self.captured = CapturedStep(self.update_with, *tensors, after_replay=after_replay)
        make = self.update_with if self.captured is None else self.captured
        loss, self.gradient_norm = make(*tensors)
        self.updates += 1
        self.schedule.step()
        return loss.clone()  # a recorded update writes to the same tensor every time

    def update_with(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """One update from inputs and targets in turn, each (batch, context).

        Returns:
            This rank's loss and, if they are clipped, the norm of the gradients, scalars on its
            device.
        """
        total = torch.zeros((), device=self.device)
        for turn in range(self.settings.accumulate):
            inputs, targets = tensors[2 * turn : 2 * turn + 2]
            last = turn == self.settings.accumulate - 1
            with nullcontext() if last else self.parallel.accumulating():
                loss = self.loss(self.parallel.module, inputs, targets) / self.settings.accumulate
                loss.backward()
            total += loss.detach()
        self.parallel.finish()
        clipped = self.settings.max_norm > 0
        norm = self.parallel.clip(self.settings.max_norm) if clipped else torch.zeros_like(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def loss(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of a batch (batch, context), in nats per byte."""
        bf16 = self.inputs.dtype is torch.bfloat16
        inputs, targets, positions = self.inputs.context.own(inputs, targets)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss: Tensor = model(inputs, targets, positions)
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on the held-out text; the ranks share its batches."""
        batches = self.inputs.validation.sequential_batches(
            self.settings.batch_size, device=self.device
        )
        with reading_tokens():
            limited = list(itertools.islice(batches, self.settings.validation_batches))
        total, count = torch.zeros((), device=self.device), 0
        context = self.inputs.context
        for start in range(0, len(limited), context.data_size):
            # Ranks with sharded parameters make equally many forward passes; a rank without a batch
            # of its own repeats the last one, which does not count.
            own = start + context.data_rank
            inputs, targets = limited[min(own, len(limited) - 1)]
            loss = self.loss(self.model, inputs, targets)
            if own < len(limited):
                total += loss * len(inputs)
                count += len(inputs)
        return self.average(total, count)

    def average(self, total: Tensor, count: int) -> float:
        """Mean over all ranks, from each one's sum and count."""
        both = torch.stack([total, torch.tensor(float(count), device=self.device)])
        with collective("the average of the losses"):
            dist.all_reduce(both)
            return float(both[0] / both[1])

    def save(self) -> None:
        """Copies the state to rank 0's CPU, whose thread writes it while training goes on."""
        if self.settings.checkpoint_dir is None:
            return
        self.finish_saving()
        model, optimizer = self.parallel.state()
        if self.writer is not None:
            self.writer.start(
                Checkpoint(
                    step=self.step,
                    model=model,
                    optimizer=optimizer,
                    extra={
                        "identity": self.inputs.identity,
                        "data": self.inputs.training.state_dict(),
                        "schedule": self.schedule.state_dict(),
                    },
                )
            )

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is complete; if it is not, all ranks say so and end."""
        if self.settings.checkpoint_dir is not None:
            on_first_rank(lambda: None if self.writer is None else self.writer.wait())

    def export(self) -> None:
        """Writes the weights from rank 0; if that fails, all ranks say so and end."""
        path = self.settings.export
        if path is None:
            return
        weights, _ = self.parallel.state()
        on_first_rank(lambda: export(path, self.inputs.config, weights))

    def sample(self) -> str:
        """The prompt and its continuation."""
        settings = self.settings
        prompt = encode_bytes(settings.prompt).to(self.device)
        eager = torch.compiler.set_stance("force_eager")  # every new token is a new length
        with eager, self.inputs.context.whole_sequences():
            tokens = generate(
                cast(TransformerLM, self.model),
                prompt[None],
                max_new_tokens=settings.sample_length,
                temperature=settings.temperature,
                top_p=settings.top_p,
                generator=torch.Generator(self.device).manual_seed(settings.seed),
            )
        if self.inputs.config.vocab_size > BYTE_VOCAB_SIZE:
            return " ".join(map(str, tokens[0].tolist()))
        return decode_bytes(tokens[0])


def run(settings: Settings, given: Collection[str]) -> None:
    """Trains as the settings say, from joining the ranks to the sample.

    Args:
        settings: from the command line.
        given: names of the settings that a preset does not change.

    Raises:
        InputError: on every rank, for anything the user has to change.
    """
    try:
        settings = with_preset(settings, given)
        device = join_ranks(settings.device)
    except ValueError as error:
        raise InputError(str(error)) from None
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    inputs = together(lambda: Inputs(settings, device))
    check_agreement(settings, inputs)
    together(lambda: lock_folder(settings.checkpoint_dir) if first else None)
    checkpoint = together(lambda: open_checkpoints(settings, inputs.identity) if first else None)
    together(lambda: check_export(settings.export) if first else None)
    trainer = Trainer(settings, inputs, checkpoint, device, console)
    say(
        console,
        f"{inputs.config.num_parameters:,} parameters, {len(inputs.training.tokens):,} training "
        f"tokens, {dist.get_world_size()} ranks on {device.type}, {settings.attention} attention",
    )
    say(console, trainer.parallel.explain())
    say(console, f"predicted memory: {inputs.memory}")
    if inputs.memory.recomputed:
        say(console, f"predicted cost: {inputs.memory.recomputation()}")
    if trainer.step:
        say(console, f"continuing from step {trainer.step}")
    trainer.train()
    trainer.export()
    # Of sharded parameters all ranks have to make the forward passes.
    if settings.sample_length and (first or not isinstance(trainer.parallel, Replicas)):
        say(console, f"sample: {trainer.sample()}")
    with collective("the end of the run"):
        dist.barrier()  # no rank leaves while rank 0 still samples


def complain(text: str) -> None:
    """One line on standard error, from rank 0 or from a rank that could not join."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        typer.echo(f"train_lm.py: {text}", err=True)


def main(settings: Settings, given: Collection[str]) -> None:
    """Runs; what the user can change, an interruption and a lost rank are one line each."""
    code = 0
    try:
        run(settings, given)
    except InputError as error:
        code = 2
        complain(str(error))
    except KeyboardInterrupt:
        complain(f"interrupted; {CONTINUE}")
        raise typer.Exit(130) from None  # the other ranks may be anywhere: do not wait for them
    except (
        LostRankError,
        PeerFailureError,
        CollectiveError,
        RankLostError,
    ) as error:  # on each rank left
        typer.echo(f"train_lm.py: {' '.join(str(error).split())}; {CONTINUE}", err=True)
        raise typer.Exit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()
    raise typer.Exit(code)


if __name__ == "__main__":
    application(main)()
