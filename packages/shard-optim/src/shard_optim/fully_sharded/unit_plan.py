"""Which parameters are gathered together, and whose call reads them: planning without tensors.

A *unit* is a set of parameters that is gathered, used and freed as one: usually those of one
Transformer block. A unit belongs to the module whose call reads its parameters. Small parameters
are in no unit: they stay whole on every rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

Units: TypeAlias = Iterable[nn.Module] | Callable[[nn.Module], bool] | None

# A vector of at most this many elements (a norm's weight, a bias) costs more to gather than to
# keep. Matrices are sharded whatever their size.
LARGEST_REPLICATED_VECTOR = 2**20

# Modules that only group others, and those among them that have no forward.
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


@dataclass(eq=False, kw_only=True)
class UnitPlan:
    """One unit of one dtype."""

    name: str  # of the module that it belongs to; empty for the root
    repeated: bool  # whether it is one of the repeated blocks, which take turns in a few buffers
    # The modules whose calls read its parameters: its own, and for a tied parameter others.
    readers: list[nn.Module]
    # Of the parameters, as the root's ``named_parameters()`` has them.
    names: list[str] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)


def is_small(param: nn.Parameter) -> bool:
    """Whether every rank keeps the whole parameter."""
    return param.numel() == 0 or (param.ndim < 2 and param.numel() <= LARGEST_REPLICATED_VECTOR)


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether values of this dtype stand for others (int8, float8), and so are never cast."""
    return not dtype.is_floating_point or dtype.itemsize == 1


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile(module)`` made it so."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported just to find out
    return module._compiled_call_impl is not None or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )


def plan_units(root: nn.Module, units: Units) -> list[UnitPlan]:
    """Divides the large parameters of ``root`` into units, in registration order.

    ``units`` are as for ``FullyShardedDataParallel``.

    Raises:
        TypeError: if ``units`` is neither modules nor a predicate.
        ValueError: if a listed module appears twice, is not in ``root``, or lies inside a compiled
            module.
    """
    blocks = _chosen_blocks(root, units)
    reader_of = {block: block for block in blocks} | _others(root, set(blocks))
    kinds: dict[nn.Module, dict[torch.dtype, UnitPlan]] = {}
    plan_of: dict[nn.Parameter, UnitPlan] = {}
    repeated = set(blocks)
    module_names = {module: name for name, module in reversed(list(root.named_modules()))}
    for name, param, owner in _parameters_with_owners(root, reader_of):
        if is_small(param):
            continue
        reader = reader_of[owner]
        if param in plan_of:  # tied: another module reads it too
            if reader not in plan_of[param].readers:
                plan_of[param].readers.append(reader)
            continue
        plan = kinds.setdefault(owner, {}).setdefault(
            param.dtype,
            UnitPlan(name=module_names[owner], repeated=owner in repeated, readers=[reader]),
        )
        plan.names.append(name)
        plan.params.append(param)
        plan_of[param] = plan
    return [plan for by_dtype in kinds.values() for plan in by_dtype.values()]


def _chosen_blocks(root: nn.Module, units: Units) -> list[nn.Module]:
    if units is None:
        return list(_repeated_blocks(root))
    if callable(units) and not isinstance(units, nn.Module):
        chosen = [module for module in root.modules() if units(module)]
    elif isinstance(units, Iterable) and not isinstance(units, nn.Module):
        chosen = list(units)
    else:
        raise _not_modules(units)
    for module in chosen:
        if not isinstance(module, nn.Module):
            raise _not_modules(module)
    names = {module: name for name, module in root.named_modules()}
    for module, count in Counter(chosen).items():
        if module not in names:
            raise ValueError(
                "units must be modules of the wrapped model, but got "
                f"a {type(module).__name__} that is not in it. List modules of this model."
            )
        if count > 1:
            raise ValueError(
                f"units must name every module once, but got {names[module] or 'the root'!r} "
                f"{count} times. Remove the repetition."
            )
        above = (m for m in names if m is not module and is_compiled(m))
        inside = next((names[m] for m in above if module in set(m.modules())), None)
        if inside is not None:
            raise ValueError(
                "units must not lie inside a compiled module, but got "
                f"{names[module]!r} inside {inside or 'the root'!r}. Compile each unit instead of "
                "the module around it."
            )
    return chosen


def _not_modules(given: object) -> TypeError:
    return TypeError(
        f"units must be a list of modules or a predicate over modules, but got {given!r}. Pass a "
        "list such as list(model.blocks)."
    )


def _has_large(module: nn.Module) -> bool:
    return any(not is_small(param) for param in module.parameters())


def _repeated_blocks(node: nn.Module) -> Iterator[nn.Module]:
    """The outermost children of one container that share their type; compiled modules too."""
    if is_compiled(node):
        yield node
        return
    kinds: Counter[type] = Counter()
    if isinstance(node, _CONTAINERS):
        kinds.update(type(child) for child in node.children() if _has_large(child))
    for child in node.children():
        if not _has_large(child):
            continue
        if kinds[type(child)] > 1:
            yield child
        else:
            yield from _repeated_blocks(child)


def _others(root: nn.Module, blocks: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """What no block holds: the modules to gather as one, each with the module that reads it.

    That is the module around the blocks, usually the root: it may read a child's weight without
    calling the child, as a fused loss reads the weight of the head.
    """
    around = {m for m in root.modules() if m not in blocks and not blocks.isdisjoint(m.modules())}
    found: dict[nn.Module, nn.Module] = {}

    def visit(node: nn.Module, reader: nn.Module) -> None:
        if node in blocks or not _has_large(node):
            return
        container = isinstance(node, _CONTAINERS)
        if not (node is root or node in around or container):
            found.setdefault(node, reader)
            return
        if node is root or not isinstance(node, _UNCALLED):
            reader = node
        if any(not is_small(param) for param in node.parameters(recurse=False)):
            found.setdefault(node, reader)
        for child in node.children():
            visit(child, reader)

    visit(root, root)
    return found


def _parameters_with_owners(
    root: nn.Module, owners: Container[nn.Module]
) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Every parameter with its name and the innermost of ``owners`` around it, on every path."""
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(
        node: nn.Module, prefix: str, owner: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
        owner = node if node in owners else owner
        if (node, owner) in seen:
            return
        seen.add((node, owner))
        for name, param in node.named_parameters(prefix, recurse=False):
            yield name, param, owner
        for name, child in node.named_children():
            yield from visit(child, f"{prefix}.{name}" if prefix else name, owner)

    yield from visit(root, "", root)
