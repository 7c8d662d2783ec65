"""The settings of a training step as data: wrapper, optimizer, precision, compilation, attention.

A variant of the experiment ``train-step`` is a table of a preset. It is read and checked here,
without importing torch, and its label is generated from its settings, so that a label cannot say
anything else than what was measured::

    { wrapper = "naive" }
    { wrapper = { name = "bucketed", bucket_size_mb = 100 }, optimizer = "zero-redundancy" }
    { optimizer = { name = "sharded", reduce_gradients = true, overlap = "next-forward" } }
    { wrapper = { name = "fsdp2", reshard_after_forward = true }, compile = "off" }

A wrapper or an optimizer is a name, or a table with ``name`` and arguments, which are checked
against the signature of its constructor (:mod:`bench_harness.training.constructors`). As text, for
the command line, a variant is ``bucketed(bucket_size_mb=100) + zero-redundancy``
(:mod:`bench_harness.convert`). ``package.module:name`` in place of a name is any class that
can be imported; its arguments are checked before anything is measured
(:mod:`bench_harness.user_code`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from bench_harness.convert import converted, parse_call, parse_variant
from bench_harness.training import constructors
from bench_harness.training.constructors import OPTIMIZERS, WRAPPERS, Call, checked, short

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Compile: TypeAlias = Literal["off", "blocks", "model"]
Loss: TypeAlias = Literal["logits", "chunked"]
Elementwise: TypeAlias = Literal["torch"]
Products: TypeAlias = Literal["plain", "float8", "float8-rows"]
Table: TypeAlias = dict[str, Any]

NO_WRAPPER = Call("none")
ADAMW = Call("adamw")

#: Settings besides wrapper and optimizer that a variant may override.
SHARED = (
    *("precision", "compile", "attention", "checkpoint_blocks", "keep_attention", "loss"),
    *("elementwise", "cuda_graph", "products"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One variant, complete.

    Attributes:
        compile: "blocks" compiles every Transformer block, "model" the whole model.
        attention: "naive", "sdpa", "flash", or ``package.module:callable``.
        checkpoint_blocks: blocks that are recomputed together in backward; 0 keeps everything.
        keep_attention: of recomputed blocks, keep the output of fused attention.
        loss: "logits" makes all logits first; "chunked" never has all of them in memory at once.
        elementwise: "torch"; published rows also have "liger", which is not measured any more.
        cuda_graph: the whole step is recorded once, and replayed by one launch.
        products: "float8" and "float8-rows" multiply in float8, by torchao, with one scale a
            tensor or a row.

    Attention, ``checkpoint_blocks``, ``keep_attention``, ``loss`` and ``products`` are those of the
    language model; another model has its own.
    """

    wrapper: Call = NO_WRAPPER
    optimizer: Call = ADAMW
    precision: Precision = "fp32"
    compile: Compile = "off"
    attention: str = "sdpa"
    checkpoint_blocks: int = 0
    keep_attention: bool = False
    loss: Loss = "logits"
    elementwise: Elementwise = "torch"
    cuda_graph: bool = False
    products: Products = "plain"

    def __post_init__(self) -> None:
        wrapper, optimizer = self.wrapper, self.optimizer
        reduces, shards = optimizer.get("reduce_gradients", False), self.zero_stage == 3
        if reduces and wrapper.name != "none":
            raise ValueError(
                f"wrapper must be 'none' where the optimizer has reduce_gradients, but got "
                f"{wrapper.label()}. Leave the wrapper out."
            )
        recordable = wrapper.name in ("none", "torch-ddp", "fully-sharded")
        recordable &= optimizer.name in ("adamw", "shard-optim-adamw") and not self.offloads
        if self.cuda_graph and not recordable:
            raise ValueError(
                "cuda_graph must be off unless the whole step runs on the device: wrapper 'none', "
                "'torch-ddp' or 'fully-sharded', optimizer 'adamw' or 'shard-optim-adamw', no "
                f"offload_state; but got {self.label()}. Remove it."
            )
        if self.float8_recipe is not None and self.precision != "bf16":
            raise ValueError(
                f"precision must be bf16 beside products={self.products}, but got "
                f'{self.precision}. Set precision = "bf16".'
            )
        if self.keep_attention and self.checkpoint_blocks != 1:
            raise ValueError(
                f"checkpoint_blocks must be 1 beside keep_attention, but got "
                f"{self.checkpoint_blocks}. Set checkpoint_blocks = 1."
            )
        if optimizer.get("overlap") and not reduces:
            raise ValueError(
                f"overlap must come with reduce_gradients, but got {optimizer.label()}. Add "
                "reduce_gradients = true."
            )
        if self.offloads and wrapper.name == "fsdp2":
            raise ValueError(
                f"offload_state must be off under {wrapper.title}, whose shards are no plain "
                f"tensors, but got {optimizer.label()}. Remove it."
            )
        if optimizer.name == "muon" and wrapper.name == "fsdp2":
            raise ValueError(
                f"optimizer must treat elements alike under {wrapper.title}, but got Muon, which "
                'needs whole matrices. Set wrapper = "fully-sharded".'
            )
        if self.offloads and optimizer.name in ("zero-redundancy", "muon"):
            raise ValueError(
                f"offload_state must be off in {optimizer.title}, but got True. Remove it, or set "
                'optimizer = { name = "sharded", offload_state = true }.'
            )
        if self.offloads and self.zero_stage == 0:
            raise ValueError(
                "offload_state must come with optimizer state in shards, but got "
                f'{self.label()}. Set optimizer = {{ name = "sharded", offload_state = true }}.'
            )
        alone = wrapper.name == "fully-sharded" and not self.offloads
        if optimizer.get("update_in_backward") and not alone:
            raise ValueError(
                "update_in_backward must come with wrapper 'fully-sharded' and without "
                f"offload_state, but got {self.label()}. Remove it."
            )
        if shards and optimizer.name in ("sharded", "zero-redundancy"):
            raise ValueError(
                f"optimizer must be an unsharded one under {wrapper.title}, but got "
                f'{optimizer.label()}. Set optimizer = "adamw".'
            )
        replicas = wrapper.get("replicas", 1)
        if wrapper.name == "fully-sharded" and replicas < 1:
            raise ValueError(f"replicas must be at least 1, but got {replicas}. Raise it.")
        for name in ("nccl_max_ctas", "communication"):
            if replicas > 1 and wrapper.get(name) is not None:
                raise ValueError(
                    f"{name} must be left out where replicas is {replicas}, because a mesh makes "
                    f"its own groups, but got {wrapper.get(name)!r}. Remove it."
                )

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange gradients."""
        return self.wrapper.name != "none" or self.optimizer.get("reduce_gradients", False)

    @property
    def rounds(self) -> bool:
        """Whether gradients travel between ranks in 16 bits."""
        return self.wrapper.name == "bucketed" and self.wrapper.get("wire_dtype", "fp32") != "fp32"

    @property
    def offloads(self) -> bool:
        """Whether optimizer state rests in host memory."""
        return bool(self.optimizer.get("offload_state", False))

    @property
    def calls(self) -> tuple[Call, Call]:
        """The wrapper and the optimizer."""
        return self.wrapper, self.optimizer

    @property
    def float8_recipe(self) -> str | None:
        """torchao's name of how products are scaled; None if they are not in float8."""
        return {"float8": "tensorwise", "float8-rows": "rowwise"}.get(self.products)

    @property
    def steps_before_recording(self) -> int:
        """How many steps must be taken before one can be recorded."""
        known = WRAPPERS.get(self.wrapper.name)
        return 1 if known is None else known.steps_before_recording

    @property
    def zero_stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters."""
        if self.wrapper.name in ("fsdp2", "fully-sharded"):
            return 3
        if self.optimizer.name == "sharded":
            return 2 if self.optimizer.get("reduce_gradients") else 1
        return 1 if self.optimizer.name == "zero-redundancy" else 0

    def without_communication(self) -> Settings:
        """The same step with nothing exchanged: no wrapper, and all state on the device."""
        optimizer = self.optimizer.without("offload_state", "update_in_backward")
        if optimizer.name in ("sharded", "zero-redundancy"):
            kept = tuple(each for each in optimizer.arguments if each[0] in ("lr", "fused"))
            optimizer = Call("adamw", kept)
        return dataclasses.replace(self, wrapper=NO_WRAPPER, optimizer=optimizer)

    def table(self) -> Table:
        """As a table without defaults: what a case's configuration and a row keep."""
        table = {name: getattr(self, name) for name in SHARED}
        if self.products == "plain":  # as in rows from before there was a choice
            del table["products"]
        return {"wrapper": self.wrapper.table(), "optimizer": self.optimizer.table(), **table}

    def label(self, *, usual: Mapping[str, Any] = MappingProxyType({}), whole: bool = False) -> str:
        """The variant's name.

        Args:
            usual: values of :data:`SHARED`; the name gives others, and none that is not in it.
            whole: give packages and arguments that a name usually leaves out.
        """
        if not self.communicates:
            parts = ["no communication"]
        else:
            # Alone, an imported optimizer would be read again as a wrapper.
            alone = self.wrapper.name == "none" and not (whole and ":" in self.optimizer.name)
            parts = [] if alone else [self.wrapper.label(whole=whole)]
        optimizer = self.optimizer.label(whole=whole)
        if not (parts and self.optimizer.name == "adamw" and optimizer == self.optimizer.title):
            parts.append(optimizer)
        text = " + ".join(parts)
        for name in usual:
            value = getattr(self, name)
            if value != usual[name]:
                text += f", {name}={value}"
        return text


