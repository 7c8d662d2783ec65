"""An experiment: its options, its cases, how one case runs, and what is shown of the rows.

Options that several experiments have are here too: a device, the dimensions of the language model,
a user's module.

An experiment's module must import without torch, pandas or matplotlib: the command line imports
every experiment to list it. Import them inside ``run``, ``tables`` and ``figures``.

Another package adds an experiment by an entry point in the group ``bench_harness.experiments``
whose name is the experiment's and whose value is its class, ``package.module:Class``.
"""

from __future__ import annotations

import abc
import dataclasses
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import core
from bench_harness.core import Case, Config, Figure, Progress, Row, Table, option, plural
from bench_harness.environment import gpu_count, resolve_device
from bench_harness.traces import nsight
from bench_harness.workload import DIMENSIONS, language_model_config, too_large

if TYPE_CHECKING:
    import pandas as pd

#: Options of which nothing, or less, is no measurement.
_COUNTS = (
    "batch batches sequences heads head_dims rounds blocks calls samples sizes_mb world_sizes "
    "kv_heads value_head_dim vocab_size d_model d_ff num_layers num_heads"
)
#: Options that may be 0.
_SPANS = "warmup warmups interval max_seconds"


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of every experiment that runs on a device."""

    device: str = option(
        "auto",
        "Where to run; ranks talk over gloo on cpu and over NCCL on cuda.",
        choices=("auto", "cpu", "cuda"),
    )

    def __post_init__(self) -> None:
        for least, names in (("positive", _COUNTS), ("0 or more", _SPANS)):
            for name in names.split():
                held = getattr(self, name, ())
                given = held if isinstance(held, tuple) else (held,)
                smallest = min((each for each in given if each is not None), default=1)
                if smallest < 0 or (smallest == 0 and names is _COUNTS):
                    raise ValueError(f"{name} must be {least}, but got {held}. Raise it.")
        for each in dataclasses.fields(self):
            if each.default and getattr(self, each.name) == ():
                raise ValueError(f"{each.name} must hold a value, but got none. Name one.")

    def stored(self, names: str) -> Row:
        """Options, by names with spaces between, as a case keeps them, and the device there is."""
        given = {name: getattr(self, name) for name in names.split()}
        listed = {n: list(v) if isinstance(v, tuple) else v for n, v in given.items()}
        return {**listed, "device": resolve_device(self.device)}


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(DeviceOptions):
    """Options that say what is trained: a user's model, or the dimensions of the language model.

    Dimensions that are not given come from the model's size.
    """

    d_model: int | None = option(None, "Width; overrides the size's.")
    d_ff: int | None = option(None, "Feed-forward width; overrides the size's.")
    num_layers: int | None = option(None, "Number of blocks; overrides the size's.")
    num_heads: int | None = option(None, "Attention heads; overrides the size's.")
    model: str | None = option(None, "package.module:factory of an nn.Module to measure instead.")
    model_args: dict[str, Any] | None = option(  # noqa: RUF009 - its default is None
        None, "The factory's keyword arguments, as layers=2,width=64."
    )
    input: str | None = option(
        None, "Its input, as input_ids=int64[4x128]<1000; {a=…,b=…} is a dictionary."
    )
    target: str | None = option(None, "What the loss takes beside the output, as int64[4]<10.")
    loss: str | None = option(
        None, "package.module:function of output and target; else the output's own loss, or mean."
    )
    vocab_size: int = option(10_000, "Vocabulary.")

    def __post_init__(self) -> None:
        DeviceOptions.__post_init__(self)
        if (self.model is None) != (self.input is None):
            raise ValueError(
                f"model and input must be given together, but got model={self.model!r} and "
                f"input={self.input!r}. Give both or neither."
            )
        missing = [name for name in DIMENSIONS if getattr(self, name) is None]
        if self.model is None and missing and "custom" in getattr(self, "sizes", ()):
            raise ValueError(
                f"size 'custom' must come with {', '.join(DIMENSIONS)}, but got none for "
                f"{', '.join(missing)}. Give them."
            )
        if self.model is None:
            for subject in self.subjects(getattr(self, "sizes", ()), (1,), (1,)):
                language_model_config(subject)  # refuses dimensions that do not fit together
        for name in ("model_args", "target"):
            if self.model is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must come with model, but got {getattr(self, name)!r}. Give --model "
                    "and --input."
                )
        if self.target is not None and self.own_loss is None:
            raise ValueError(
                f"target must come with loss, but got {self.target!r}. Give --loss, as "
                "torch.nn.functional:cross_entropy."
            )

    @property
    def own_loss(self) -> str | None:
        """The user's loss function; None where the model's output decides."""
        return self.loss if self.loss is not None and ":" in self.loss else None

    def subjects(
        self, sizes: Sequence[str], batches: Sequence[int], sequences: Sequence[int]
    ) -> list[Row]:
        """What is measured, as cases' configurations keep it: a user's model, or every size."""
        if self.model is not None:
            own = {"model_args": self.model_args, "target": self.target, "loss": self.own_loss}
            given = {name: value for name, value in own.items() if value is not None}
            return [{"model": self.model, "input": self.input, **given}]
        names = (*DIMENSIONS, "vocab_size")
        shape = {name: value for name in names if (value := getattr(self, name)) is not None}
        return [
            {"size": size, **shape, "batch": batch, "sequence": sequence}
            for size in sizes
            for batch in batches
            for sequence in sequences
        ]


def subject_label(subject: Config, *, batch: bool = True) -> str:
    """A subject's part of a case's label."""
    if "model" in subject:
        arguments = subject.get("model_args") or {}
        given = [subject["model"], *(f"{key}={value}" for key, value in arguments.items())]
        return " ".join([*given, str(subject["input"])])
    size = f"{subject['size']} b{subject['batch']}" if batch else str(subject["size"])
    return f"{size} s{subject['sequence']}"


class Experiment(abc.ABC):
    """One experiment: a name on the command line and a section of the report.

    Subclasses set three class attributes and implement :meth:`cases`, :meth:`run`, :meth:`tables`.

    Attributes:
        name: the registered name, which is also the command.
        summary: one line for ``--help`` and the report.
        guide: what is measured and how to read it, in a few sentences, for ``--help``.
        examples: command lines that ``--help`` shows, from the experiment's name on.
        Options: a frozen keyword-only dataclass whose fields, declared with :func:`option`, are
            the options of the command and the keys of a preset's table. Field types: what msgspec
            converts, as ``bool``, ``int``, ``str | None`` or ``tuple[float, ...]`` (written with
            commas on the command line, as a list in a preset), and ``dict`` for tables of a
            preset, in a union with ``str`` if the command line may give one by name. Its
            ``__post_init__`` may raise ``ValueError`` for values that do not fit together.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    guide: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Any]]

    @abc.abstractmethod
    def cases(self, **options: Any) -> list[Case]:
        """The cases that these options ask for; ``options`` are the fields of ``Options``.

        Pure and cheap: no torch, no device. Variants that are compared belong in one case.
        """

    @abc.abstractmethod
    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Measures one case, in a process of its own, and returns one row per variant.

        A row holds the measurement (``variant``, ``samples_ms``, ...); the runner adds what
        identifies it. ``progress`` shows one line of text while the case runs.

        Raises:
            CaseSkipped: the case cannot run on this machine.
            torch.OutOfMemoryError: recorded as status "oom", a result of its own.
        """

    def missing(self, case: Case) -> str | None:
        """What this machine lacks for a case, looked up without torch; None if nothing is known.

        Such a case is skipped. By default: GPUs, memory, and Nsight Systems.
        """
        config = case.config
        if (why := too_large(config)) is not None:
            return why
        if config.get("device") == "cuda":
            wanted = 1 if config.get("alone") else config.get("world_size", 1)
            if gpu_count() < wanted:
                return (
                    f"this machine must have {plural(wanted, 'CUDA device')}, but got "
                    f"{gpu_count()}. Ask for fewer ranks, or use --device cpu."
                )
        if config.get("nsight") or config.get("tool") == "nsight":
            try:
                nsight.nsys()
            except nsight.NsightMissingError as error:
                return str(error)
        return None

    def work_s(self, case: Case) -> float | None:
        """About how many seconds a case takes, sampling beyond the least left out; None: unknown.

        Rough sums for a dry run, of a machine that nothing else uses: of published rows on H200s,
        and of small cases on two CPU cores.
        """
        return None

    @abc.abstractmethod
    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The tables of this experiment's rows.

        ``rows`` has one line per row of every status, measurement and configuration flattened
        into columns. Columns may be missing or empty when no case of a kind succeeded.
        """

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """The pictures of this experiment's rows, none by default; see :meth:`tables`."""
        return []


