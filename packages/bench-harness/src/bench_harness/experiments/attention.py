"""Attention alone: implementations on a grid of problems, in time, memory and accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import attentions, roofline
from bench_harness.attentions import CLOCKS, DTYPES, FEATURES, PASSES
from bench_harness.core import Bar, Bars, Case, Column, Config, Figure, Progress, Row, Table, option
from bench_harness.display import cells, row_tables
from bench_harness.display.lines import Panel, draw_lines, points
from bench_harness.experiments.base import DeviceOptions, Experiment
from bench_harness.roofline import ceilings
from bench_harness.timing import SamplingOptions
from bench_harness.workload import device_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure

    from bench_harness.experiments.attention_measure import Problem

_MASKS = ("causal", "full")


@dataclass(frozen=True, kw_only=True)
class Options(SamplingOptions, DeviceOptions):
    """Options of :class:`Attention`."""

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
    varying: int = option(
        0,
        "Call each variant on so many lengths between the shortest and the longest of sequences, "
        "one after another, and time all of them together with the host; 0: one length at a time.",
    )
    masks: tuple[str, ...] = option(("causal",), "Masks.", choices=_MASKS)
    window: tuple[int, ...] = option((), "Visible keys left and right of the diagonal; -1: all.")
    softcap: float | None = option(None, "Soft-cap of the scores.")
    features: tuple[str, ...] = option(
        ("plain",),
        "What a call adds, one at a time, compared: sinks, ALiBi slopes, a learned bias, "
        "deterministic gradients.",
        choices=FEATURES,
    )
    passes: tuple[str, ...] = option(
        ("forward", "backward", "forward+backward"),
        "What is timed; training forward keeps what backward needs, and with sum, backward starts "
        "at the sum of the output.",
        choices=PASSES,
    )
    clock: tuple[str, ...] = option(
        ("device",),
        "Cases by do_bench on a GPU, which heats it up (device), or by calls after pauses (cool); "
        "by the clock around a synchronised call (wall), or until a call returns (host).",
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

    def __post_init__(self) -> None:
        for name in self.variants:
            attentions.check(name)
        DeviceOptions.__post_init__(self)
        plain = self.features == ("plain",) and not self.packed
        if self.varying and not (plain and len(self.sequences) > 1 and self.varying > 1):
            raise ValueError(
                f"varying must be at least 2 lengths between several sequences, of plain attention "
                f"that is not packed, but got {self.varying}. Correct them."
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"kv_heads must divide heads, but got {self.kv_heads} of {self.heads}. Correct it."
            )
        of_packed = {"plain", "deterministic"}
        if not self.features or (self.packed and not of_packed.issuperset(self.features)):
            raise ValueError(
                "features must name at least one, of packed sequences plain or deterministic, but "
                f"got {', '.join(self.features) or 'none'}. Write features plain."
            )
        if len(self.window) not in (0, 2) or any(side < -1 for side in self.window):
            raise ValueError(
                f"window must be two numbers of keys (-1: no limit), but got {self.window}. Write "
                "left and right."
            )


class Attention(Experiment):
    """Implementations of attention on a grid of problems."""

    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "Attention kernels: time, memory, errors"
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
            **chosen.stored("batch tokens heads value_head_dim packed softcap passes"),
            **chosen.stored("rep_ms warmup_ms rounds samples interval max_seconds"),
            "kv_heads": chosen.kv_heads or chosen.heads,
            "window": [None if side < 0 else side for side in chosen.window] or None,
            "features": list(dict.fromkeys(chosen.features)),
            "deterministic": False,  # as in published rows, whose keys stay
        }
        return [
            _case(
                {**config, "clock": clock, "dtype": dtype, "head_dim": head_dim, "mask": mask}
                | {"sequences": list(sequences), "variants": variants}
                | ({"varying": chosen.varying} if chosen.varying else {})
            )
            for dtype in chosen.dtypes
            for head_dim in chosen.head_dims
            for mask in chosen.masks
            for sequences, variants in _groups(chosen)
            for clock in chosen.clock
        ]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Compares every variant with the reference on each problem, then times its passes."""
        import torch._dynamo.config
        import torch._functorch.config

        from bench_harness.experiments.attention_measure import (
            measured,
            measured_over_lengths,
            timer_overhead_ms,
        )

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
            if case.config.get("varying"):
                found = measured_over_lengths(varied(case.config), case.config, device, progress)
                return [{**about, **row} for row in found]
            for group in problems(case.config):
                # Meeting a second length, the compiler would give up static shapes.
                torch.compiler.reset()
                rows += [{**about, **row} for row in measured(group, case.config, device, progress)]
        return rows

    def work_s(self, case: Case) -> float:
        """By variants, lengths and passes; compiling each length takes longest."""
        config, names, passes = case.config, case.config["variants"], len(case.config["passes"])
        problems = max(1, len(config["sequences"])) * len(config["features"])
        cells = problems * len(names)
        timed = cells * passes * (config["warmup_ms"] + config["rep_ms"]) / 1e3
        if config["device"] == "cpu":
            return float(2 + 0.4 * cells + timed)
        if config["dtype"] == "fp32":  # without tensor cores
            scores = [s * (config["tokens"] or config["batch"] * s) for s in config["sequences"]]
            if "naive" in names and config["heads"] * max(scores, default=0) > 2**31:
                return 6.0  # it runs out of memory at once
            timed += len(names) * config["heads"] * sum(scores) / 2**31
        of_cute = (6 if list(config["passes"]) == ["forward"] else 11) * ("flash-attn-4" in names)
        compiled = 21 * problems * sum("compiled" in name or name == "flex" for name in names)
        # Kernels of windows, of wide heads and of deterministic gradients take longest to compile.
        longest = 5 * bool(config["window"]) + 6 * (config["head_dim"] > 128)
        longest += 5 * ("deterministic" in config["features"])
        beside = 7 + len(names) + compiled + of_cute + longest
        return float(beside + 0.07 * cells * passes + timed)

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The grid with all statistics, medians, the cost of features."""
        frame = _frame(rows)
        if "flops" in frame:
            # A case's first variant is the reference of its speedups.
            first = frame["variants"].str[0] == frame["variant"]
            cell = "case_key sequence phase feature"
            frame["speedup"] = 1 / row_tables.over(frame, first, cell)
        grid = _COLUMNS.table(
            "Attention grid",
            frame,
            f"{_PROBLEM} variant tier kernel phase {row_tables.STATISTICS} p20_ms p80_ms tflop_s "
            f"speedup {row_tables.ROOFLINE} {_ERRORS} first_time_ms saved_mib predicted_mib missed "
            "status error",
            "On a GPU times are triton.testing.do_bench's (device events, cache overwritten), "
            "unless the case asks for another clock; on a CPU the wall clock. Speedups compare "
            "variants of one case only. Causal attention counts half of the scores. Errors are "
            "shares of the largest value of the fp32 reference. Held before backward: what "
            "forward leaves allocated, output included; predictions off by more than 10 % are "
            f"marked. {roofline.NOTE}",
        )
        done = row_tables.finished(frame)
        return [grid, *_medians(done), *_against(done), *_features(done)]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Time, throughput and held memory over the length; errors."""
        done = _frame(row_tables.finished(rows))
        if "phase" not in done or done["median_ms"].isna().all():
            return []
        for end, other in (("low", "high"), ("high", "low")):
            done[f"tflop_s_{end}"] = done["flops"] / done[f"ci_{other}_ms"].astype("float64") / 1e9
        measured = [name for name in PASSES if name in set(done["phase"])]
        last = done[done["phase"] == measured[-1]]
        unit, size = cells.scale(last["tflop_s"].dropna(), "TFLOP/s")
        for name in ("tflop_s", *_RATES):
            last = last.assign(**{name: last[name] / size})
        lengths, share = set(done["sequence"]), "error (share of the largest value)"
        length = "over the sequence length"
        if len(lengths) == 1:
            length = f"at {lengths.pop():,} tokens"
        rate = draw(last, "tflop_s", f"throughput ({unit})", _RATES, log=False)
        times = [
            Figure(
                f"attention_{name}",
                f"Time of {name} {length}",
                draw(done[done["phase"] == name], "median_ms", "median time (ms)", _TIMES),
                folded=name != measured[-1],
            )
            for name in measured
        ]
        held = [
            Figure(f"attention_{name}", title, draw(last, column, unit), folded=True)
            for name, title, column, unit in (
                ("memory", "Memory that forward leaves allocated", "saved_mib", "memory (MiB)"),
                ("errors_output", "Error of the output", "error_out", share),
                ("errors_gradients", "Error of the gradients", "error_grad", share),
            )
            if column in last and last[column].notna().any()
        ]
        throughput = f"Throughput of {measured[-1]} {length}"
        return [times[-1], Figure("attention_throughput", throughput, rate), *times[:-1], *held]