def read(variant: Mapping[str, Any] | str, defaults: Mapping[str, Any]) -> Settings:
    """A variant from a preset.

    Args:
        variant: a table, or text as in :mod:`bench_harness.convert`. Arguments of the
            wrapper may stand in the table itself.
        defaults: values of ``optimizer`` and of :data:`SHARED` that the variant does not give.

    Raises:
        ValueError: an unknown key or value, or settings that do not fit together; the message
            names the key, what is valid, and what to do.
    """
    table = _of_text(variant) if isinstance(variant, str) else _with_own_arguments(variant)
    known = ("wrapper", "optimizer", *SHARED)
    constructors.refuse_unknown(table, known, "variant")
    given = {**defaults, **table}
    values: dict[str, Any] = {
        "wrapper": _call("wrapper", given.get("wrapper", "none")),
        "optimizer": _call("optimizer", given.get("optimizer", "adamw")),
    }
    hints = typing.get_type_hints(Settings)
    for name in SHARED:
        if name in given:
            values[name] = converted(f"variant key {name}", given[name], hints[name])
    return Settings(**values)


def stored(table: Mapping[str, Any]) -> Settings:
    """The settings that :meth:`Settings.table` wrote, in a row or in a case's configuration.

    They are taken as they are: rows of earlier versions may hold arguments that constructors do
    not take any more.
    """
    calls: dict[str, Any] = {role: Call.of(table[role]) for role in ("wrapper", "optimizer")}
    return Settings(**calls, **{name: table[name] for name in SHARED if name in table})


