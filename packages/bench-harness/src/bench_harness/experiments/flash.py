"""FlashAttention against the attentions of PyTorch, over lengths, head dimensions and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row
from bench_harness.environment import resolve_device
from bench_harness.experiments import present
from bench_harness.experiments.base import CaseSkipped, Experiment, Figure, Table, option

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from bench_harness.timing import Samples

    AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

#: These store the S×S scores; the others need memory linear in S.
QUADRATIC = ("naive", "naive-compiled")
#: What this project implements.
OURS = ("auto", "triton", "tiled")
#: "auto" is what ``flash_attention`` chooses, and its rows say what that was; "triton" insists on
#: the portable kernels. "ours" is auto on a GPU and tiled on a CPU; a case names the one it runs.
VARIANTS = (
    "ours",
    *OURS,
    *QUADRATIC,
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "sdpa-math",
    "flex",
)
#: Kernels that PyTorch has on a GPU for fp16 and bf16 only: fp32 cells go without them.
HALF_ONLY = ("sdpa-flash", "sdpa-cudnn")
_DTYPES = ("bf16", "fp32")

#: Largest error allowed, as a share of the largest value of the fp64 oracle: twice the error of
#: naive attention in the same dtype, plus this floor for where that happens to be almost exact.
_ERROR_FLOOR = {"fp32": 1e-5, "bf16": 1e-2}
#: Longer sequences are checked at this length, which keeps the oracle's memory small.
_CHECKED_SEQUENCE = 2048


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :class:`Flash`.

    Small enough for a quick run on two cores: ``sequences=[256]``, ``head_dims=[64]``,
    ``dtypes=["fp32"]``, ``variants=["ours", "naive", "sdpa-flash"]``, ``rep_ms=200``.
    """

    sequences: tuple[int, ...] = option(tuple(2**n for n in range(7, 17)), "Sequence lengths.")
    head_dims: tuple[int, ...] = option((16, 32, 64, 128), "Head dimensions.")
    dtypes: tuple[str, ...] = option(_DTYPES, "Element types.", choices=_DTYPES)
    batch: int = option(1, "Sequences per batch.")
    heads: int = option(1, "Heads per sequence.")
    causal: bool = option(True, "Whether position i sees only positions 0 to i.")
    variants: tuple[str, ...] = option(
        ("auto", "naive", "naive-compiled", "sdpa-flash", "sdpa-cudnn", "flex"),
        "Implementations, compared; the first one is the reference of speedups.",
        choices=VARIANTS,
    )
    rep_ms: int = option(300, "Milliseconds of measurement per variant and pass.")
    warmup_ms: int = option(100, "Milliseconds of warm-up per variant and pass.")
    rounds: int = option(3, "Turns that share those milliseconds, so that drift meets everyone.")
    isolate_gib: float = option(
        1.0,
        "Where fp32 scores would be larger (GiB), variants that store them get cases of their own, "
        "so that one without enough memory takes no other along.",
    )
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