def _groups(chosen: Options) -> list[tuple[tuple[int, ...], list[str]]]:
    """Lengths and variants that share a case."""
    variants = list(dict.fromkeys(chosen.variants))
    if chosen.packed:
        return [((), variants)]
    if chosen.varying:
        return [(tuple(chosen.sequences), variants)]
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


def problems(config: Config) -> list[list[Problem]]:
    """The problems of a case: a list for each length, of one for each feature."""
    from bench_harness.experiments.attention_measure import Problem

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


def varied(config: Config) -> list[Problem]:
    """Problems of lengths that are spread over the range of sequences, in mixed order.

    By steps of the golden ratio: no two neighbours are alike, and every run has the same lengths.
    """
    least, most = min(config["sequences"]), max(config["sequences"])
    shares = [(number * 0.6180339887) % 1 for number in range(config["varying"])]
    lengths = [least, most, *(least + round(share * (most - least)) for share in shares[2:])]
    each = {**config, "sequences": lengths}
    return [problem for (problem,) in problems(each)]


def _case(config: Row) -> Case:
    return Case(
        experiment=Attention.name, config={**config, "label": label(config)}, timeout_s=1800
    )


def label(config: Config) -> str:
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
        f"{config['varying']} lengths" if config.get("varying") else "",
        f"window {config['window']}" if config["window"] else "",
        f"softcap {config['softcap']:g}" if config["softcap"] else "",
        "+".join(config["features"]) if config["features"] != ["plain"] else "",
        "deterministic" * config["deterministic"],
        f"{config['clock']} clock" if config["clock"] != "device" else "",
        "+".join(config["variants"]),
    ]
    return " ".join(filter(None, parts))