ENTRY_POINT_GROUP = "bench_harness.experiments"

# In the order in which they run and are reported.
_BUILT_IN = {
    "accounting": "bench_harness.experiments.accounting:Accounting",
    "model": "bench_harness.experiments.model:Model",
    "memory": "bench_harness.experiments.memory:Memory",
    "attention": "bench_harness.experiments.attention:Attention",
    "allreduce": "bench_harness.experiments.allreduce:AllReduce",
    "train-step": "bench_harness.experiments.train_step:TrainStep",
    "profile": "bench_harness.experiments.profile:Profile",
}


def names() -> list[str]:
    """Every experiment's name, built-in ones first, in running order."""
    return list(_BUILT_IN | core.registered(ENTRY_POINT_GROUP))


def get(name: str) -> Experiment:
    """The experiment registered under ``name``.

    Raises:
        ValueError: no experiment has that name, and the message lists those that exist; or it
            cannot be imported.
    """
    targets = _BUILT_IN | core.registered(ENTRY_POINT_GROUP)
    if name not in targets:
        raise ValueError(f"experiment must be one of {', '.join(targets)}, but got {name!r}")
    try:
        experiment: Experiment = pkgutil.resolve_name(targets[name])()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"experiment {name} must be importable as {targets[name]}, but got an error: {error}. "
            "Reinstall the package that registers it."
        ) from error
    return experiment
