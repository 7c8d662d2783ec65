"""The workload of a measurement: a model on a device, a random batch, a precision, an optimizer.

The Transformer language model by size or by explicit dimensions, or any ``nn.Module``, which
:mod:`bench_harness.user_code` makes.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench_harness.core import CaseSkipped, Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from basics_model import ModelConfig

SIZES = ("small", "medium", "large", "xl", "2.7B", "2026/xl", "2026/10B", "8B", "custom")
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
PRECISIONS = ("fp32", "tf32", "bf16")
ATTENTIONS = ("naive", "sdpa", "flash")


@cache
def _sizes_alone() -> Any:
    """What basics-model's module of sizes holds, without torch, which its package imports."""
    package: Any = importlib.util.find_spec("basics_model")
    return SimpleNamespace(**runpy.run_path(str(Path(package.origin).with_name("sizes.py"))))


def billions(config: Config) -> float:
    """How many 10⁹ parameters a case's language model has; 0 for a user's model."""
    return language_model_config(config).num_parameters / 1e9 if "size" in config else 0.0


def blocks(config: Config) -> int:
    """How many blocks a case's language model has; 0 for a user's model."""
    return language_model_config(config).num_layers if "size" in config else 0


def cpu_seconds(config: Config, passes: float) -> float:
    """About how long so many forward passes take on CPU cores of 80 GFLOP/s; a backward is two."""
    tokens = config.get("batch", 0) * config.get("sequence", 0)
    return 2 * billions(config) * float(tokens) * passes / (80 * (os.cpu_count() or 1))


def too_large(config: Config) -> str | None:
    """Why a case's language model does not fit the memory of this machine's CPUs; None if it may.

    A model takes 4 bytes a parameter, and training 16, on every rank: weights, gradients and
    AdamW's moments. Activations come on top. On a GPU, running out of memory is a result.
    """
    if config.get("device") != "cpu":
        return None
    import psutil

    only_forward = set(config.get("modes", [config.get("mode")])) == {"forward"}
    ranks = 1 if config.get("alone") else config.get("world_size", 1)
    needed, found = (4 if only_forward else 16) * ranks * billions(config), psutil.virtual_memory()
    if needed * 1e9 <= found.total:
        return None
    return (
        f"needs about {needed:.0f} GB beside activations, but this machine has "
        f"{found.total / 1e9:.0f} GB. Choose a smaller size."
    )


@dataclass(frozen=True)
class Workload:
    """A module, its input, its loss and the precision it runs in.

    Attributes:
        loss_of: maps the module's output to a scalar.
        model_config: the language model's dimensions; None for an imported module.
        tokens: of the language model, (batch, sequence + 1) int64, of which input and targets are
            views: what is written into it is the next batch.
    """

    module: nn.Module
    precision: str
    device: torch.device
    loss_of: Callable[[Any], Tensor]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_config: ModelConfig | None = None
    tokens: Tensor | None = None

    def loss(self, module: Callable[..., Any] | None = None) -> Tensor:
        """One forward pass, in the workload's precision.

        Args:
            module: called instead of the workload's own, for a wrapper around it.
        """
        with precision_context(self.precision, self.device):
            called = self.module if module is None else module
            return self.loss_of(called(*self.args, **self.kwargs))

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, in the workload's precision.

        Under autocast the dtypes of backward were settled in forward; whether fp32 products use
        TF32 is asked when each of them runs.
        """
        with _products_in(self.precision):
            loss.backward()

    def parameters(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(p.numel() for p in self.module.parameters())


def device_of(name: str) -> torch.device:
    """The device of a case.

    Raises:
        CaseSkipped: "cuda" was asked for and torch sees no GPU.
    """
    import torch

    if name == "cuda":
        if not torch.cuda.is_available():
            raise CaseSkipped(
                "device must be a CUDA device that torch sees, but got none here. Use --device cpu."
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


@contextmanager
def precision_context(precision: str, device: torch.device) -> Iterator[None]:
    """Computes in fp32, in fp32 with TF32 products, or under bf16 autocast.

    Raises:
        ValueError: unknown precision.
        CaseSkipped: TF32 on a CPU, which has no such format.
    """
    import torch

    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, but got {precision!r}")
    if precision == "bf16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
        return
    if precision == "tf32" and device.type != "cuda":
        raise CaseSkipped("precision must be other than tf32 on a CPU, but got tf32. Use fp32.")
    with _products_in(precision):
        yield


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """Sets for the process whether fp32 products use TF32; it counts when a product runs."""
    import torch

    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def compute_dtype(precision: str) -> torch.dtype:
    """The element type of matrix products in a precision."""
    import torch

    return torch.bfloat16 if precision == "bf16" else torch.float32


def attention_by_name(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A causal attention callable over (batch, heads, sequence, head_dim), built-in or imported.

    Raises:
        ValueError: unknown name, or one that cannot be imported.
        CaseSkipped: its package is not installed.
    """
    from basics_model.attention import sdpa_attention, softmax_attention

    if name == "naive":
        return softmax_attention
    if name == "sdpa":
        return sdpa_attention
    if name == "flash":
        from flashattn_triton import flash_attention

        flash: Callable[..., Any] = partial(flash_attention, causal=True, layout="bhsd")
        return flash
    if ":" in name:
        if (package := missing_package(name)) is not None:
            raise CaseSkipped(
                f"attention must be importable, but got {name}, and there is no package {package} "
                "here. Install it, or leave the attention out."
            )
        found: Callable[..., Tensor] = imported(name, "attention")
        return found
    raise ValueError(
        f"attention must be one of {', '.join(ATTENTIONS)} or package.module:callable, but got "
        f"{name!r}. Correct the name."
    )