#: Significant digits of figures: as many as published rows have, so that nothing is rounded twice.
_DIGITS = 6
_COLUMNS = row_tables.Columns(
    Column("head_dim", "head_dim"),
    Column("value_head_dim", "value head_dim"),
    Column("window", "window", "keys"),
    Column("softcap", "soft-cap", "1"),
    Column("regime", "clock"),
    Column("kv_heads", "key/value heads"),
    Column("varied", "lengths up to that", "count"),
    Column("variant", "attention"),
    Column("kernel", "PyTorch's kernel"),
    Column("phase", "pass"),
    Column("p20_ms", "20 % quantile", "ms"),
    Column("p80_ms", "80 % quantile", "ms"),
    Column("speedup", "speedup over the first", "ratio"),
    Column("error_out", "error of output", "share of max"),
    Column("error_grad", "error of gradients", "share of max"),
    *(
        Column(f"error_d{name}", f"error of d{title}", "share of max")
        for name, title in (
            ("q", "Q"),
            ("k", "K"),
            ("v", "V"),
            ("sinks", "sinks"),
            ("bias", "bias"),
        )
    ),
    Column("saved_mib", "held before backward", "MiB"),
    Column("predicted_mib", "predicted for naive", "MiB"),
    Column("error", "reason"),
    Column("fewest", "fewest samples", "count"),
    Column("problems", "problems", "count"),
    Column("faster", "faster", "count"),
    Column("least", "least", "ratio"),
    Column("median", "median", "ratio"),
    Column("largest", "largest", "ratio"),
    digits=_DIGITS,
)
#: What makes problems of one kind, and what identifies one.
_KIND = "dtype head_dim value_head_dim mask window softcap feature deterministic regime"
_PROBLEM = f"{_KIND} batch heads kv_heads sequence varied"
_ERRORS = "error_out error_grad error_dq error_dk error_dv error_dsinks error_dbias"


