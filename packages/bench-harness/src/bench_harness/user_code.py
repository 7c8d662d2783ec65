"""The user's own code in cases: models and attentions named as ``package.module:callable``.

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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench_harness.core import Case, JsonValue, Row
from bench_harness.workload import DIMENSIONS

#: What a configuration says of a user's model; see :mod:`bench_harness.subject`.
SUBJECT = ("model", "model_args", "input", "target", "loss")
#: Seconds for importing, making and calling it once.
_LIMIT_S = 300.0

#: Options that describe the built-in language model, which a user's model replaces.
_OF_LANGUAGE_MODEL = frozenset(
    {
        *("sizes", "batch", "batches", "sequences", "vocab_size", *DIMENSIONS),
        *("attention", "attentions", "checkpoint_blocks", "keep_attention"),
    }
)

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def refuse_ignored(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuses options of the built-in model beside a user's model, which would ignore them.

    Args:
        values: all options of an experiment.
        given: names of those that the user gave.

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
            device = case.config.get("device", "cpu")
            calls = _calls(case)
            asked = json.dumps([names, subject, device, calls], sort_keys=True)
            if asked not in known:
                known[asked] = _asked(names, subject, device, calls)
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
    """Checks that a class can be called with a module or parameters and the given arguments.

    Raises:
        ValueError: it takes no such argument, or needs another one.
    """
    from bench_harness.workload import imported

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


def _asked(
    names: Sequence[str], subject: Row, device: str, calls: Sequence[tuple[str, Row]]
) -> Row:
    """What :func:`_look_at` finds, in a process of its own: this one never imports torch."""
    from bench_harness import process

    try:
        given = list(names), subject, device, list(calls)
        found: Row = process.asked(_look_at, *given, timeout_s=_LIMIT_S)
    except TimeoutError:
        raise ValueError(
            f"{', '.join(names)} must be imported, made and called once within {_LIMIT_S:g} s, but "
            "took longer. Correct what hangs."
        ) from None
    return found


def _look_at(
    names: list[str], subject: Row, device: str, calls: list[tuple[str, Row]], progress: Any
) -> JsonValue:
    """Imports every name, checks the arguments of wrappers and optimizers against their signatures,
    passes the input through the model once, and hashes the sources.

    The sources are read last: a factory may import more.
    """
    import torch

    from bench_harness.subject import fitting
    from bench_harness.workload import imported, missing_package

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
    """Refuses a factory that starts processes: ranks that hold them would not end.

    Raises:
        ValueError: code of the user's has started processes that are still there.
    """
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
