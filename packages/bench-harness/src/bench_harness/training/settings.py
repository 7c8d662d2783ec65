"""The settings of a training step as data: wrapper, optimizer, precision, compilation, attention.

A variant of the experiment ``train-step`` is a table of a preset. It is read and checked here,
without importing torch, and its label is generated from its settings, so that a label cannot say
anything else than what was measured::

    { wrapper = "naive" }
    { wrapper = { name = "bucketed", bucket_size_mb = 100 }, optimizer = "zero-redundancy" }
    { optimizer = { name = "sharded", reduce_gradients = true, overlap = "next-forward" } }
    { wrapper = { name = "fsdp2", reshard_after_forward = true }, compile = "off" }

A wrapper or an optimizer is a name, or a table with ``name`` and arguments. The arguments have the
names and defaults of the class that they are passed to. As text, for the command line, a variant
is ``bucketed(bucket_size_mb=100) + zero-redundancy`` (:mod:`bench_harness.training.calls`).
``package.module:name`` in place of a name is any class that can be imported. Its arguments are
checked against its own signature before anything is measured (:mod:`bench_harness.user_code`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from bench_harness.convert import converted
from bench_harness.training.calls import parse_call, parse_variant, written

Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Compile: TypeAlias = Literal["off", "blocks", "model"]
Loss: TypeAlias = Literal["logits", "chunked"]
Elementwise: TypeAlias = Literal["torch", "liger"]
MissingGradients: TypeAlias = Literal["skip-if-all", "zeros", "error"]
#: "exact", "rounded" to 16 bits, or "compressed" with loss.
Wire: TypeAlias = Literal["exact", "rounded", "compressed"]
#: Parts of an exchange by copies between GPUs, in published rows.
PeerParts: TypeAlias = Literal["none", "barriers", "barriers+averaging", "barriers+copies"]
#: Other ways to carry out such an exchange, in published rows.
PeerWay: TypeAlias = Literal["torch-sums", "default-priority", "single-copies"]
Table: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a wrapper or an optimizer.

    Attributes:
        title: how a label names it.
        target: the class, as ``package.module:name``; "" for none.
        unlabelled: arguments that labels leave out unless they are 0, because they change no cost.
        steps_before_recording: how many steps must be taken before one can be recorded.
    """

    title: ClassVar[str]
    target: ClassVar[str] = ""
    unlabelled: ClassVar[tuple[str, ...]] = ()
    steps_before_recording: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """The title, and every argument that is not the default, except those left out.

        A learning rate of 0 is shown: weights and gradients then keep their values, on which the
        power that a GPU needs depends, and so its clock.
        """
        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            and (field.name not in self.unlabelled or value == 0)
        }
        return self.title + _in_brackets(given)

    @property
    def wire(self) -> Wire:
        """How gradients travel between ranks."""
        return "exact"

    @property
    def averages(self) -> bool:
        """Whether all ranks get the average of what they exchange."""
        return True


@dataclass(frozen=True, kw_only=True)
class Imported(Arguments):
    """Any class by ``package.module:name``, which is called with a module or with parameters.

    Attributes:
        name: of the class.
        arguments: names and values, as given.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The name without its package, and the arguments."""
        return self.name.rpartition(":")[2] + _in_brackets(dict(self.arguments))


@dataclass(frozen=True, kw_only=True)
class NoWrapper(Arguments):
    """No wrapper. Gradients stay on their rank unless the optimizer reduces them."""

    title: ClassVar[str] = "no wrapper"


@dataclass(frozen=True, kw_only=True)
class Naive(Arguments):
    """Arguments of :class:`ddp_lite.NaiveDDP`."""

    title: ClassVar[str] = "NaiveDDP"
    target: ClassVar[str] = "ddp_lite:NaiveDDP"
    missing_gradients: MissingGradients = "skip-if-all"


@dataclass(frozen=True, kw_only=True)
class Flat(Naive):
    """Arguments of :class:`ddp_lite.FlatDDP`."""

    title: ClassVar[str] = "FlatDDP"
    target: ClassVar[str] = "ddp_lite:FlatDDP"


@dataclass(frozen=True, kw_only=True)
class Overlap(Naive):
    """Arguments of :class:`ddp_lite.OverlapDDP`."""

    title: ClassVar[str] = "OverlapDDP"
    target: ClassVar[str] = "ddp_lite:OverlapDDP"


