"""Options of an experiment from the command line or a preset: both mirror its ``Options`` class.

A field is declared once, in the dataclass. From it come the command's parameters with their types,
defaults and help, the keys that a preset's table may hold, and the checks of both.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench_harness.experiments import Experiment

_SCALARS = (bool, int, float, str, dict)


@dataclass(frozen=True)
class OptionSpec:
    """One field of an ``Options`` class.

    Attributes:
        name: of the field; with dashes, of the command-line option.
        kind: ``bool``, ``int``, ``float``, ``str``, or ``dict`` for a table or its name: of the
            value or of each of its items.
        many: whether the value is a tuple.
        optional: whether None is a value.
    """

    name: str
    kind: type
    many: bool
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None


def specs(experiment: Experiment) -> list[OptionSpec]:
    """The options of an experiment, in declaration order, those of a base class last.

    Raises:
        TypeError: a field's type is none of those that :class:`Experiment` lists.
    """
    hints = typing.get_type_hints(experiment.Options)
    bases = filter(dataclasses.is_dataclass, experiment.Options.__mro__[1:])
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    fields = sorted(
        dataclasses.fields(experiment.Options), key=lambda field: field.name in inherited
    )
    return [_spec(field, hints[field.name]) for field in fields]


def _spec(field: dataclasses.Field[Any], hint: Any) -> OptionSpec:
    kind, many, optional = hint, False, False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        kind, optional = members[0] if len(members) == 1 else None, True
    if typing.get_origin(kind) is tuple:
        kind, many = typing.get_args(kind)[0], True
    if kind == dict[str, Any]:  # a table
        kind = dict
    if kind not in _SCALARS:
        raise TypeError(
            f"option {field.name} must be bool, int, float, str, dict[str, Any], a tuple of one of "
            f"them, or one of these or None, but got {hint}. Change its annotation."
        )
    return OptionSpec(
        name=field.name,
        kind=kind,
        many=many,
        optional=optional,
        default=field.default,
        help=field.metadata.get("help", ""),
        choices=field.metadata.get("choices"),
    )


def build(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """Complete and checked options from some given ones.

    Args:
        values: by field name; from a preset, with lists for tuples.

    Returns:
        Every field of ``Options``, ready for :meth:`Experiment.cases`.

    Raises:
        ValueError: unknown name, wrong type, not one of the choices, or values that do not fit
            together; the message starts with the experiment's name and lists what is valid.
    """
    known = {spec.name: spec for spec in specs(experiment)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"{experiment.name}: option must be one of {', '.join(known)}; received {unknown[0]!r}"
        )
    try:
        checked = {name: _check(known[name], value) for name, value in values.items()}
        options = experiment.Options(**checked)
    except ValueError as error:
        raise ValueError(f"{experiment.name}: {error}") from None
    # Defaults are checked too, so that 1 and 1.0 of a float option make the same case.
    return {name: _check(spec, getattr(options, name)) for name, spec in known.items()}


def _check(spec: OptionSpec, value: Any) -> Any:
    if value is None:
        if spec.optional:
            return None
        raise ValueError(f"{spec.name} must be {_described(spec)}; received nothing")
    if not spec.many:
        return _check_item(spec, value)
    items = [value] if isinstance(value, str) or not isinstance(value, (list, tuple)) else value
    return tuple(_check_item(spec, item) for item in items)


def _check_item(spec: OptionSpec, value: Any) -> Any:
    if spec.kind is float and type(value) is int:
        value = float(value)
    if spec.kind is dict and isinstance(value, str):
        return value  # the name of a table whose other entries are the defaults
    if type(value) is not spec.kind:
        raise ValueError(f"{spec.name} must be {_described(spec)}; received {value!r}")
    if spec.choices is not None and value not in spec.choices:
        raise ValueError(
            f"{spec.name} must be one of {', '.join(spec.choices)}; received {value!r}"
        )
    return value


def _described(spec: OptionSpec) -> str:
    return f"a list of {spec.kind.__name__}" if spec.many else f"of type {spec.kind.__name__}"


def parse(spec: OptionSpec, text: str) -> Any:
    """The value of an option as written on the command line: tuples with commas.

    Raises:
        ValueError: an item is not of the option's type.
    """
    if spec.optional and text == "none":
        return None
    if spec.many:
        return tuple(_parse_item(spec, item.strip()) for item in text.split(",") if item.strip())
    return _parse_item(spec, text)


def _parse_item(spec: OptionSpec, text: str) -> Any:
    if spec.kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{spec.name} must be true or false; received {text!r}")
        return text == "true"
    if spec.kind is dict:
        return text
    try:
        return spec.kind(text)
    except ValueError:
        raise ValueError(f"{spec.name} must be {_described(spec)}; received {text!r}") from None


def parameters(experiment: Experiment) -> list[inspect.Parameter]:
    """The experiment's options as parameters of a typer command."""
    return [_parameter(spec) for spec in specs(experiment)]


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    flag = "--" + spec.name.replace("_", "-")
    text = spec.help
    if spec.choices is not None:
        text = f"{text.rstrip('.')}: {', '.join(spec.choices)}."
    if spec.kind is bool and not spec.many and not spec.optional:
        annotation: Any = Annotated[bool, typer.Option(f"{flag}/--no-{flag[2:]}", help=text)]
        default: Any = spec.default
    else:
        metavar = spec.kind.__name__.upper() + ",..." * spec.many
        # Kept as text here and parsed by :func:`parse`, so that one place words the errors.
        annotation = Annotated[str, typer.Option(flag, help=text, metavar=metavar)]
        default = _written(spec.default)
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _written(value: Any) -> str:
    """The inverse of :func:`parse`."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_command_line(experiment: Experiment, given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete and checked options from the values of :func:`parameters`.

    Raises:
        ValueError: as :func:`build`.
    """
    values = {}
    for spec in specs(experiment):
        value = given[spec.name]
        try:
            values[spec.name] = parse(spec, value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{experiment.name}: {error}") from None
    return build(experiment, values)