def _frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their summary, and what is shown of lists, bytes and operations."""
    from bench_harness.stats import with_summary

    frame = with_summary(rows)
    together = frame["variants"].map("+".join)  # of a case that failed
    frame["variant"] = frame.get("variant", together).fillna(together)
    frame["sequences"] = [
        held if len(held) else [sum(packed)]
        for held, packed in zip(frame["sequences"], frame["packed"], strict=True)
    ]
    frame = row_tables.lengths(frame)
    frame["window"] = frame["window"].map(_pair, na_action="ignore")
    frame["feature"] = _feature_of(frame)
    clocks = frame["clock"].replace("do_bench", "hot")
    frame["regime"] = clocks if clocks.nunique() > 1 or (clocks == "cool").any() else None
    if (frame["feature"] == "plain").all():
        frame["feature"] = None
    frame["deterministic"] = frame["deterministic"].astype(object).where(frame["deterministic"])
    if (frame["kv_heads"] == frame["heads"]).all():
        frame["kv_heads"] = None
    if "ran" in frame:
        frame["kernel"] = frame["ran"].where(frame["variant"].str.startswith("sdpa"))
        frame["tier"] = frame["ran"].where(frame["variant"].str.startswith("flashattn-triton"))
    if "plan" in frame:  # as rows said it before
        tier = frame["plan"].map(lambda plan: plan["tier"], na_action="ignore")
        frame["tier"] = tier if "tier" not in frame else frame["tier"].where(tier.isna(), tier)
    if "varied" in frame and "first_ms" in frame:
        frame["first_time_ms"] = frame["first_ms"].where(frame["varied"].notna())
    if "flops" in frame:
        frame["tflop_s"] = frame["flops"] / frame["median_ms"] / 1e9
    if "saved_bytes" in frame:
        frame["saved_mib"] = frame["saved_bytes"] / 2**20
    if "predicted_saved_bytes" in frame:
        frame["predicted_mib"] = frame["predicted_saved_bytes"] / 2**20
        missed = (frame["saved_bytes"] / frame["predicted_saved_bytes"] - 1).abs() > 0.1
        frame["missed"] = missed.where(frame["variant"] == "naive")
    if "error_dq" in frame:
        gradients = [name for name in _ERRORS.split()[2:] if name in frame]
        largest = frame[gradients].max(axis=1)
        frame["error_grad"] = frame.get("error_grad", largest).fillna(largest)
    return roofline.with_roofline(frame)


def _feature_of(frame: pd.DataFrame) -> list[str]:
    """The feature of each row. The row of a failed case names all features of the case, and rows
    that were written before features existed are "plain"."""
    own = frame["feature"] if "feature" in frame else [None] * len(frame)
    held = frame["features"] if "features" in frame else [None] * len(frame)
    return [
        name if isinstance(name, str) else "+".join(names) if isinstance(names, list) else "plain"
        for name, names in zip(own, held, strict=True)
    ]


def _pair(window: Any) -> str:
    return ", ".join("no limit" if side is None else str(side) for side in window)


def _medians(done: pd.DataFrame) -> list[Table]:
    """Two tables of medians: a column for each pass, and a column for each implementation."""
    if "phase" not in done or done.empty:
        return []
    done = done.sort_values(["dtype", "head_dim", "mask", "longest"], kind="stable")
    made = []
    for title, across, note in (
        ("Attention passes", "phase", "Medians, a column per pass."),
        (
            "Attention side by side",
            "variant",
            "Medians. Empty: not measured beside the others of its line.",
        ),
    ):
        lines = f"{_PROBLEM} {'variant' if across == 'phase' else 'phase'}"
        keys = _held(done, f"case_key {lines}")
        by_line = done.groupby([*keys, across], dropna=False, sort=False)["median_ms"].mean()
        wide = by_line.reset_index().pivot(index=keys, columns=across, values="median_ms")
        wide = wide.reset_index()
        fewest = done.groupby(keys, dropna=False, sort=False)["n"].min().rename("fewest")
        wide = fewest.reset_index().merge(wide, on=keys)
        found = list(done[across].unique())
        ordered = [name for name in PASSES if name in found] if across == "phase" else found
        named = {name: f"{name} (ms)" for name in ordered}
        made.append(
            _COLUMNS.table(title, wide, lines, note, named | {"fewest": _COLUMNS["fewest"].heading})
        )
    return made


def _held(rows: pd.DataFrame, keys: str) -> list[str]:
    """Those of the keys that the rows hold something for."""
    return [name for name in keys.split() if name in rows and rows[name].notna().any()]


def _against(done: pd.DataFrame) -> list[Table]:
    """A case's first variant against each other one: how often it is faster, and by how much."""
    if "phase" not in done or done.empty:
        return []
    others = done["variants"].str[0] != done["variant"]
    pairs = done[others & done["speedup"].notna()]
    if pairs.empty:
        return []
    lines = f"{_KIND} variant phase"
    found = pairs.groupby(_held(pairs, lines), dropna=False, sort=False)["speedup"].agg(
        problems="size", faster=lambda ratio: (ratio < 1).sum(), least="min", median="median",
        largest="max",
    )  # fmt: skip
    return [
        _COLUMNS.table(
            "Attention against each other",
            found.reset_index(),
            f"{lines} problems faster least median largest",
            "The first variant's median divided by the other's on the same problem, over problems "
            "of all sizes; faster: where that is below 1. Medians that are not steady are left "
            "out.",
            {"variant": "against"},
        )
    ]