@dataclass(frozen=True, kw_only=True)
class Bucketed(Arguments):
    """Arguments of :class:`ddp_lite.BucketedDDP`.

    Attributes:
        bucket_size_mb: MB of 1024² bytes; "one" puts all gradients of a dtype into one bucket.
        last_bucket_size_mb: the same for the bucket that is reduced last; "same" keeps it as
            large as the others.
        copy: with "peer-copy", each bucket is packed into a flat tensor, whose copies are few.
        comm_hook: "peer-copy" is :class:`ddp_lite.peer.PeerCopyAverage`. "auto" is ddp-lite's own
            choice. "compress-bf16", "power-sgd", "reduce-scatter", and "peer-copy" with a
            wire_dtype, stand in rows of earlier versions; they cannot be measured any more.
            None is "collectives", those of the group.
        peer_parts, peer_way: stand in rows of earlier versions, which carried out parts of an
            exchange, or lacked an improvement; they cannot be measured any more.
        nccl_high_priority: NCCL's kernels run on a stream of high priority.
        nccl_max_ctas: at most so many thread blocks for a NCCL kernel.
    """

    title: ClassVar[str] = "BucketedDDP"
    target: ClassVar[str] = "ddp_lite:BucketedDDP"
    bucket_size_mb: float | Literal["auto", "one"] = "auto"
    last_bucket_size_mb: float | Literal["same"] = 25
    copy: bool = False
    wire_dtype: Dtype | None = None
    comm_hook: (
        Literal["auto", "peer-copy", "compress-bf16", "power-sgd", "reduce-scatter"] | None
    ) = None
    peer_parts: PeerParts | None = None
    peer_way: PeerWay | None = None
    missing_gradients: MissingGradients = "skip-if-all"
    nccl_high_priority: bool = False
    nccl_max_ctas: int | None = None

    @property
    def averages(self) -> bool:
        """Whether all ranks get the average, which nothing of an exchange left out gives."""
        return self.peer_parts is None

    @property
    def wire(self) -> Wire:
        """How gradients travel between ranks."""
        if self.comm_hook == "power-sgd":
            return "compressed"
        rounded = self.wire_dtype not in (None, "fp32") or self.comm_hook == "compress-bf16"
        return "rounded" if rounded else "exact"


@dataclass(frozen=True, kw_only=True)
class TorchDDP(Arguments):
    """Arguments of :class:`torch.nn.parallel.DistributedDataParallel`.

    It rebuilds its buckets after the first step, and times the first ten by events.
    """

    title: ClassVar[str] = "torch DDP"
    target: ClassVar[str] = "torch.nn.parallel:DistributedDataParallel"
    steps_before_recording: ClassVar[int] = 11
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(frozen=True, kw_only=True)
class FSDP2(Arguments):
    """Arguments of :func:`torch.distributed.fsdp.fully_shard`, applied to every block and the
    model.

    Attributes:
        param_dtype: dtype in which parameters are gathered and used; None keeps theirs.
        reduce_dtype: dtype in which gradients are reduced; None takes ``param_dtype``.
        prefetch: how many blocks are gathered ahead on request, in forward and in backward; 0
            leaves it to FSDP2, which gathers one ahead in backward.
    """

    title: ClassVar[str] = "FSDP2"
    target: ClassVar[str] = "torch.distributed.fsdp:fully_shard"
    reshard_after_forward: bool = True
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    prefetch: int = 0


@dataclass(frozen=True, kw_only=True)
class FullySharded(Arguments):
    """Arguments of :class:`shard_optim.FullyShardedDataParallel`.

    Attributes:
        replicas: how many groups of ranks hold all shards each; more than 1 makes a mesh of two
            levels, whose gradients are also averaged across the groups.
        nccl_max_ctas: at most so many thread blocks for a NCCL kernel, of a group of its own.
        communication: "peer-copy" is :class:`ddp_lite.peer.PeerCopies`.
    """

    title: ClassVar[str] = "FullyShardedDataParallel"
    target: ClassVar[str] = "shard_optim:FullyShardedDataParallel"
    reshard_after_forward: bool = True
    compute_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    prefetch: int = 1
    replicas: int = 1
    nccl_max_ctas: int | None = None
    communication: Literal["peer-copy"] | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, but got {self.replicas}. Raise it.")
        if self.replicas > 1 and self.nccl_max_ctas is not None:
            raise ValueError(
                f"nccl_max_ctas must be left out where replicas is {self.replicas}, because a mesh "
                f"makes its own groups, but got {self.nccl_max_ctas}. Remove it."
            )
        if self.replicas > 1 and self.communication is not None:
            raise ValueError(
                f"communication must be left out where replicas is {self.replicas}, because it is "
                f"for all GPUs of a host, but got {self.communication!r}. Remove it."
            )


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer(Arguments):
    """What every optimizer takes.

    Attributes:
        lr: learning rate.
        fused: one kernel for all parameters; None means on CUDA only.
        offload_state: the state rests in host memory, by :class:`shard_optim.OffloadedOptimizer`.
    """

    unlabelled: ClassVar[tuple[str, ...]] = ("lr",)
    lr: float = 1e-4
    fused: bool | None = None
    offload_state: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamW(TorchOptimizer):
    """Arguments of :class:`torch.optim.AdamW`."""

    title: ClassVar[str] = "AdamW"
    target: ClassVar[str] = "torch.optim:AdamW"