def ran(
    name: str, tensors: Sequence[Tensor], problem: Any, settings: Mapping[str, Any]
) -> str | None:
    """PyTorch's kernel or flashattn-triton's tier that runs; None for other implementations.

    ``sdpa`` leaves the choice to PyTorch, which may fall back to the one that stores all scores.
    """
    query, key, value = tensors
    if name.startswith("flashattn-triton"):
        from flashattn_triton import choose
        from flashattn_triton.mask_and_bias import NAMES

        named = {"portable": "triton", "hopper": "hopper", "tiled": "tiled"}
        asked: Any = named.get(name.rpartition("-")[2], "auto")
        given = tuple(each for each in NAMES if each in settings)
        problem = replace(problem, implementation=asked)
        return choose(query, key, value, problem, tensors=given).tier
    if name != "sdpa":  # one kernel alone is allowed, else the problem is skipped
        return name.removeprefix("sdpa-") if name.startswith("sdpa-") else None
    import torch
    from torch.nn.attention import SDPBackend

    how = {"is_causal": settings["causal"], "enable_gqa": query.shape[1] != key.shape[1]}
    number = int(torch._fused_sdp_choice(query, key, value, **how))
    kernels = {
        SDPBackend.MATH: "math",
        SDPBackend.FLASH_ATTENTION: "flash",
        SDPBackend.EFFICIENT_ATTENTION: "efficient",
        SDPBackend.CUDNN_ATTENTION: "cudnn",
    }
    return {int(backend.value): text for backend, text in kernels.items()}.get(number)


def ran_in_model(
    name: str, shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> str | None:
    """The kernel or tier that the language model's attention runs; None for a user's own.

    Asked of tensors of one batch element's shape, so call it when nothing is weighed.
    """
    import torch

    from flashattn_triton.problem import new_problem

    if name not in ("sdpa", "flash"):
        return name if name == "naive" else None
    heads = shape["num_heads"]
    size = (1, heads, shape["sequence"], shape["d_model"] // heads)
    tensors = [torch.empty(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    implementation = "flashattn-triton" if name == "flash" else name
    problem = new_problem(head_dim=size[-1], causal=True)
    return ran(implementation, tensors, problem, {"causal": True})


def missing_package(name: str) -> str | None:
    """The package of ``package.module:attribute``, if it is not installed."""
    package = name.partition(":")[0].partition(".")[0]
    return None if importlib.util.find_spec(package) is not None else package


def imported(name: str, what: str) -> Any:
    """The object that ``package.module:attribute`` names.

    Raises:
        ValueError: it cannot be imported; the message starts with ``what``.
    """
    module, _, attribute = name.partition(":")
    # Python tells bytecode apart by the source's size and whole seconds: after an edit within the
    # second in which it was written, the old code would run under the new code's name.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what} must be an importable package.module:name, but got {name!r} ({error}). "
            "Install its package or correct the name."
        ) from error
    finally:
        sys.dont_write_bytecode = before


def language_model_config(config: Config) -> ModelConfig:
    """The model of a case: its ``size``, with any of :data:`DIMENSIONS` given explicitly.

    Raises:
        ValueError: dimensions that do not fit together.
    """
    names = (*DIMENSIONS, "vocab_size")
    given = {name: config[name] for name in names if config.get(name) is not None}
    given["context_length"] = config.get("sequence", 1)
    sizes: Any = sys.modules.get("basics_model.sizes") or _sizes_alone()
    named = partial(sizes.model_config, config["size"])
    made: ModelConfig = (sizes.ModelConfig if config["size"] == "custom" else named)(**given)
    return made


def language_model(
    config: Config,
    device: torch.device,
    *,
    precision: str,
    seed: int = 0,
    batch_seed: int = 0,
    chunked_loss: bool = False,
    float8_recipe: str | None = None,
    **how: Any,
) -> Workload:
    """The Transformer language model of a case, with a random batch of token ids.

    Args:
        config: ``size`` and dimensions as in :func:`language_model_config`, ``batch`` and
            ``sequence``.
        seed: of the parameters.
        batch_seed: of the tokens; distinct per rank in data-parallel runs.
        chunked_loss: the loss is made inside the model, without all logits in memory at once.
        float8_recipe: of :func:`basics_model.products.use_float8_products`; None for none.
        how: further arguments of :class:`basics_model.TransformerLM`.

    Raises:
        CaseSkipped: float8 products without torchao, or on a device that has none.
    """
    import torch

    import basics_model
    from basics_model import products

    model_config = language_model_config(config)
    torch.manual_seed(seed)
    module = basics_model.TransformerLM(model_config, device=device, **how)
    if float8_recipe is not None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            raise CaseSkipped(
                f"float8 products must have a GPU of compute capability 8.9 or more, but got "
                f"{device}. Leave products out."
            )
        try:
            products.use_float8_products(module, float8_recipe)
        except ImportError as error:
            raise CaseSkipped(str(error)) from error
    generator = torch.Generator(device=device).manual_seed(batch_seed)
    tokens = torch.randint(
        model_config.vocab_size,
        (int(config["batch"]), int(config["sequence"]) + 1),
        device=device,
        generator=generator,
    )
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return Workload(
        module=module,
        precision=precision,
        device=device,
        loss_of=(lambda loss: loss)
        if chunked_loss
        else lambda logits: basics_model.cross_entropy(logits, targets),
        args=(inputs, targets) if chunked_loss else (inputs,),
        model_config=model_config,
        tokens=tokens,
    )


def shape_row(model_config: ModelConfig) -> dict[str, int]:
    """The model's dimensions and parameter count as columns of a result row."""
    dimensions = {name: int(getattr(model_config, name)) for name in DIMENSIONS}
    return dimensions | {"parameters": model_config.num_parameters}
