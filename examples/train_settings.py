"""Settings of ``train_lm.py``: one frozen dataclass, which the command line mirrors."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

from basics_model import (
    BYTE_VOCAB_SIZE,
    SIZES,
    Attention,
    ModelConfig,
    ModelSize,
    sdpa_attention,
    softmax_attention,
)
from ddp_lite import BucketedDDP, DataParallelBase, FlatDDP, NaiveDDP, OverlapDDP
from flashattn_triton import flash_attention

T = TypeVar("T")


def causal_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``flash_attention`` as the model calls it: all tensors (batch, heads, seq, head_dim)."""
    return flash_attention(query, key, value, causal=True, layout="bhsd")


WRAPPERS: Mapping[str, type[DataParallelBase]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": BucketedDDP,
}
ATTENTIONS: Mapping[str, Attention] = {
    "flash": causal_flash_attention,
    "sdpa": sdpa_attention,
    "softmax": softmax_attention,
}
PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_SIZE = ModelSize(d_model=128, d_ff=384, num_layers=2, num_heads=4)


def choose(what: str, table: Mapping[str, T], name: str) -> T:
    """Looks up a name, or says which ones there are."""
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def option(help: str, panel: str, **settings: Any) -> Any:  # noqa: A002 - typer's own name
    """An option of the command line."""
    return typer.Option(help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Trains a byte-level Transformer language model and prints a sample of what it learned.

    Start it alone, or on several GPUs, CPUs or machines with torchrun. With --checkpoint-dir, the
    same command continues an interrupted run from its newest checkpoint.
    """

    data: Annotated[
        Path | None,
        option(
            "Text file to learn; its UTF-8 bytes are the tokens. Default: all Markdown files of "
            "this repository.",
            "Data",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    validation_fraction: Annotated[
        float, option("Part of the text's end that is held out.", "Data", min=0.0, max=0.5)
    ] = 0.1
    seed: Annotated[int, option("Seeds weights, data order and sample.", "Data", min=0)] = 0

    size: Annotated[
        str | None,
        option("A named size instead of the small default.", "Model", metavar="|".join(SIZES)),
    ] = None
    d_model: Annotated[
        int | None, option("Width of the residual stream; 128 unless --size.", "Model", min=1)
    ] = None
    d_ff: Annotated[
        int | None, option("Width of the feed-forward layers; 384 unless --size.", "Model", min=1)
    ] = None
    num_layers: Annotated[
        int | None, option("Number of blocks; 2 unless --size.", "Model", min=1)
    ] = None
    num_heads: Annotated[
        int | None, option("Attention heads; 4 unless --size.", "Model", min=1)
    ] = None
    context: Annotated[int, option("Tokens per sequence.", "Model", min=1)] = 128
    attention: Annotated[
        str, option("What computes attention.", "Model", metavar="|".join(ATTENTIONS))
    ] = "flash"

    checkpoint_blocks: Annotated[
        int,
        option(
            "Blocks that backward recomputes at a time, to keep less in memory; 0: none.",
            "Model",
            min=0,
        ),
    ] = 0

    wrapper: Annotated[
        str, option("How gradients are averaged.", "Parallelism", metavar="|".join(WRAPPERS))
    ] = "bucketed"
    bucket_size_mb: Annotated[
        float, option("Size of a bucket (bucketed only).", "Parallelism", min=0.0)
    ] = 25.0
    sharded: Annotated[
        bool, option("Spread the optimizer's state over the ranks.", "Parallelism")
    ] = True
    device: Annotated[
        str,
        option("auto takes GPUs if there are.", "Parallelism", metavar="auto|cuda|cpu"),
    ] = "auto"

    steps: Annotated[int, option("Updates of the weights.", "Training", min=1)] = 300
    batch_size: Annotated[int, option("Sequences per rank and backward.", "Training", min=1)] = 8
    accumulate: Annotated[int, option("Backward passes per update.", "Training", min=1)] = 1
    learning_rate: Annotated[float, option("Its maximum.", "Training", min=0.0)] = 4e-3
    min_ratio: Annotated[
        float, option("Final learning rate, as part of the maximum.", "Training", min=0.0, max=1.0)
    ] = 0.1
    warmup_fraction: Annotated[
        float, option("Part of the updates that warm up.", "Training", min=0.0, max=1.0)
    ] = 0.05
    weight_decay: Annotated[float, option("Decoupled decay.", "Training", min=0.0)] = 0.1
    max_norm: Annotated[float, option("Gradients are clipped to it.", "Training", min=1e-6)] = 1.0
    precision: Annotated[
        str, option("bf16 computes under autocast.", "Training", metavar="|".join(PRECISIONS))
    ] = "fp32"
    compile: Annotated[
        bool,
        option("Compile the Transformer blocks; the first update then takes longer.", "Training"),
    ] = False
    log_every: Annotated[int, option("Updates between two reports.", "Training", min=1)] = 20
    validate_every: Annotated[
        int, option("Updates between two validations.", "Training", min=1)
    ] = 100
    validation_batches: Annotated[
        int, option("Batches of a validation, over all ranks.", "Training", min=1)
    ] = 64

    metrics: Annotated[
        Path | None,
        option(
            "JSON-lines file of loss, speed, memory, learning rate and gradient norm.",
            "Metrics",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        option(
            "Folder of the same curves for TensorBoard.",
            "Metrics",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None
    logger: Annotated[
        str | None,
        option(
            "A function that returns a logger of the same curves, such as wandb:init.",
            "Metrics",
            metavar="MODULE:FUNCTION",
            show_default=False,
        ),
    ] = None
    peak_tflops: Annotated[
        float | None,
        option(
            "What one device reaches in matrix products; metrics then hold the part used (MFU).",
            "Metrics",
            min=0.0,
            show_default=False,
        ),
    ] = None

    checkpoint_dir: Annotated[
        Path | None,
        option(
            "Folder of checkpoints; none are written without it.",
            "Checkpoints",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None
    checkpoint_every: Annotated[
        int, option("Updates between two checkpoints.", "Checkpoints", min=1)
    ] = 100
    keep: Annotated[int, option("Checkpoints that stay in the folder.", "Checkpoints", min=1)] = 2
    resume: Annotated[
        bool, option("Continue from the folder's newest checkpoint.", "Checkpoints")
    ] = True

    prompt: Annotated[str, option("What the sample begins with.", "Sample")] = "The "
    sample_length: Annotated[int, option("Tokens to sample; 0: none.", "Sample", min=0)] = 200
    temperature: Annotated[float, option("0 is greedy.", "Sample", min=0.0)] = 0.8
    top_p: Annotated[float, option("Nucleus of the sample.", "Sample", min=0.01, max=1.0)] = 0.95

    def model_config(self) -> ModelConfig:
        """The named or default size with the explicit dimensions in place of its own."""
        size = DEFAULT_SIZE if self.size is None else choose("size", SIZES, self.size)
        dimensions = {
            name: value if getattr(self, name) is None else getattr(self, name)
            for name, value in asdict(size).items()
        }
        return ModelConfig(vocab_size=BYTE_VOCAB_SIZE, context_length=self.context, **dimensions)


def application(run: Callable[[Settings], None]) -> typer.Typer:
    """A command line with one option per field of :class:`Settings`, which calls ``run``."""

    def command(**values: Any) -> None:
        run(Settings(**values))

    signature = inspect.signature(Settings)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.command(help=Settings.__doc__)(command)
    return app