def _features(done: pd.DataFrame) -> list[Table]:
    """What a feature costs: a line per feature and variant, its time over that of plain attention.

    Both times come from turns of one case.
    """
    if "phase" not in done or done["feature"].isna().all():
        return []
    plain = done["feature"] == "plain"
    over_plain = row_tables.over(done, plain, "case_key sequence variant phase")
    # A variant that does not take the feature has no phase.
    done = done.assign(over_plain=over_plain)[~plain & done["phase"].notna()]
    lines = f"{_PROBLEM} variant tier kernel"
    keys = _held(done, lines)
    wide = done.pivot_table(
        index=keys, columns="phase", values=["median_ms", "over_plain"], sort=False, dropna=False
    )
    wide = wide.dropna(how="all")
    shown: dict[str, str] = {}
    for phase in (name for name in PASSES if name in set(done["phase"])):
        for value, text in (("median_ms", f"{phase} (ms)"), ("over_plain", f"{phase} (ratio)")):
            if (value, phase) in wide:
                shown[f"{value} {phase}"] = text
    wide.columns = wide.columns.map(" ".join)
    note = (
        "Medians, and each divided by the median of plain attention by the same implementation, "
        "measured in turns with it: below 1 the feature makes it faster. Empty ratio: one of the "
        "two is not steady."
    )
    return [_COLUMNS.table("Attention features", wide.reset_index(), lines, note, shown)]


#: Columns with the ends of an interval.
_TIMES, _RATES = ("ci_low_ms", "ci_high_ms"), ("tflop_s_low", "tflop_s_high")


def draw(
    done: pd.DataFrame,
    column: str,
    unit: str,
    ends: tuple[str, str] | None = None,
    *,
    log: bool = True,
) -> MatplotlibFigure | Bars:
    """A column over the sequence length: a panel per dtype, head dimension and mask.

    Of one length it is a bar for each variant. ``ends`` are those of
    :func:`bench_harness.display.lines.points`.
    """
    by = ["dtype", "head_dim", "value_head_dim", "mask", "softcap", "feature"]
    panels = [
        Panel(
            title=title,
            y=unit,
            lines={
                str(variant): points(group, "sequence", column, ends)
                for variant, group in panel.groupby("variant", sort=False)
            },
            log=log,
        )
        for title, panel in row_tables.by(done.sort_values(by[:2], kind="stable"), by)
    ]
    if done["sequence"].nunique() == 1:
        what, _, unit = unit.removesuffix(")").rpartition(" (")
        bars = {
            panel.title: [
                Bar(name, {what: row["y"]}, row["low"], row["high"], row["steady"])
                for name, line in panel.lines.items()
                for _, row in line.iterrows()
            ]
            for panel in panels
        }
        return Bars(unit, bars)
    return draw_lines(panels, x="sequence length (tokens)", columns=min(4, len(panels)))