class Flash(Experiment):
    """FlashAttention, ours and PyTorch's, against naive attention."""

    name: ClassVar[str] = "flash"
    summary: ClassVar[str] = "FlashAttention against every attention PyTorch offers"
    guide: ClassVar[str] = (
        "Times forward, backward and both together of FlashAttention-2 beside other attentions, "
        'in turns, after every one has been compared with exact attention. "auto" is what the '
        "package chooses on this device."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "flash --sequences 4096,16384 --head-dims 64 --dtypes bf16",
        "flash --variants auto,naive,sdpa-flash --heads 16",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per dtype and head dimension; lengths with large scores have their own.

        There the variants that store the scores are apart, each beside the reference.

        Raises:
            ValueError: no variant supports one of the dtypes.
        """
        chosen = Options(**options)
        device = resolve_device(chosen.device)
        ours = "auto" if device == "cuda" else "tiled"
        named = (ours if name == "ours" else name for name in chosen.variants)
        variants = list(dict.fromkeys(named))
        cases = []
        for dtype in chosen.dtypes:
            lacking = HALF_ONLY if device == "cuda" and dtype == "fp32" else ()
            supported = [v for v in variants if v not in lacking]
            if not supported:
                raise ValueError(
                    f"at least one variant must support {dtype} on a GPU; received "
                    f"{', '.join(variants)}, which take fp16 and bf16 only"
                )
            reference, *others = supported
            linear = [v for v in supported if v not in QUADRATIC]
            apart = [[reference, v] for v in others if v in QUADRATIC]
            if linear and (linear != [reference] or not apart):  # else the reference has its turn
                apart.insert(0, linear)
            limit = chosen.isolate_gib * 2**30 / (4 * chosen.batch * chosen.heads)
            together = [s for s in chosen.sequences if s**2 <= limit]
            groups = [(together, supported)] if together else []
            groups += [([s], group) for s in chosen.sequences if s**2 > limit for group in apart]
            cases += [
                _case(
                    {
                        "dtype": dtype,
                        "head_dim": head_dim,
                        "sequences": sequences,
                        "batch": chosen.batch,
                        "heads": chosen.heads,
                        "causal": chosen.causal,
                        "variants": group,
                        "rep_ms": chosen.rep_ms,
                        "warmup_ms": chosen.warmup_ms,
                        "rounds": chosen.rounds,
                        "device": device,
                    }
                )
                for head_dim in chosen.head_dims
                for sequences, group in groups
            ]
        return cases

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Checks every variant against an fp64 oracle, then times its three passes."""
        import torch._functorch.config

        from bench_harness.workload import device_of

        # Backward alone is timed over one graph, again and again: a compiled function must not
        # reuse the memory of what it saved.
        with torch._functorch.config.patch(donated_buffer=False):
            return self._measured(case.config, device_of(case.config["device"]), progress)

    def _measured(
        self, config: Mapping[str, Any], device: torch.device, progress: Callable[[str], None]
    ) -> list[Row]:
        import torch

        functions = {
            name: implementation(name, causal=config["causal"], device=device)
            for name in config["variants"]
        }
        errors: dict[int, dict[str, Row]] = {}
        rows: list[Row] = []
        for sequence in config["sequences"]:
            checked = min(sequence, _CHECKED_SEQUENCE)
            # Meeting a second length, the compiler would give up static shapes.
            torch.compiler.reset()
            if checked not in errors:
                progress(f"length {sequence}: checking results")
                errors[checked] = check(functions, {**config, "sequence": checked}, device)
                if checked != sequence:
                    torch.compiler.reset()
            cell = {**config, "sequence": sequence}
            rows += [
                {**row, **errors[checked][row["variant"]]}
                for row in measure(functions, cell, device, progress)
            ]
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The full grid with speedups over the same case's reference, and cells without memory."""
        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        if "variant" not in frame:
            frame["variant"] = None
        missing = frame["variant"].isna()
        frame.loc[missing, "variant"] = frame.loc[missing, "variants"].map("+".join)
        frame = present.lengths(frame)
        if "plan" in frame:
            frame["tier"] = frame["plan"].map(lambda plan: plan["tier"], na_action="ignore")
        if "flops" in frame:
            frame["tflop_s"] = frame["flops"] / frame["median_ms"] / 1e9
            reference = frame[frame["variants"].str[0] == frame["variant"]]
            cell = ["case_key", "sequence", "phase"]
            medians = reference.set_index(cell)["median_ms"].to_dict()
            frame["relative"] = [
                medians.get(where, float("nan")) / median
                for where, median in zip(
                    frame[cell].itertuples(index=False, name=None), frame["median_ms"], strict=True
                )
            ]
        first = frame["variants"].iloc[0][0] if len(frame) else ""
        return [
            Table(
                "FlashAttention grid",
                present.columns(
                    frame,
                    {
                        "dtype": "dtype",
                        "head_dim": "head_dim",
                        "sequence": "sequence (tokens)",
                        "variant": "variant",
                        "tier": "tier",
                        "phase": "pass",
                    }
                    | present.STATISTICS
                    | {
                        "tflop_s": "TFLOP/s",
                        "relative": f"speedup over {first} (ratio)",
                        "error_out": "error of output (share of max)",
                        "error_grad": "error of gradients (share of max)",
                        "status": "status",
                    },
                ),
                "On a GPU times are triton.testing.do_bench's (device events, cache flushed); on a "
                "CPU the wall clock. The tier is what flash_attention ran. Speedups compare "
                "variants of the same case only. Causal attention counts half of the scores.",
            ),
            *_side_by_side(present.finished(frame)),
        ]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Time over sequence length; errors of output and gradients."""
        from bench_harness.experiments.flash_pictures import draw_errors, draw_grid
        from bench_harness.stats import with_summary

        done = with_summary(present.finished(rows))
        if "phase" not in done or done.empty:
            return []
        return [
            Figure("flash_grid", "Forward and backward over sequence length", draw_grid(done)),
            *(
                Figure(
                    f"flash_errors_{what}",
                    f"Error of the {what} against fp64",
                    draw_errors(done, column, _CHECKED_SEQUENCE),
                    f"A point per head dimension and length up to {_CHECKED_SEQUENCE}; longer ones "
                    "are checked at that length. Shares of the largest value of attention in "
                    "double precision.",
                )
                for what, column in (("output", "error_out"), ("gradients", "error_grad"))
            ),
        ]


def _side_by_side(done: pd.DataFrame) -> list[Table]:
    """A line per cell, a column of medians per variant; variants of one case share a line."""
    if "phase" not in done or done.empty:
        return []
    cell = ["case_key", "dtype", "head_dim", "sequence", "phase"]
    done = done.sort_values(["dtype", "head_dim", "sequence"], kind="stable")
    wide = done.pivot_table(index=cell, columns="variant", values="median_ms", sort=False)
    named = {variant: f"{variant} (ms)" for variant in done["variant"].unique()}
    shown = {"dtype": "dtype", "head_dim": "head_dim", "sequence": "sequence (tokens)"}
    return [
        Table(
            "FlashAttention side by side",
            present.columns(wide.reset_index(), {**shown, "phase": "pass", **named}),
            "Medians. Empty: not measured beside the others of its line.",
        )
    ]


def _case(config: dict[str, Any]) -> Case:
    """The case of a configuration, with its label."""
    sequences, group = config["sequences"], config["variants"]
    length = f"s{sequences[0]}" + (f"–{sequences[-1]}" if len(sequences) > 1 else "")
    return Case(
        experiment=Flash.name,
        config={
            **config,
            "label": f"flash {length} d{config['head_dim']} {config['dtype']} {'+'.join(group)}",
        },
        timeout_s=1800,
    )


def measure(
    functions: Mapping[str, AttentionFunction],
    config: Mapping[str, Any],
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Row]:
    """Times three passes of every variant at one length, in turns."""
    sequence, rounds = config["sequence"], config["rounds"]
    inputs = _inputs(config, device, sequence)
    samples: dict[tuple[str, str], Samples] = {}
    for index in range(rounds):
        for name, function in functions.items():
            progress(f"length {sequence}, round {index + 1} of {rounds}: {name}")
            for name_of_pass, call in passes(function, *inputs).items():
                taken = time_kernel(
                    call, device, config["warmup_ms"] / rounds, config["rep_ms"] / rounds, inputs
                )
                kept = samples.setdefault((name, name_of_pass), taken)
                if kept is not taken:
                    kept.wall_ms += taken.wall_ms
    plans = {name: plan(name, config, *inputs[:3]) for name in functions if name in OURS}
    on_gpu = {"timer_overhead_ms": kernel_timer_overhead_ms()} if device.type == "cuda" else {}
    return [
        {
            "variant": name,
            **({"plan": plans[name]} if name in plans else {}),
            "phase": name_of_pass,
            "sequence": sequence,
            "length": f"s{sequence}",
            "clock": "do_bench" if device.type == "cuda" else "wall",
            "flops": _flops(config, name_of_pass),
            **on_gpu,
            **taken.row(),
        }
        for (name, name_of_pass), taken in samples.items()
    ]


def plan(name: str, config: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Row:
    """What ``flash_attention`` runs for these tensors, and why, by the package's own account.

    Args:
        name: one of :data:`OURS`.
    """
    from flashattn_triton import choose
    from flashattn_triton.options import resolve_options

    options = resolve_options(head_dim=query.shape[-1], causal=config["causal"])
    found = choose(query, key, value, options, implementation=name)
    return {"tier": found.tier, "why": found.reason}


def implementation(name: str, *, causal: bool, device: torch.device) -> AttentionFunction:
    """An attention over (batch, heads, sequence, head_dim) by name; see :data:`VARIANTS`.

    Raises:
        ValueError: unknown name.
        CaseSkipped: the variant needs a GPU.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from flashattn_triton import flash_attention

    if name in ("triton", "sdpa-cudnn", "sdpa-efficient", "flex") and device.type != "cuda":
        raise CaseSkipped(f"{name} needs a CUDA device; this case runs on {device}")
    backends = {
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa-math": SDPBackend.MATH,
    }
    if name in backends:

        def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backends[name]):
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        return scaled_dot_product
    if name in OURS:
        flash: Callable[..., Any] = partial(
            flash_attention, causal=causal, implementation=name, layout="bhsd"
        )
        return flash
    if name == "naive":
        return partial(_naive, causal=causal)
    if name == "naive-compiled":
        return partial(torch.compile(_naive), causal=causal)
    if name == "flex":
        return _flex(causal)
    raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; received {name!r}")


