"""Wrappers and optimizers by name, and the arguments that their constructors take.

A short name stands for a constructor, ``package.module:name``. Its arguments are those of the
constructor's own signature. Where this package has to do more than to call it, a function of
:mod:`bench_harness.training.adapters` calls it, and the arguments of that function come on top:
``**arguments`` are passed on.

Signatures are read where a variant has arguments, in a process of their own unless this one has
imported torch.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bench_harness import process
from bench_harness.convert import converted
from bench_harness.core import Progress
from bench_harness.workload import imported

#: Seconds for importing every constructor once.
_LIMIT_S = 300.0
_KINDS: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list)},
    "None": None,
    "dtype": Literal["fp32", "bf16", "fp16"],
    "any": Any,
}


@dataclass(frozen=True, kw_only=True)
class Constructor:
    """A wrapper or an optimizer that has a short name.

    Attributes:
        title: how a label names it.
        target: ``package.module:name``; "" for none.
        through: the function of this package that calls it; "" for none.
        words: texts that stand for None, which TOML does not have.
        first: arguments that labels give first, before the order of the signature.
        of_class: arguments of the class whose default is another one here. They hold where the
            class itself is named, as ``ddp_lite:BucketedDDP``.
        unlabelled: arguments that labels leave out unless they are 0, because they change no cost.
        steps_before_recording: how many steps must be taken before one can be recorded.
    """

    title: str
    target: str = ""
    through: str = ""
    words: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    of_class: tuple[tuple[str, Any], ...] = ()
    unlabelled: tuple[str, ...] = ()
    steps_before_recording: int = 1


_ADAPTERS = "bench_harness.training.adapters"


def _optimizer(title: str, target: str, through: str) -> Constructor:
    return Constructor(
        title=title,
        target=target,
        through=f"{_ADAPTERS}:{through}",
        first=("lr", "fused", "offload_state"),
        unlabelled=("lr",),
    )


def _averaging(name: str) -> Constructor:
    return Constructor(title=name, target=f"ddp_lite:{name}", through=f"{_ADAPTERS}:averaging")


WRAPPERS: Mapping[str, Constructor] = {
    "none": Constructor(title="no wrapper"),
    "naive": _averaging("NaiveDDP"),
    "flat": _averaging("FlatDDP"),
    "overlap": _averaging("OverlapDDP"),
    "bucketed": Constructor(
        title="BucketedDDP",
        target="ddp_lite:BucketedDDP",
        through=f"{_ADAPTERS}:bucketed",
        words=("one", "same"),
        first=("bucket_size_mb", "last_bucket_size_mb", "copy", "wire_dtype"),
        of_class=(("comm_hook", "auto"),),
    ),
    # It rebuilds its buckets after the first step, and times the first ten by events.
    "torch-ddp": Constructor(
        title="torch DDP",
        target="torch.nn.parallel:DistributedDataParallel",
        through=f"{_ADAPTERS}:torch_ddp",
        steps_before_recording=11,
    ),
    "fsdp2": Constructor(
        title="FSDP2", target="torch.distributed.fsdp:fully_shard", through=f"{_ADAPTERS}:fsdp2"
    ),
    "fully-sharded": Constructor(
        title="FullyShardedDataParallel",
        target="shard_optim:FullyShardedDataParallel",
        through=f"{_ADAPTERS}:fully_sharded",
        first=("reshard_after_forward", "compute_dtype", "reduce_dtype", "prefetch"),
    ),
}
OPTIMIZERS: Mapping[str, Constructor] = {
    "adamw": _optimizer("AdamW", "torch.optim:AdamW", "plain"),
    "shard-optim-adamw": _optimizer("shard_optim AdamW", "shard_optim:AdamW", "without_flags"),
    "sgd": _optimizer("SGD", "torch.optim:SGD", "plain"),
    "muon": _optimizer("Muon", "torch.optim:Muon", "muon"),
    "zero-redundancy": _optimizer(
        "ZeroRedundancyOptimizer",
        "torch.distributed.optim:ZeroRedundancyOptimizer",
        "zero_redundancy",
    ),
    "sharded": _optimizer("ShardedOptimizer", "shard_optim:ShardedOptimizer", "sharded"),
}
_EVERY: Mapping[str, Constructor] = {**WRAPPERS, **OPTIMIZERS}


@dataclass(frozen=True)
class Call:
    """A wrapper or an optimizer with its arguments.

    Attributes:
        name: a short name, or ``package.module:name``.
        arguments: names and values that are not the default; dtypes are texts.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Call:
        """The call that a table with ``name`` and arguments says, as it is."""
        given: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in table.items()
        }
        name: str = given.pop("name")
        return cls(name, tuple(given.items()))

    def table(self) -> dict[str, Any]:
        """The name and the arguments as a row keeps them."""
        return {"name": self.name, **dict(self.arguments)}

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument that was given, else ``default``."""
        return dict(self.arguments).get(argument, default)

    def without(self, *arguments: str) -> Call:
        """The same call without some arguments."""
        kept = tuple(each for each in self.arguments if each[0] not in arguments)
        return Call(self.name, kept)

    @property
    def title(self) -> str:
        """How a label names it: without its package if it has no short name."""
        known = _EVERY.get(self.name)
        return self.name.rpartition(":")[2] if known is None else known.title

    def label(self, *, whole: bool = False) -> str:
        """The title, and every argument that is not the default, except those left out.

        A learning rate of 0 is shown: weights and gradients then keep their values, on which the
        power that a GPU needs depends, and so its clock.

        Args:
            whole: leave nothing out, neither the package of a name nor an argument.
        """
        hidden = _EVERY[self.name].unlabelled if self.name in _EVERY and not whole else ()
        shown = [(key, value) for key, value in self.arguments if key not in hidden or value == 0]
        parts = [key if value is True else f"{key}={_written(value)}" for key, value in shown]
        title = self.name if whole and self.name not in _EVERY else self.title
        return title + (f"({', '.join(parts)})" if parts else "")


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Argument(NamedTuple):
    """An argument that a constructor takes, as JSON.

    Attributes:
        default: None also where it is no number, text or truth value.
        kinds: names of types, ``dtype``, ``None``, ``any``, and texts in quotes.
    """

    default: Any
    kinds: list[str]


#: The arguments of a constructor by name, in the order in which labels give them.
Signature = dict[str, Argument]


@functools.cache
def signatures() -> dict[str, Signature]:
    """The signatures of all short names.

    Raises:
        ValueError: a constructor cannot be imported.
    """
    found = every() if "torch" in sys.modules else process.asked(every, timeout_s=_LIMIT_S)
    return {n: {key: Argument(*each) for key, each in own.items()} for n, own in found.items()}


def every(progress: Progress | None = None) -> dict[str, Signature]:
    """:func:`signatures`, read here; imports torch."""
    return {name: _arguments(known) for name, known in _EVERY.items()}


def _arguments(known: Constructor) -> Signature:
    if not known.through:  # of no wrapper
        return {}
    function = imported(known.through, "constructor")
    found = _own(function)
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        found = {**_own(imported(known.target, "constructor")), **found}
    order = [name for name in known.first if name in found]
    return {name: found[name] for name in dict.fromkeys([*order, *found])}


def _own(function: Callable[..., Any]) -> Signature:
    """Arguments with a default that can be written as text."""
    scope = inspect.getmodule(function)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty:
            continue
        plain = isinstance(parameter.default, bool | int | float | str)
        default = parameter.default if plain else None
        kinds = _kinds(parameter.annotation, default, vars(scope) if scope else {})
        if kinds and kinds != ["None"]:
            found[name] = Argument(default, kinds)
    return found


def _kinds(annotation: Any, default: Any, scope: Mapping[str, Any]) -> list[str]:
    if annotation is inspect.Parameter.empty:  # as in torch's older classes
        return ["any"] if default is None else [type(default).__name__]
    members = annotation.split(" | ") if isinstance(annotation, str) else [annotation]
    found: list[str] = []
    for member in members:
        if isinstance(member, str):
            try:
                member = eval(member, dict(scope))  # noqa: S307 - an annotation of imported code
            except (NameError, SyntaxError, AttributeError, TypeError):  # no type that text has
                continue
        found += _names(member)
    return list(dict.fromkeys(found))


def _names(hint: Any) -> list[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [name for member in typing.get_args(hint) for name in _names(member)]
    if origin is Literal:
        return [f"'{text}'" for text in typing.get_args(hint) if isinstance(text, str)]
    if hint in (None, types.NoneType):
        return ["None"]
    if origin in (tuple, list):
        return ["list"]
    name = getattr(hint, "__name__", "")
    return [name] if name in _KINDS else []


def checked(what: str, given: Mapping[str, Any], known: Mapping[str, Constructor]) -> Call:
    """A call whose arguments its constructor takes, without those that are the default.

    Args:
        what: "wrapper" or "optimizer".
        given: ``name`` and arguments.
        known: the short names; a class without one is checked where it is imported
            (:mod:`bench_harness.user_code`).

    Raises:
        ValueError: an unknown name or argument, or a value that does not fit.
    """
    name = short(given["name"], known)
    if name not in known and ":" in name:
        return Call.of({**given, "name": name})
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(known)}, but got {name!r}. Correct the name."
        )
    if given["name"] == known[name].target:
        given = {**dict(known[name].of_class), **given}
    if given.keys() == {"name"}:
        return Call(name)
    takes = signatures()[name]
    refuse_unknown({key: value for key, value in given.items() if key != "name"}, takes, name)
    values = {
        key: _fitting(f"{name} key {key}", given[key], takes[key].kinds, known[name].words)
        for key in takes
        if key in given
    }
    changed = {key: value for key, value in values.items() if value != takes[key].default}
    return Call.of({"name": name, **changed})


def _fitting(what: str, value: Any, kinds: list[str], words: tuple[str, ...]) -> Any:
    """A value of one of the kinds; ``words`` stand for None, and whole numbers become floats."""
    words = words if "None" in kinds else ()
    if value in words:
        return value
    texts = (*(kind[1:-1] for kind in kinds if kind.startswith("'")), *words)
    hints = [Literal[texts]] if texts else []
    hints += [_KINDS[kind] for kind in kinds if kind in _KINDS]
    return converted(what, value, functools.reduce(operator.or_, hints))


def short(name: str, known: Mapping[str, Constructor]) -> str:
    """The short name of a constructor that is named by its title or its target."""
    named = {word: key for key, each in known.items() for word in (each.title, each.target)}
    return named.get(name, name)


def refuse_unknown(table: Mapping[str, Any], known: Any, what: str) -> None:
    """Refuses keys of a table that are not known.

    Raises:
        ValueError: naming the first one, and those that are.
    """
    for key in table:
        if key not in known:
            valid = ", ".join(known) if known else "none: it takes no arguments"
            raise ValueError(
                f"{what} key must be one of {valid}, but got {key!r}. Remove or correct it."
            )


def construct(role: str, call: Call, around: Any) -> Any:
    """The wrapper around a module, or the optimizer of ``adapters.Parameters``, that a call makes.

    Raises:
        CaseSkipped: it cannot run here; the text says why.
    """
    import torch

    arguments = dict(call.arguments)
    known = _EVERY.get(call.name)
    constructor = imported(call.name if known is None else known.target, role)
    takes = _own(constructor) if known is None else _arguments(known)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for key, value in arguments.items():
        if value in tuple(dtypes) and key in takes and "dtype" in takes[key].kinds:
            arguments[key] = dtypes[value]
        elif known is not None and value in known.words:
            arguments[key] = None
    if known is None:
        return constructor(around, **arguments)
    return imported(known.through, role)(constructor, around, **arguments)


def resolved(call: Call) -> dict[str, Any]:
    """Every argument of a call by name, with the defaults that this version's constructor has."""
    takes = _arguments(_EVERY[call.name]) if call.name in _EVERY else {}
    return {**{key: default for key, (default, _) in takes.items()}, **dict(call.arguments)}