def labels(variants: Sequence[Settings]) -> list[str]:
    """The variants' names within one case.

    Where they differ in what they share, a name gives what is not the default; of what the case's
    own label says, precision and compilation, it gives what most variants do not have. Names that
    would be the same, as of two learning rates, and those of classes of one name, as ``a:Foo`` and
    ``b:Foo``, are given whole.

    Raises:
        ValueError: two variants are the same.
    """
    usual: dict[str, Any] = {}
    for name in SHARED:
        counts = Counter(getattr(variant, name) for variant in variants)
        if len(counts) > 1:
            value, count = counts.most_common(1)[0]
            most = name in ("precision", "compile") and count > len(variants) / 2
            usual[name] = value if most else getattr(Settings, name)
    made = [variant.label(usual=usual) for variant in variants]
    if len(set(variants)) == len(variants):  # else the same variant is there twice
        twice = {name for name, count in Counter(made).items() if count > 1}
        calls = {each for variant in variants for each in variant.calls}
        titles = Counter(title for title, _ in {(each.title, each.name) for each in calls})
        unclear = {each for each in calls if titles[each.title] > 1}
        made = [
            variant.label(usual=usual, whole=True)
            if name in twice or unclear.intersection(variant.calls)
            else name
            for name, variant in zip(made, variants, strict=True)
        ]
    for name in made:
        if made.count(name) > 1:
            raise ValueError(
                f"variants must differ, but got {name!r} twice. Remove one of the two."
            )
    return made


def with_bounds(variants: Sequence[Settings]) -> list[Settings]:
    """The variants, and before them each distinct step without communication.

    It is the lower bound that exposed communication is measured against.
    """
    bounds = dict.fromkeys(variant.without_communication() for variant in variants)
    return [*bounds, *(variant for variant in variants if variant not in bounds)]


def _of_text(text: str) -> Table:
    """A variant as a table, from ``wrapper + optimizer, setting=value``."""
    calls, settings = parse_variant(text)
    table: Table = {}
    for call in calls:
        optimizer = short(call["name"], OPTIMIZERS) in OPTIMIZERS
        if ":" in call["name"] and not optimizer and "wrapper" in table:
            optimizer = short(call["name"], WRAPPERS) not in WRAPPERS
        role = "optimizer" if optimizer else "wrapper"
        if role in table:
            raise ValueError(
                f"variant must have one {role}, but got {table[role]['name']} and {call['name']}. "
                "Remove one."
            )
        table[role] = call
    return {**table, **settings}


def _with_own_arguments(variant: Mapping[str, Any]) -> Table:
    """A variant's table with the wrapper's arguments in the wrapper's own table."""
    table = dict(variant)
    given = table.get("wrapper", "none")
    wrapper = parse_call(given) if isinstance(given, str) else given
    if not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("name"), str):
        return table  # told by _call
    name = short(wrapper["name"], WRAPPERS)
    others = [key for key in table if key not in ("wrapper", "optimizer", *SHARED)]
    if name in WRAPPERS and others:
        others = [key for key in others if key in constructors.signatures()[name]]
    elif ":" not in name:
        others = []
    own = {key: table.pop(key) for key in others}
    return {**table, "wrapper": {**wrapper, **own}} if own else table


def _call(role: Literal["wrapper", "optimizer"], given: Any) -> Call:
    """A wrapper or an optimizer from its name, or from a table with its name and arguments."""
    known = WRAPPERS if role == "wrapper" else OPTIMIZERS
    table = parse_call(given) if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ValueError(
            f"{role} must be a name or a table with a name, but got {given!r}. Write "
            f'{role} = "{next(iter(known))}", or {role} = {{ name = … }}.'
        )
    return checked(role, table, known)