@dataclass(frozen=True, kw_only=True)
class SGD(TorchOptimizer):
    """Arguments of :class:`torch.optim.SGD`."""

    title: ClassVar[str] = "SGD"
    target: ClassVar[str] = "torch.optim:SGD"
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Muon(TorchOptimizer):
    """:class:`torch.optim.Muon` for the matrices of the blocks, AdamW for everything else.

    Under ``fully-sharded``, :class:`shard_optim.WholeMatrixOptimizer` updates each matrix whole.
    """

    title: ClassVar[str] = "Muon"
    target: ClassVar[str] = "torch.optim:Muon"


@dataclass(frozen=True, kw_only=True)
class BasicsAdamW(Arguments):
    """Arguments of :class:`basics_model.AdamW`."""

    title: ClassVar[str] = "basics_model.AdamW"
    target: ClassVar[str] = "basics_model:AdamW"
    unlabelled: ClassVar[tuple[str, ...]] = ("lr",)
    lr: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class ZeroRedundancy(TorchOptimizer):
    """AdamW in :class:`torch.distributed.optim.ZeroRedundancyOptimizer`."""

    title: ClassVar[str] = "ZeroRedundancyOptimizer"
    target: ClassVar[str] = "torch.distributed.optim:ZeroRedundancyOptimizer"


@dataclass(frozen=True, kw_only=True)
class Sharded(TorchOptimizer):
    """AdamW in :class:`shard_optim.ShardedOptimizer`, with its arguments.

    Attributes:
        communication: "peer-copy" is :class:`ddp_lite.peer.PeerCopies`.
    """

    title: ClassVar[str] = "ShardedOptimizer"
    target: ClassVar[str] = "shard_optim:ShardedOptimizer"
    partition: Literal["flat", "whole"] = "flat"
    bucket_size_mb: float | None = None
    master_dtype: Dtype | None = None
    reduce_gradients: bool = False
    overlap: Literal["next-forward"] | None = None
    communication: Literal["peer-copy"] | None = None