def passes(
    function: AttentionFunction, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor
) -> dict[str, Callable[[], object]]:
    """The three passes that are timed; backward alone reuses one graph."""
    import torch

    out = function(query, key, value)

    def forward() -> object:
        with torch.no_grad():
            return function(query, key, value)

    return {
        "forward": forward,
        "backward": lambda: out.backward(grad_out, retain_graph=True),
        "forward+backward": lambda: function(query, key, value).backward(grad_out),
    }


def time_kernel(
    call: Callable[[], object],
    device: torch.device,
    warmup_ms: float,
    rep_ms: float,
    inputs: tuple[Tensor, ...],
) -> Samples:
    """Times a call by ``triton.testing.do_bench`` on a GPU, by the wall clock on a CPU.

    Gradients of ``inputs`` are dropped before each call, so none is accumulated into.
    """
    import time

    from bench_harness.timing import Samples, record_sample

    if device.type == "cuda":
        from triton.testing import do_bench

        readings = do_bench(
            call, warmup=warmup_ms, rep=rep_ms, grad_to_none=list(inputs), return_mode="all"
        )
        return Samples(wall_ms=[float(reading) for reading in readings])
    samples = Samples()
    kept = time.perf_counter() + warmup_ms / 1e3
    end = kept + rep_ms / 1e3
    while not samples.wall_ms or time.perf_counter() < end:
        for tensor in inputs:
            tensor.grad = None
        with record_sample(samples, device):
            call()
        if time.perf_counter() < kept:
            samples.wall_ms.clear()
    return samples


