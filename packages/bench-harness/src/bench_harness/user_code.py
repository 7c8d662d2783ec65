"""The user's own code in cases: models and attentions named as ``package.module:callable``.

A user's model is a factory with its arguments, an input, a target and a loss by name. All of it is
data in a case's configuration, the *subject*: ``model`` and ``input``, and where given
``model_args``, ``target`` and ``loss``.

A name alone does not say what is measured: the code behind it changes between two runs. So before
anything is measured, one process imports every name, and the cases get a hash of the sources and
the model's number of parameters into their configuration, which is their identity. What cannot be
imported, or does not give a module, is an error before a run folder exists; only an attention whose
package is not installed is left to its case, which skips it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench_harness import process
from bench_harness.convert import cut
from bench_harness.core import Case, Config, JsonValue, Row
from bench_harness.workload import DIMENSIONS, Workload, imported, language_model, missing_package

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Entries of a configuration that describe a user's model.
SUBJECT = ("model", "model_args", "input", "target", "loss")
#: Seconds for importing, making and calling it once.
_LIMIT_S = 300.0

#: Options that describe the built-in language model, which a user's model replaces.
_OF_LANGUAGE_MODEL = {
    *("sizes", "batch", "batches", "sequences", "vocab_size", *DIMENSIONS),
    *("attention", "attentions", "checkpoint_blocks", "keep_attention"),
}

#: Modules that a factory returned and that still exist.
_made: weakref.WeakSet[Any] = weakref.WeakSet()

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def refuse_ignored(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuses options of the built-in model that were given beside a user's, which ignores them.

    Raises:
        ValueError: naming them.
    """
    if values.get("model") is None:
        return
    ignored = sorted(_OF_LANGUAGE_MODEL & values.keys() & set(given))
    if ignored:
        raise ValueError(
            f"options beside model must apply to it, but got {', '.join(ignored)}, which describe "
            "the built-in language model. Leave them out, or set them in the factory."
        )


def identified(cases: Sequence[Case]) -> list[Case]:
    """The cases, those that name a user's code with what identifies it in their configuration.

    Modules of the current directory are found too, here and in the processes of the cases.

    Raises:
        ValueError: a name cannot be imported, a factory fails, hangs or gives no module, an input
            does not parse or does not fit, or a loss is not a scalar.
    """
    if not any(_names(case) for case in cases):
        return list(cases)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    known: dict[str, Row] = {}
    found = []
    for case in cases:
        if names := _names(case):
            subject = {name: case.config[name] for name in SUBJECT if name in case.config}
            given = names, subject, case.config.get("device", "cpu"), _calls(case)
            asked = json.dumps(given, sort_keys=True)
            if asked not in known:
                try:  # in a process of its own: this one never imports torch
                    known[asked] = process.asked(_look_at, *given, timeout_s=_LIMIT_S)
                except TimeoutError:
                    raise ValueError(
                        f"{', '.join(names)} must be imported, made and called once within "
                        f"{_LIMIT_S:g} s, but took longer. Correct what hangs."
                    ) from None
            config = {**case.config, "user_code": known[asked]}
            case = dataclasses.replace(case, config=config)
        found.append(case)
    return found


def _names(case: Case) -> list[str]:
    config = {name: value for name, value in case.config.items() if name != "label"}
    return sorted(set(re.findall(rf'"({_NAME.pattern})"', json.dumps(config, ensure_ascii=False))))


def _calls(case: Case) -> list[tuple[str, Row]]:
    """Wrappers and optimizers of the variants that are the user's own classes, each once."""
    found: list[tuple[str, Row]] = []
    for variant in case.config.get("variants", []):
        for role in ("wrapper", "optimizer"):
            call = variant.get(role) if isinstance(variant, Mapping) else None
            if isinstance(call, Mapping) and _NAME.fullmatch(str(call.get("name", ""))):
                entry = (role, dict(call))
                if entry not in found:
                    found.append(entry)
    return found


