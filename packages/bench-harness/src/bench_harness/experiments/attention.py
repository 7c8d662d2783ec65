"""Attention alone: implementations on a grid of problems, in time, memory and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import attentions
from bench_harness.core import Case, Figure, Row, Table, option
from bench_harness.environment import resolve_device
from bench_harness.experiments.attention_problem import DTYPES, FEATURES, Problem
from bench_harness.experiments.attention_timing import (
    CLOCKS,
    PASSES,
    Attempts,
    time_in_turns,
    timer_overhead_ms,
)
from bench_harness.experiments.base import Experiment
from bench_harness.sampling import SamplingOptions

if TYPE_CHECKING:
    import pandas as pd
    import torch

_MASKS = ("causal", "full")


@dataclass(frozen=True, kw_only=True)
class Options(SamplingOptions):
    """Options of :class:`Attention`.

    Small enough for a quick run on two cores: ``sequences=[128, 256]``, ``head_dims=[64]``,
    ``variants=["flashattn-triton", "naive", "sdpa-flash"]``, ``rep_ms=100``.
    """

    variants: tuple[str, ...] = option(
        ("flashattn-triton", "naive", "naive-compiled", "sdpa-flash", "sdpa-cudnn", "flex"),
        "Implementations, compared: built-in or registered names, or package.module:callable; the "
        "first one is the reference of speedups.",
    )
    dtypes: tuple[str, ...] = option(("bf16",), "Element types.", choices=tuple(DTYPES))
    head_dims: tuple[int, ...] = option((64, 128), "Head dimensions of query and key.")
    value_head_dim: int | None = option(None, "Head dimension of the value; none: the same.")
    batch: int = option(1, "Sequences per batch.")
    tokens: int | None = option(
        None, "Tokens in all, instead of a batch: the batch is this divided by the length."
    )
    heads: int = option(1, "Query heads.")
    kv_heads: int | None = option(None, "Key and value heads; none: as many as query heads.")
    sequences: tuple[int, ...] = option((512, 1024, 2048, 4096, 8192, 16384), "Sequence lengths.")
    packed: tuple[int, ...] = option(
        (), "Lengths of sequences packed into one batch without padding; instead of sequences."
    )
    masks: tuple[str, ...] = option(("causal",), "Masks.", choices=_MASKS)
    window: tuple[int, ...] = option(
        (), "Visible keys left and right of the diagonal; -1 is no limit."
    )
    softcap: float | None = option(None, "Soft-cap of the scores.")
    features: tuple[str, ...] = option(
        ("plain",),
        "What a call adds, one at a time, compared: sinks, ALiBi slopes, a learned bias, a prefix "
        "that all queries see, documents that share rows, deterministic gradients.",
        choices=FEATURES,
    )
    deterministic: bool = option(False, "Ask for gradients that are the same from run to run.")
    passes: tuple[str, ...] = option(
        ("forward", "backward", "forward+backward"),
        "What is timed; training forward keeps what backward needs, and with sum, backward starts "
        "at the sum of the output.",
        choices=PASSES,
    )
    clock: str = option(
        "device",
        "do_bench on a GPU (device), the clock around a synchronised call (wall), or the time "
        "until a call returns (host).",
        choices=CLOCKS,
    )
    rep_ms: float = option(300.0, "Milliseconds of measurement per variant and pass.")
    warmup_ms: float = option(100.0, "Milliseconds of warm-up per variant and pass.")
    rounds: int = option(3, "Turns that share those milliseconds, so that drift meets everyone.")
    samples: int = option(10, "Least samples per variant and pass, however long they take.")
    isolate_gib: float = option(
        1.0,
        "Where fp32 scores would be larger (GiB), variants that store them get cases of their own, "
        "so that one without enough memory takes no other along.",
    )
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for name in self.variants:
            attentions.check(name)
        for name in ("rounds", "samples", "heads", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, but got {getattr(self, name)}. Raise it."
                )
        if not self.variants:
            raise ValueError("variants must name an implementation, but got none. Name one.")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"kv_heads must divide heads, but got {self.kv_heads} of {self.heads}. Correct it."
            )
        of_packed = {"plain", "deterministic"}
        if not self.features or (self.packed and not of_packed.issuperset(self.features)):
            raise ValueError(
                f"features must name at least one, and of packed sequences only plain and "
                f"deterministic, but got {', '.join(self.features) or 'none'}. Write features "
                f"plain."
            )
        if len(self.window) not in (0, 2) or any(side < -1 for side in self.window):
            raise ValueError(
                f"window must be two numbers of keys (-1: no limit), but got {self.window}. Write "
                "left and right."
            )


class Attention(Experiment):
    """Implementations of attention on a grid of problems."""

    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "Attention kernels: time, throughput, memory kept for backward, errors"
    guide: ClassVar[str] = (
        "Compares implementations of attention: each is first compared with an fp32 reference on "
        "the problem that is timed, then its passes are timed in turns with the others. One that "
        "is not installed or does not take a problem is skipped, and the others go on. Memory that "
        "forward keeps for backward is measured for all, and predicted for naive attention."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "attention --sequences 4096,16384 --heads 16 --head-dims 64",
        "attention --variants flashattn-triton,my.kernels:attend",
        "attention --packed 1024,512,2048 --variants flashattn-triton",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per dtype, head dimension and mask; lengths with large scores have their own.

        There the variants that store the scores are apart, each beside the first variant.
        """
        chosen = Options(**options)
        config: Row = {
            "batch": chosen.batch,
            "tokens": chosen.tokens,
            "heads": chosen.heads,
            "kv_heads": chosen.kv_heads or chosen.heads,
            "value_head_dim": chosen.value_head_dim,
            "packed": list(chosen.packed),
            "window": [None if side < 0 else side for side in chosen.window] or None,
            "softcap": chosen.softcap,
            "features": list(dict.fromkeys(chosen.features)),
            "deterministic": chosen.deterministic,
            "passes": list(chosen.passes),
            "clock": chosen.clock,
            "rep_ms": chosen.rep_ms,
            "warmup_ms": chosen.warmup_ms,
            "rounds": chosen.rounds,
            "samples": chosen.samples,
            **chosen.sampling(),
            "device": resolve_device(chosen.device),
        }
        return [
            _case(
                {
                    **config,
                    "dtype": dtype,
                    "head_dim": head_dim,
                    "mask": mask,
                    "sequences": list(sequences),
                    "variants": variants,
                }
            )
            for dtype in chosen.dtypes
            for head_dim in chosen.head_dims
            for mask in chosen.masks
            for sequences, variants in _groups(chosen)
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Compares every variant with the reference on each problem, then times its passes."""
        import torch._dynamo.config
        import torch._functorch.config

        from bench_harness.roofline import ceilings
        from bench_harness.workload import device_of

        device = device_of(case.config["device"])
        about: Row = {
            "timer_overhead_ms": timer_overhead_ms(case.config["clock"], device),
            **ceilings(device, getattr(torch, DTYPES[case.config["dtype"]])),
        }
        rows: list[Row] = []
        # Backward alone is timed over one graph, again and again: a compiled function must not
        # reuse the memory of what it saved.
        patched = torch._functorch.config.patch(donated_buffer=False)
        # Features in turns need more compiled versions of one function at a time than the default.
        with patched, torch._dynamo.config.patch(recompile_limit=8 * len(FEATURES)):
            for group in problems(case.config):
                # Meeting a second length, the compiler would give up static shapes.
                torch.compiler.reset()
                rows += [{**about, **row} for row in measured(group, case.config, device, progress)]
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The grid with all statistics, medians, the cost of features, cells without memory."""
        from bench_harness.experiments import attention_tables

        return attention_tables.tables(rows)

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Time, throughput and held memory over the length; errors."""
        from bench_harness.experiments import attention_tables

        return attention_tables.figures(rows)


def _groups(chosen: Options) -> list[tuple[tuple[int, ...], list[str]]]:
    """Lengths and variants that share a case."""
    variants = list(dict.fromkeys(chosen.variants))
    if chosen.packed:
        return [((), variants)]
    reference, *others = variants
    linear = [v for v in variants if not attentions.stores_scores(v)]
    apart = [[reference, v] for v in others if attentions.stores_scores(v)]
    if linear and (linear != [reference] or not apart):  # else the reference has its turn
        apart.insert(0, linear)
    apart = apart or [variants]

    def is_large(sequence: int) -> bool:
        batch = _batch(chosen.batch, chosen.tokens, sequence)
        return 4 * batch * chosen.heads * sequence**2 > chosen.isolate_gib * 2**30

    split = len(linear) < len(variants)
    together = tuple(s for s in chosen.sequences if not split or not is_large(s))
    large = [s for s in chosen.sequences if s not in together]
    groups = [(together, variants)] if together else []
    return [*groups, *(((s,), group) for s in large for group in apart)]


def _batch(batch: int, tokens: int | None, sequence: int) -> int:
    return batch if tokens is None else max(1, tokens // sequence)


def problems(config: Mapping[str, Any]) -> list[list[Problem]]:
    """The problems of a case: a list for each length, of one for each feature."""
    lengths = tuple(config["packed"])
    return [
        [
            Problem(
                batch=1 if lengths else _batch(config["batch"], config["tokens"], sequence),
                heads=config["heads"],
                kv_heads=config["kv_heads"],
                sequence=sequence,
                head_dim=config["head_dim"],
                value_head_dim=config["value_head_dim"] or config["head_dim"],
                dtype=config["dtype"],
                causal=config["mask"] == "causal",
                window=tuple(config["window"]) if config["window"] else None,
                softcap=config["softcap"],
                deterministic=config["deterministic"] or feature == "deterministic",
                lengths=lengths,
                feature=feature,
            )
            for feature in config["features"]
        ]
        for sequence in ([sum(lengths)] if lengths else config["sequences"])
    ]


def _case(config: Row) -> Case:
    return Case(
        experiment=Attention.name, config={**config, "label": label(config)}, timeout_s=1800
    )


def label(config: Mapping[str, Any]) -> str:
    """A case's name: its problem, and the variants."""
    sequences, packed = config["sequences"], config["packed"]
    heads, kv_heads = config["heads"], config["kv_heads"]
    if packed:
        size = f"packed {len(packed)} × s{min(packed)}–{max(packed)}"
    else:
        first = f"b{config['batch']}" if config["tokens"] is None else f"t{config['tokens']}"
        size = f"{first} s{sequences[0]}" + f"–{sequences[-1]}" * (len(sequences) > 1)
    dims = f"d{config['head_dim']}" + f"/{config['value_head_dim']}" * bool(
        config["value_head_dim"]
    )
    parts = [
        *("attention", size, f"h{heads}" + f"/{kv_heads}" * (kv_heads != heads), dims),
        *(config["dtype"], config["mask"]),
        f"window {config['window']}" if config["window"] else "",
        f"softcap {config['softcap']:g}" if config["softcap"] else "",
        "+".join(config["features"]) if config["features"] != ["plain"] else "",
        "deterministic" * config["deterministic"],
        f"{config['clock']} clock" if config["clock"] != "device" else "",
        "+".join(config["variants"]),
    ]
    return " ".join(filter(None, parts))


def measured(
    group: Sequence[Problem],
    config: Mapping[str, Any],
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Row]:
    """Measures problems in turns: a row per variant and pass, and one per excluded variant."""
    import torch

    everyone = [Attempts(config["variants"], problem, device) for problem in group]
    for attempts in everyone:
        progress(f"{attempts.problem.name}: comparing with the reference")
        attempts.prove()
    timed = time_in_turns(everyone, config, progress)
    clock = "do_bench" if config["clock"] == "device" and device.type == "cuda" else config["clock"]
    rows: list[Row] = []
    for attempts, measured in zip(everyone, timed, strict=True):
        problem = attempts.problem
        about: Row = {
            "batch": problem.batch,
            "sequence": problem.sequence,
            "length": f"s{problem.sequence}",
            "feature": problem.feature,
        }
        rows += [
            {
                "variant": name,
                "phase": each,
                **about,
                "clock": "wall" if clock == "device" else clock,
                "flops": problem.flops(each),
                "least_bytes": problem.least_bytes(each),
                **attempts.about[name],
                **samples.row(),
            }
            for (name, each), samples in measured.items()
        ]
        rows += [{"variant": name, **about, "ended": end} for name, end in attempts.ended.items()]
    del everyone, attempts
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows
