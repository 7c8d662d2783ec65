"""A user's module as a workload: a factory, its arguments, an input, a target and a loss by name.

All of it is data in a case's configuration, the *subject*: ``model`` and ``input``, and where given
``model_args``, ``target`` and ``loss``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bench_harness.convert import cut
from bench_harness.workload import Workload, imported, language_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def imported_module(
    subject: Mapping[str, Any],
    device: torch.device,
    precision: str,
    *,
    seed: int = 0,
    batch_seed: int | None = None,
) -> Workload:
    """The workload that a subject describes.

    Args:
        seed: of the parameters.
        batch_seed: of input and target; None goes on from the parameters' random numbers.

    Raises:
        ValueError: a name cannot be resolved, the factory fails or does not give an
            ``nn.Module``, or an input does not parse.
    """
    import torch

    name = subject["model"]
    make = imported(name, "model")
    arguments = subject.get("model_args") or {}
    torch.manual_seed(seed)
    try:
        module = make(**arguments)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(
            f"model must be a factory that can be called with ({given}), but {name!r} raised "
            f"{type(error).__name__}: {error}. Correct the factory or --model-args."
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"model must be a factory that returns a torch.nn.Module, but {name!r} returned "
            f"{type(module).__name__}. Return the module."
        )
    if batch_seed is not None:
        torch.manual_seed(batch_seed)
    args, kwargs = parse_inputs(subject["input"], device)
    return Workload(
        module=module.to(device),
        precision=precision,
        device=device,
        loss_of=_loss(subject, device),
        args=args,
        kwargs=kwargs,
    )


def _loss(subject: Mapping[str, Any], device: torch.device) -> Callable[[Any], Tensor]:
    """From the module's output to a scalar: the user's function, or :func:`scalar_loss`."""
    if subject.get("loss") is None:
        return scalar_loss
    function = imported(subject["loss"], "loss")
    args, kwargs = parse_inputs(subject["target"], device) if subject.get("target") else ((), {})

    def loss(output: Any) -> Tensor:
        import torch

        found = function(output, *args, **kwargs)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(
                f"loss must return a tensor of one element, but {subject['loss']!r} returned "
                f"{what}. Reduce it to a mean or a sum."
            )
        return found.reshape(())

    return loss


def fitting(subject: Mapping[str, Any], device: torch.device) -> int:
    """The number of parameters of a subject, whose input has passed through it once.

    It passes as tensors without memory where the module allows, so a mistake costs no time.

    Raises:
        ValueError: the model cannot be made, or its input, target or loss does not fit it.
    """
    import torch

    meta = torch.device("meta")
    try:
        with meta:
            workload = imported_module(subject, meta, "fp32")
            _check_gradient(workload, workload.loss())
    except Exception:  # noqa: BLE001 - it may need real tensors, as those of a checkpoint
        workload = imported_module(subject, device, "fp32")
        try:
            _check_gradient(workload, workload.loss())
        except torch.OutOfMemoryError:
            pass  # a result of its own, which the case will have
        except Exception as error:
            known = isinstance(error, ValueError) and str(error).startswith("loss must")
            text = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(
                str(error)
                if known
                else f"input must fit the model, but got {subject['input']!r}: "
                f"{type(error).__name__}: {text}. Correct the input, the target or the loss."
            ) from error
    return workload.parameters()


def _check_gradient(workload: Workload, loss: Tensor) -> None:
    """A model that is trained must have a loss that reaches its parameters."""
    if not loss.requires_grad and any(p.requires_grad for p in workload.module.parameters()):
        raise ValueError(
            "loss must be computed from the model's parameters, but got a tensor without a "
            "gradient. Remove detach() and no_grad() from the model and from --loss."
        )


_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>\d+(?:x\d+)*)\](?:<(?P<below>\d+))?")
_NAME = re.compile(r"(\w+)\s*=\s*")


def parse_inputs(spec: str, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tensors from a specification such as ``input_ids=int64[4x128]<1000,float32[4x3]``.

    Entries are separated by commas: an optional keyword, a dtype, the shape, and for integers the
    exclusive upper bound (2 by default). ``{ids=int64[4x8],mask=bool[4x8]}`` is a dictionary.

    Returns:
        Positional and keyword arguments.

    Raises:
        ValueError: an entry does not parse, or names no dtype.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for entry in cut(spec, ","):
        named = _NAME.match(entry)
        rest = entry[named.end() :] if named else entry
        if rest.startswith("{") and rest.endswith("}"):
            unnamed, held = parse_inputs(rest[1:-1], device)
            if unnamed:
                raise _unreadable(entry)
            value: Any = held
        else:
            value = _tensor(rest, entry, device)
        if named:
            kwargs[named[1]] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _tensor(text: str, entry: str, device: torch.device) -> Tensor:
    import torch

    match = _TENSOR.fullmatch(text)
    dtype = getattr(torch, match["dtype"], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise _unreadable(entry)
    shape = [int(extent) for extent in match["shape"].split("x")]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.randint(int(match["below"] or 2), shape, device=device).to(dtype)


def _unreadable(entry: str) -> ValueError:
    return ValueError(
        "an input must look like name=int64[4x128]<1000, float32[4x3x8x8] or "
        f"{{ids=int64[4x8],mask=bool[4x8]}}, but got {entry!r}. Correct it."
    )


def scalar_loss(output: Any) -> Tensor:
    """A scalar from any module's output: its ``loss``, else the mean of its logits or first tensor.

    Raises:
        ValueError: the output holds no tensor.
    """
    import torch

    found = output
    for name in ("loss", "logits"):
        own = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(own, torch.Tensor):
            found = own
            break
    while isinstance(found, (tuple, list, Mapping)) and found:
        found = next(iter(found.values())) if isinstance(found, Mapping) else found[0]
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            "the module must return a tensor, or an object with loss or logits, but got "
            f"{type(output).__name__}. Name a --loss function that takes it."
        )
    return found.float().mean()


def workload_of(
    config: Mapping[str, Any],
    device: torch.device,
    *,
    precision: str,
    batch_seed: int | None = None,
    **how: Any,
) -> Workload:
    """What a case measures: the user's model that it names, or the language model.

    Args:
        batch_seed: of the input; None leaves it to the model's kind.
        how: further arguments of :func:`language_model`, which a user's model has no use for.
    """
    if config.get("model") is not None:
        return imported_module(config, device, precision, batch_seed=batch_seed)
    return language_model(config, device, precision=precision, batch_seed=batch_seed or 0, **how)