def _check_signature(role: str, call: Row) -> None:
    """Checks that a class can be called with a module or parameters and the given arguments."""
    name, given = call["name"], {key: value for key, value in call.items() if key != "name"}
    signature = inspect.signature(imported(name, role))
    try:
        signature.bind(None, **given)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[1:]) or "none"
        raise ValueError(
            f"{role} {name} must be given arguments that it takes ({takes}), but got "
            f"{', '.join(given) or 'none'}: {error}. Correct them."
        ) from None


def _look_at(
    names: list[str], subject: Row, device: str, calls: list[tuple[str, Row]], progress: Any
) -> JsonValue:
    """Imports every name, checks the arguments of wrappers and optimizers against their signatures,
    passes the input through the model once, and hashes the sources.

    The sources are read last: a factory may import more.
    """
    import torch

    worker = os.getpid()
    roles = {subject.get("model"): "model", subject.get("loss"): "loss"}
    roles |= {call["name"]: role for role, call in calls}
    # An attention whose package is not installed is skipped where it is measured.
    names = [name for name in names if name in roles or missing_package(name) is None]
    for name in names:
        imported(name, roles.get(name, "attention"))
    for role, call in calls:
        _check_signature(role, call)
    parameters = None
    if "model" in subject:
        where = device if device != "cuda" or torch.cuda.is_available() else "cpu"
        parameters = fitting(subject, torch.device(where))
    _refuse_processes(worker, names)
    return {"sources": {name: _source(name) for name in names}, "parameters": parameters}


def _refuse_processes(worker: int, names: Sequence[str]) -> None:
    """Refuses a factory that starts processes: ranks that hold them would not end."""
    if os.getpid() != worker:
        os._exit(0)  # a fork of the user's, which must not answer for its parent
    left = 0
    for child in psutil.Process().children():
        command: list[str] = []
        with contextlib.suppress(psutil.Error):  # it has ended, and nobody has waited for it
            command = child.cmdline()
        left += not any("resource_tracker import" in part for part in command)  # Python's
    if left:
        raise ValueError(
            f"{', '.join(names)} must leave no processes behind, but got {left} that stayed. "
            "Start none in the factory."
        )


def _source(name: str) -> str:
    """A hash over the imported modules of the package that a name is from.

    For a module outside packages, those are the modules of its folder and below; an installed one
    stands for itself.
    """
    module = name.partition(":")[0]
    package = module.partition(".")[0]
    own = {key for key in sys.modules if key == package or key.startswith(package + ".")}
    file = getattr(sys.modules[package], "__file__", None)
    if file is not None and module == package and not _is_installed(Path(file)):
        folder = Path(file).resolve().parent
        own |= {
            key
            for key, other in list(sys.modules.items())
            if (found := getattr(other, "__file__", None))
            and not _is_installed(Path(found))
            and Path(found).resolve().is_relative_to(folder)
        }
    digest = hashlib.sha256()
    for key in sorted(own):
        path = Path(getattr(sys.modules[key], "__file__", None) or "")
        if path.is_file():
            digest.update(key.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _is_installed(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    paths = sysconfig.get_paths()
    return any(
        file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


def imported_module(
    subject: Config,
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
        with contextlib.chdir("."):
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
    if not _made.isdisjoint(module.modules()):
        raise ValueError(
            f"model must be a factory that returns a new module with each call, but {name!r} "
            "returned one again, which a variant before has changed. Make it in the factory."
        )
    _made.update(module.modules())
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


def _loss(subject: Config, device: torch.device) -> Callable[[Any], Tensor]:
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


def fitting(subject: Config, device: torch.device) -> int:
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
_KEYWORD = re.compile(r"(\w+)\s*=\s*")


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
        named = _KEYWORD.match(entry)
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
            "loss must be computed from a tensor, or an object with loss or logits, but the module "
            f"returned {type(output).__name__}. Name a --loss function that takes it."
        )
    return found.float().mean()


def workload_of(
    config: Config,
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
