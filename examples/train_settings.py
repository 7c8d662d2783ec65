"""Settings of ``train_lm.py``: one frozen dataclass, which the command line mirrors."""

import inspect
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

from basics_model import BYTE_VOCAB_SIZE, SAMPLE_TEXT, SIZES, ModelConfig, sdpa_attention
from basics_model.attention import Attention, softmax_attention
from flashattn_triton import flash_attention

T = TypeVar("T")


def causal_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``flash_attention`` as the model calls it: all tensors (batch, heads, seq, head_dim)."""
    return flash_attention(query, key, value, causal=True, layout="bhsd")


#: The first five hold whole replicas; see ``train_parallel.py``.
WRAPPERS = dict.fromkeys(
    ("naive", "flat", "overlap", "bucketed", "peer-copy", "stage-2", "stage-3", "stage-3-kept")
)
#: Those of stage 3, whose updates can be recorded as a CUDA graph.
SHARDED_PARAMETERS = ("stage-3", "stage-3-kept")
COMMUNICATION = dict.fromkeys(("nccl", "peer-copy", "auto"))
RECOMPUTE = ("none", "block", "block-keep-attention", "every-K")
ATTENTIONS: Mapping[str, Attention] = {
    "flash": causal_flash_attention,
    "sdpa": sdpa_attention,
    "softmax": softmax_attention,
}
PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: torchao's recipes for products of blocks that are computed in float8.
PRODUCTS = {"plain": None, "float8": "tensorwise", "float8-rows": "rowwise"}
#: Dtypes in which AdamW's two moments are kept; the second is that of shard_optim's AdamW.
MOMENTS = dict.fromkeys(("fp32", "bf16"))
DEFAULT_CONFIG = ModelConfig(d_model=128, d_ff=384, num_layers=2, num_heads=4)


#: Options that a preset sets, on GPUs and on CPUs; those given on the command line win.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "plain": {"cuda": {}, "cpu": {}},
    "fast": {
        "cuda": {
            "wrapper": "stage-3-kept",
            "precision": "bf16",
            "compile": True,
            "fused": True,
            "cuda_graph": True,
            "communication": "auto",
        },
        # CPUs gain nothing from bf16, and compiling takes longer than a small run.
        "cpu": {"wrapper": "stage-3-kept", "fused": True},
    },
}


def choose(what: str, table: Mapping[str, T], name: str) -> T:
    """Looks up a name, or says which ones there are."""
    if name not in table:
        raise ValueError(
            f"{what} must be one of {', '.join(table)}, but got {name!r}. Correct the name."
        )
    return table[name]


def recomputation(name: str) -> tuple[int, bool]:
    """``checkpoint_blocks`` and ``keep_attention`` of the model that ``--recompute`` names.

    Raises:
        ValueError: there is no such name.
    """
    if name in ("none", "block", "block-keep-attention"):
        return int(name != "none"), name == "block-keep-attention"
    every, _, count = name.partition("-")
    if every != "every" or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"recompute must be one of {', '.join(RECOMPUTE)} with a number for K, but got "
            f"{name!r}. Correct it."
        )
    return int(count), False


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
        Path,
        option(
            "Text file to learn, whose UTF-8 bytes are the tokens, or a .npy file of token ids. "
            "Default: chapters of Pride and Prejudice.",
            "Data",
            metavar="FILE",
            show_default=False,
        ),
    ] = SAMPLE_TEXT
    vocab_size: Annotated[int, option("Number of token ids; bytes take 256.", "Data", min=1)] = (
        BYTE_VOCAB_SIZE
    )
    validation_fraction: Annotated[
        float, option("Part of the text's end that is held out.", "Data", min=0.0, max=0.5)
    ] = 0.1
    seed: Annotated[
        int, option("Seeds weights, data order and sample.", "Data", min=0, max=2**63 - 1)
    ] = 0

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

    recompute: Annotated[
        str,
        option(
            "What backward computes again, to keep less in memory: nothing; blocks one at a time, "
            "all of them or all but their attention; or K blocks at a time.",
            "Model",
            metavar="|".join(RECOMPUTE),
        ),
    ] = "none"

    preset: Annotated[
        str,
        option(
            "fast sets --wrapper, --precision, --compile, --fused, --cuda-graph and "
            "--communication to the fastest known for the device; options that are given win.",
            "Parallelism",
            metavar="|".join(PRESETS),
        ),
    ] = "plain"
    wrapper: Annotated[
        str,
        option(
            "How ranks share the work: replicas, whose gradients are averaged, or shards.",
            "Parallelism",
            metavar="|".join(WRAPPERS),
        ),
    ] = "bucketed"
    communication: Annotated[
        str,
        option(
            "What moves parameters and gradients of stage 3: NCCL (gloo on CPUs), copies between "
            "the GPUs of one host, or copies where they are possible and worth it.",
            "Parallelism",
            metavar="|".join(COMMUNICATION),
        ),
    ] = "nccl"
    bucket_size_mb: Annotated[
        float, option("Size of a bucket (bucketed only).", "Parallelism", min=0.001)
    ] = 25.0
    context_parallel: Annotated[
        int,
        option(
            "Ranks that share each sequence, for contexts too long for one. --batch-size is then "
            "that of these ranks together.",
            "Parallelism",
            min=1,
        ),
    ] = 1
    sharded: Annotated[
        bool, option("Spread the optimizer's state over the ranks (replicas only).", "Parallelism")
    ] = True
    device: Annotated[
        str,
        option("auto takes GPUs if there are.", "Parallelism", metavar="auto|cuda|cpu"),
    ] = "auto"

    memory_gib: Annotated[
        float | None,
        option(
            "GiB of a rank that a step must fit in, by prediction; default: those of its GPU.",
            "Parallelism",
            min=0.0,
            show_default=False,
        ),
    ] = None

    steps: Annotated[int, option("Updates of the weights.", "Training", min=1)] = 300
    batch_size: Annotated[int, option("Sequences per rank and backward.", "Training", min=1)] = 8
    accumulate: Annotated[int, option("Backward passes per update.", "Training", min=1)] = 1
    learning_rate: Annotated[
        float, option("The highest, after the warm-up.", "Training", min=0.0)
    ] = 4e-3
    min_ratio: Annotated[
        float, option("Final learning rate, as part of the maximum.", "Training", min=0.0, max=1.0)
    ] = 0.1
    warmup_fraction: Annotated[
        float, option("Part of the updates that warm up.", "Training", min=0.0, max=1.0)
    ] = 0.05
    weight_decay: Annotated[float, option("Decoupled decay.", "Training", min=0.0)] = 0.1
    max_norm: Annotated[
        float,
        option(
            "Gradients are clipped to this norm; 0 leaves them as they are, and without "
            "--accumulate stage 3 then updates each block within backward.",
            "Training",
            min=0.0,
        ),
    ] = 1.0
    precision: Annotated[
        str, option("bf16 computes under autocast.", "Training", metavar="|".join(PRECISIONS))
    ] = "fp32"
    products: Annotated[
        str,
        option(
            "How blocks multiply: in --precision, or in float8 with one scale a tensor or one a "
            "row (by torchao, on GPUs from Ada on).",
            "Training",
            metavar="|".join(PRODUCTS),
        ),
    ] = "plain"
    compile: Annotated[
        bool,
        option("Compile the Transformer blocks; the first update then takes longer.", "Training"),
    ] = False
    fused: Annotated[bool, option("torch's AdamW as one fused kernel.", "Training")] = False
    moments: Annotated[
        str,
        option(
            "How AdamW keeps its moments; bf16 is shard_optim's, always fused, of half the state.",
            "Training",
            metavar="|".join(MOMENTS),
        ),
    ] = "fp32"
    cuda_graph: Annotated[
        bool,
        option(
            "Record an update once and replay it by one launch, where the host limits (stage 3 "
            "with --fused on GPUs).",
            "Training",
        ),
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
            "What one device reaches in matrix products, of which MFU is the part used; known for "
            "bf16 on A100, H100 and H200.",
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

    export: Annotated[
        Path | None,
        option(
            "Safetensors file of the weights, written at the end.",
            "Checkpoints",
            metavar="FILE",
            show_default=False,
        ),
    ] = None

    prompt: Annotated[str, option("What the sample begins with.", "Sample")] = "The "
    sample_length: Annotated[int, option("Tokens to sample; 0: none.", "Sample", min=0)] = 200
    temperature: Annotated[float, option("0 is greedy.", "Sample", min=0.0)] = 0.8
    top_p: Annotated[float, option("Nucleus of the sample.", "Sample", min=0.01, max=1.0)] = 0.95

    def model_config(self) -> ModelConfig:
        """The named or default size with the explicit dimensions in place of its own."""
        config = DEFAULT_CONFIG if self.size is None else choose("size", SIZES, self.size)
        given = {
            name: value
            for name in ("d_model", "d_ff", "num_layers", "num_heads")
            if (value := getattr(self, name)) is not None
        }
        return replace(config, vocab_size=self.vocab_size, context_length=self.context, **given)


def uses_gpus(settings: Settings) -> bool:
    """Whether ranks take GPUs."""
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def with_preset(settings: Settings, given: Collection[str]) -> Settings:
    """The settings with the preset's values for the device, except for those given.

    Raises:
        ValueError: there is no such preset, or the settings do not fit together.
    """
    preset = choose("preset", PRESETS, settings.preset)
    choose("communication", COMMUNICATION, settings.communication)
    choose("products", PRODUCTS, settings.products)
    choose("moments", MOMENTS, settings.moments)
    gpus = uses_gpus(settings)
    values = preset["cuda" if gpus else "cpu"]
    chosen = replace(settings, **{name: values[name] for name in values if name not in given})
    sharded = chosen.wrapper in SHARDED_PARAMETERS
    if not sharded and "communication" not in given:
        chosen = replace(chosen, communication="nccl")
    if chosen.communication != "nccl" and not (sharded and gpus):
        raise ValueError(
            f"--communication {chosen.communication} must come with GPUs and --wrapper "
            f"{' or '.join(SHARDED_PARAMETERS)}, but got --wrapper {chosen.wrapper} on "
            f"{'GPUs' if gpus else 'CPUs'}. Change these, or leave --communication out."
        )
    recordable = sharded and chosen.fused and gpus
    if chosen.cuda_graph and not recordable and "cuda_graph" not in given:
        chosen = replace(chosen, cuda_graph=False)
    if chosen.cuda_graph and not recordable:
        raise ValueError(
            f"--cuda-graph must come with GPUs, --fused and --wrapper "
            f"{' or '.join(SHARDED_PARAMETERS)}, but got --wrapper {chosen.wrapper} on "
            f"{'GPUs' if gpus else 'CPUs'}{'' if chosen.fused else ' without --fused'}. Change "
            "these, or leave --cuda-graph out."
        )
    return chosen


def read_config(invocation: typer.Context, file: Path | None) -> Path | None:
    """Makes the settings of a TOML file the defaults of the command line.

    Raises:
        typer.BadParameter: it cannot be read, is no TOML, or holds an unknown setting.
    """
    if file is None:
        return None
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"--config must be a TOML file, but got {file}: {error}") from None
    known = [field.name for field in fields(Settings)]
    settings = {name.replace("-", "_"): value for name, value in given.items()}
    for name, value in settings.items():
        if name not in known:
            raise typer.BadParameter(
                f"settings in {file} must be some of {', '.join(known)}, but got {name!r}. "
                "Correct it."
            )
        if isinstance(value, dict | list):
            raise typer.BadParameter(
                f"{name} in {file} must be one value, but got {value!r}. Correct it."
            )
    invocation.default_map = {**(invocation.default_map or {}), **settings}
    return file


CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of settings, by the names of the options; options that are given win.",
        metavar="FILE",
        show_default=False,
        is_eager=True,
        callback=read_config,
    ),
]


def application(run: Callable[[Settings, Collection[str]], None]) -> typer.Typer:
    """A command line with one option per field of :class:`Settings`.

    Args:
        run: takes the settings and the names of those that the command line gives.
    """

    def command(invocation: typer.Context, **values: Any) -> None:
        values.pop("config")
        given = {
            name
            for name in values
            if getattr(invocation.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
        }
        run(Settings(**values), given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    config = inspect.Parameter("config", keyword, default=None, annotation=CONFIG)
    options = [config, *inspect.signature(Settings).parameters.values()]
    invocation = inspect.Parameter(
        "invocation", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    command.__signature__ = inspect.Signature([invocation, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {
        "invocation": typer.Context,
        **{option.name: option.annotation for option in options},
    }
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.command(help=Settings.__doc__)(command)
    return app