WRAPPERS: dict[str, type[Arguments]] = {
    "none": NoWrapper,
    "naive": Naive,
    "flat": Flat,
    "overlap": Overlap,
    "bucketed": Bucketed,
    "torch-ddp": TorchDDP,
    "fsdp2": FSDP2,
    "fully-sharded": FullySharded,
}
OPTIMIZERS: dict[str, type[Arguments]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "muon": Muon,
    "adamw-basics": BasicsAdamW,
    "zero-redundancy": ZeroRedundancy,
    "sharded": Sharded,
}
#: Settings besides wrapper and optimizer that a variant may override.
SHARED = (
    *("precision", "compile", "attention", "checkpoint_blocks", "keep_attention", "loss"),
    *("elementwise", "cuda_graph"),
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
        elementwise: norms, rotary positions and SwiGLU by torch, or by the kernels of the package
            liger-kernel (:mod:`bench_harness.training.elementwise`); not beside ``compile``.
        cuda_graph: the whole step is recorded once, and replayed by one launch.

    Attention, ``checkpoint_blocks``, ``keep_attention``, ``loss`` and ``elementwise`` are those of
    the language model; another model has its own.
    """

    wrapper: Arguments = dataclasses.field(default_factory=NoWrapper)
    optimizer: Arguments = dataclasses.field(default_factory=AdamW)
    precision: Precision = "fp32"
    compile: Compile = "off"
    attention: str = "sdpa"
    checkpoint_blocks: int = 0
    keep_attention: bool = False
    loss: Loss = "logits"
    elementwise: Elementwise = "torch"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        wrapper, optimizer = self.wrapper, self.optimizer
        reduces = isinstance(optimizer, Sharded) and optimizer.reduce_gradients
        if reduces and not isinstance(wrapper, NoWrapper):
            raise ValueError(
                f"wrapper must be 'none' where the optimizer has reduce_gradients, but got "
                f"{wrapper.label}. Leave the wrapper out."
            )
        recordable = isinstance(wrapper, (NoWrapper, TorchDDP, FullySharded))
        recordable &= isinstance(optimizer, AdamW) and not self.offloads
        if self.cuda_graph and not recordable:
            raise ValueError(
                "cuda_graph must be off unless the whole step runs on the device: wrapper 'none', "
                "'torch-ddp' or 'fully-sharded', optimizer 'adamw', no offload_state; but got "
                f"{self.label()}. Remove it."
            )
        if self.elementwise == "liger" and self.compile != "off":
            raise ValueError(
                "elementwise must be torch in compiled layers, where gradients through liger's "
                "kernels come out wrong (torch 2.11, liger-kernel 0.8.5), but got liger beside "
                f"compile={self.compile}. Remove one of them."
            )
        if self.keep_attention and self.checkpoint_blocks != 1:
            raise ValueError(
                f"checkpoint_blocks must be 1 beside keep_attention, but got "
                f"{self.checkpoint_blocks}. Set checkpoint_blocks = 1."
            )
        if isinstance(optimizer, Sharded) and optimizer.overlap and not reduces:
            raise ValueError(
                f"overlap must come with reduce_gradients, but got {optimizer.label}. Add "
                "reduce_gradients = true."
            )
        if self.offloads and isinstance(wrapper, FSDP2):
            raise ValueError(
                f"offload_state must be off under {wrapper.title}, whose shards are no plain "
                f"tensors, but got {optimizer.label}. Remove it."
            )
        if isinstance(optimizer, Muon) and isinstance(wrapper, FSDP2):
            raise ValueError(
                f"optimizer must treat elements alike under {wrapper.title}, but got Muon, which "
                'needs whole matrices. Set wrapper = "fully-sharded".'
            )
        if self.offloads and isinstance(optimizer, (ZeroRedundancy, Muon)):
            raise ValueError(
                f"offload_state must be off in {optimizer.title}, but got True. Remove it, or set "
                'optimizer = { name = "sharded", offload_state = true }.'
            )
        if isinstance(wrapper, (FSDP2, FullySharded)) and isinstance(
            optimizer, (Sharded, ZeroRedundancy)
        ):
            raise ValueError(
                f"optimizer must be an unsharded one under {wrapper.title}, but got "
                f'{optimizer.label}. Set optimizer = "adamw".'
            )

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange gradients."""
        reduces = isinstance(self.optimizer, Sharded) and self.optimizer.reduce_gradients
        return reduces or not isinstance(self.wrapper, NoWrapper)

    @property
    def averages(self) -> bool:
        """Whether all ranks get averaged gradients, so that the step can be proven."""
        return self.communicates and self.wrapper.averages

    @property
    def offloads(self) -> bool:
        """Whether optimizer state rests in host memory."""
        return isinstance(self.optimizer, TorchOptimizer) and self.optimizer.offload_state

    @property
    def zero_stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters."""
        if isinstance(self.wrapper, (FSDP2, FullySharded)):
            return 3
        if isinstance(self.optimizer, Sharded):
            return 2 if self.optimizer.reduce_gradients else 1
        return 1 if isinstance(self.optimizer, ZeroRedundancy) else 0

    def without_communication(self) -> Settings:
        """The same step with nothing exchanged: no wrapper, and all state on the device."""
        optimizer = self.optimizer
        if isinstance(optimizer, (Sharded, ZeroRedundancy)):
            optimizer = AdamW(lr=optimizer.lr, fused=optimizer.fused)
        if isinstance(optimizer, TorchOptimizer):
            optimizer = dataclasses.replace(optimizer, offload_state=False)
        return dataclasses.replace(self, wrapper=NoWrapper(), optimizer=optimizer)

    def table(self) -> Table:
        """As a table without defaults: what a case's configuration and a row keep."""
        return {
            "wrapper": _table(self.wrapper, WRAPPERS),
            "optimizer": _table(self.optimizer, OPTIMIZERS),
            **{name: getattr(self, name) for name in SHARED},
        }

    def label(self, *, usual: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The variant's name.

        Args:
            usual: values of :data:`SHARED`; the name gives others, and none that is not in it.
        """
        if not self.communicates:
            parts = ["no communication"]
            plain = isinstance(self.optimizer, AdamW)
        else:
            parts = [] if isinstance(self.wrapper, NoWrapper) else [self.wrapper.label]
            plain = isinstance(self.optimizer, AdamW) and bool(parts)
        if not (plain and self.optimizer.label == AdamW.title):
            parts.append(self.optimizer.label)
        text = " + ".join(parts)
        for name in usual:
            value = getattr(self, name)
            if value != usual[name]:
                text += f", {name}={value}"
        return text


def read(variant: Mapping[str, Any] | str, defaults: Mapping[str, Any]) -> Settings:
    """A variant from a preset.

    Args:
        variant: a table, or text as in :mod:`bench_harness.training.calls`. Arguments of the
            wrapper may stand in the table itself.
        defaults: values of ``optimizer`` and of :data:`SHARED` that the variant does not give.

    Raises:
        ValueError: an unknown key or value, or settings that do not fit together; the message
            names the key, what is valid, and what to do.
    """
    table = _of_text(variant) if isinstance(variant, str) else _with_own_arguments(variant)
    known = ("wrapper", "optimizer", *SHARED)
    _check_keys(table, known, "variant")
    given = {**defaults, **table}
    checked: dict[str, Any] = {
        "wrapper": _arguments("wrapper", given.get("wrapper", "none"), WRAPPERS),
        "optimizer": _arguments("optimizer", given.get("optimizer", "adamw"), OPTIMIZERS),
    }
    hints = typing.get_type_hints(Settings)
    for name in SHARED:
        if name in given:
            checked[name] = converted(f"variant key {name}", given[name], hints[name])
    return Settings(**checked)


def labels(variants: Sequence[Settings]) -> list[str]:
    """The variants' names within one case.

    Where they differ in what they share, a name gives what is not the default; of what the case's
    own label says, precision and compilation, it gives what most variants do not have.

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
    """A variant as a table, from ``wrapper + optimizer, setting=value``.

    Raises:
        ValueError: the text has another form, or names two wrappers or two optimizers.
    """
    calls, settings = parse_variant(text)
    table: Table = {}
    for call in calls:
        optimizer = _short(call["name"], OPTIMIZERS) in OPTIMIZERS
        if ":" in call["name"] and not optimizer and "wrapper" in table:
            optimizer = _short(call["name"], WRAPPERS) not in WRAPPERS
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
        return table  # told by _arguments
    cls = WRAPPERS.get(_short(wrapper["name"], WRAPPERS), Imported)
    takes = {field.name for field in dataclasses.fields(cls)}
    own = {
        key: value
        for key, value in table.items()
        if key not in ("wrapper", "optimizer", *SHARED) and (cls is Imported or key in takes)
    }
    if not own or (":" not in wrapper["name"] and cls is Imported):
        return table
    rest = {key: value for key, value in table.items() if key not in own}
    return {**rest, "wrapper": {**wrapper, **own}}


def _short(name: str, known: Mapping[str, type[Arguments]]) -> str:
    """The short name of a class that is named by its title or its target."""
    named = {word: short for short, cls in known.items() for word in (cls.title, cls.target)}
    return named.get(name, name)


def _arguments(what: str, given: Any, known: Mapping[str, type[Arguments]]) -> Arguments:
    """A wrapper or an optimizer from its name, or from a table with its name and arguments."""
    table = parse_call(given) if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ValueError(
            f"{what} must be a name or a table with a name, but got {given!r}. Write "
            f'{what} = "{next(iter(known))}", or {what} = {{ name = … }}.'
        )
    name = _short(table["name"], known)
    if name not in known and ":" in name:
        own = tuple((key, value) for key, value in table.items() if key != "name")
        return Imported(name=name, arguments=own)
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(known)}, but got {name!r}. Correct the name."
        )
    cls = known[name]
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    _check_keys({key: value for key, value in table.items() if key != "name"}, fields, name)
    values = {
        key: converted(f"{name} key {key}", value, hints[key])
        for key, value in table.items()
        if key != "name"
    }
    return cls(**values)


def _check_keys(table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in table:
        if key not in known:
            valid = ", ".join(known) if known else "none: it takes no arguments"
            raise ValueError(
                f"{what} key must be one of {valid}, but got {key!r}. Remove or correct it."
            )


def _table(arguments: Arguments, known: Mapping[str, type[Arguments]]) -> Table:
    if isinstance(arguments, Imported):
        return {"name": arguments.name, **dict(arguments.arguments)}
    (name,) = (name for name, cls in known.items() if cls is type(arguments))
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if getattr(arguments, field.name) != field.default
    }
    return {"name": name, **given}


def _in_brackets(arguments: Mapping[str, Any]) -> str:
    given = [
        name if value is True else f"{name}={written(value)}" for name, value in arguments.items()
    ]
    return f"({', '.join(given)})" if given else ""