def kernel_timer_overhead_ms() -> float:
    """The median time that ``do_bench`` reports for a call that launches nothing."""
    from triton.testing import do_bench

    return float(do_bench(lambda: None, warmup=1, rep=5, return_mode="median"))


def check(
    functions: Mapping[str, AttentionFunction], config: Mapping[str, Any], device: torch.device
) -> dict[str, Row]:
    """Errors of output and gradients against fp64 attention, as shares of its largest value.

    Raises:
        ArithmeticError: a variant's error exceeds its bound; nothing of the case is timed then.
    """
    query, key, value, grad_out = _inputs(
        config, device, min(config["sequence"], _CHECKED_SEQUENCE)
    )
    causal = config["causal"]

    def results(function: AttentionFunction, *inputs: Tensor) -> list[Tensor]:
        import torch

        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    exact = results(
        partial(_naive, causal=causal),
        *(t.detach().double() for t in (query, key, value, grad_out)),
    )

    def errors(found: list[Tensor]) -> list[float]:
        return [
            float((f.double() - e).abs().max() / e.abs().max())
            for f, e in zip(found, exact, strict=True)
        ]

    floor = _ERROR_FLOOR[config["dtype"]]
    naive = errors(results(partial(_naive, causal=causal), query, key, value, grad_out))
    rows: dict[str, Row] = {}
    for name, function in functions.items():
        found = errors(results(function, query, key, value, grad_out))
        for what, error, usual in zip(("output", "dQ", "dK", "dV"), found, naive, strict=True):
            if not error <= 2 * usual + floor:  # also catches NaN
                raise ArithmeticError(
                    f"{name}: error of {what} must be at most {2 * usual + floor:.2e} of the "
                    f"largest value; received {error:.2e}; it is not timed"
                )
        rows[name] = {"error_out": found[0], "error_grad": max(found[1:])}
    return rows


def _naive(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """softmax(Q·Kᵀ/√D)·V with the S×S scores stored."""
    import torch

    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def _flex(causal: bool) -> AttentionFunction:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[-2]
        if causal and length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, q, k: q >= k, None, None, length, length, device=query.device
            )
        out: Tensor = compiled(query, key, value, block_mask=masks.get(length))
        return out

    return flex


def _inputs(
    config: Mapping[str, Any], device: torch.device, sequence: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value that need gradients, and the output's gradient."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config["dtype"]]
    shape = (config["batch"], config["heads"], sequence, config["head_dim"])
    torch.manual_seed(0)
    query, key, value, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out


def _flops(config: Mapping[str, Any], name_of_pass: str) -> int:
    from bench_harness.flops import attention_flops

    shape = (config["batch"], config["heads"], config["sequence"], config["head_dim"])
    forward = attention_flops(*shape, causal=config["causal"])
    backward = attention_flops(*shape, causal=config["causal"], backward=True)
    return {"forward": forward, "backward": backward}.get(name_of_pass, forward + backward)
