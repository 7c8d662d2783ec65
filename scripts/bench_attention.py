"""Measures flashattn-triton next to PyTorch's own attention kernels, and draws what was measured.

    python scripts/bench_attention.py run rows.jsonl --set all
    python scripts/bench_attention.py report rows.jsonl --table table.md --plot plot.png

``run`` first proves each implementation against fp32 tiles on one head of the very problem that is
timed, then times forward, backward, and both with ``out.sum().backward()``, implementations
interleaved over several rounds. Every row carries its statistics, GPU, versions and commit. Rows
are appended as they are measured, and cells that the file already holds for this commit are not
measured again, so an interrupted run is continued by the same command.

The sets ``host`` and ``first-call`` measure something else: the time that the host spends in a
call, and the time of the first call in a new process whose compilation caches are empty.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn_triton import FlashAttention2Triton, choose, flash_attention
from flashattn_triton.options import resolve_options
from flashattn_triton.tiled import tiled_backward, tiled_forward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative to the largest element of the oracle: one rounding to the type, of values and of P.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
PASSES = ("forward", "backward", "both")
OURS, PORTABLE, ASSIGNMENT = (
    "flashattn-triton",
    "flashattn-triton, portable tier",
    "FlashAttention2Triton.apply, compiled",
)
FLASH, CUDNN, EFFICIENT, FLEX, FLASH_4 = (
    "SDPA flash",
    "SDPA cuDNN",
    "SDPA memory-efficient",
    "FlexAttention, compiled",
    "FlashAttention-4",
)
FLEX_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"

    def flops(self, which: str) -> float:
        """Two matrix products forward, five backward, half of each under a causal mask."""
        products = {"forward": 2, "backward": 5, "both": 7}[which]
        work = 2 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return work / 2 if self.causal else work

    def leaves(self) -> list[Tensor]:
        """Random query, key and value that require gradients."""
        shape = (self.batch, self.heads, self.length, self.head_dim)
        dtype = DTYPES[self.dtype]
        return [
            torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
        ]

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        shape = f"{self.batch} x {self.heads} x {self.length}"
        return f"{self.dtype}, {shape}, head_dim {self.head_dim}, {mask}"


def leaderboard_cases() -> Iterator[Case]:
    """16 heads of 64, 16,384 tokens, bf16, causal."""
    yield Case(batch=1, heads=16, length=16384, head_dim=64, causal=True)


def length_cases(dtype: str) -> Iterator[Case]:
    """512 to 16,384 tokens at a constant number of tokens in all; 65,536 with few heads."""
    for head_dim in (64, 128):
        for causal in (True, False):
            case = functools.partial(Case, head_dim=head_dim, causal=causal, dtype=dtype)
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                yield case(batch=16384 // length, heads=2048 // head_dim, length=length)
            for length in (32768, 65536):
                yield case(batch=1, heads=262144 // length, length=length)


def small_cases() -> Iterator[Case]:
    """Problems that take a GPU about as long as its host needs to start them."""
    for head_dim in (64, 128):
        for causal in (True, False):
            yield Case(batch=16, heads=16, length=1024, head_dim=head_dim, causal=causal)


def single_cases() -> Iterator[Case]:
    """The anchors at 16 heads of 16,384 tokens, head_dim 128 and without a mask."""
    for head_dim in (64, 128):
        for causal in (True, False):
            if (head_dim, causal) != (64, True):
                yield Case(batch=1, heads=16, length=16384, head_dim=head_dim, causal=causal)


def wide_cases() -> Iterator[Case]:
    """The widest head."""
    for causal in (True, False):
        for length in (1024, 8192):
            yield Case(batch=8192 // length, heads=8, length=length, head_dim=256, causal=causal)


def full_precision_cases() -> Iterator[Case]:
    """float32, at true float32 accuracy."""
    for head_dim in (64, 128):
        for causal in (True, False):
            for length in (512, 4096):
                yield Case(
                    batch=8192 // length,
                    heads=8,
                    length=length,
                    head_dim=head_dim,
                    causal=causal,
                    dtype="fp32",
                )


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "leaderboard": leaderboard_cases,
    "small": small_cases,
    "fp32": full_precision_cases,
    "lengths": lambda: length_cases("bf16"),
    "wide": wide_cases,
    "single": single_cases,
    "lengths-fp16": lambda: length_cases("fp16"),
}
SETS = ("host", "first-call", *CASES)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(backend: SDPBackend, causal: bool) -> Attention:
    """PyTorch's attention, by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def flex_mask(case: Case) -> Any:
    """The causal block mask, built from its blocks: all pairs of 65,536 tokens fill a GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    if not case.causal:
        return None
    blocks = case.length // FLEX_BLOCK
    index = torch.arange(blocks, device="cuda", dtype=torch.int32)
    one = torch.ones(1, 1, blocks, device="cuda", dtype=torch.int32)
    diagonal = torch.zeros(1, 1, blocks, blocks, device="cuda", dtype=torch.int32)
    diagonal[..., 0] = index
    below = index.expand(1, 1, blocks, blocks).contiguous()
    return BlockMask.from_kv_blocks(
        one,
        diagonal,
        index.view(1, 1, -1).contiguous(),
        below,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(case.length, case.length),
    )


def flex(case: Case) -> Attention:
    """FlexAttention, compiled for the case's shape, with its block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = flex_mask(case)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def flash_4(case: Case) -> Attention:
    """The package flash-attn-4, whose layout puts the sequence before the heads."""
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def assignment(case: Case) -> Attention:
    """The leaderboard's form: the compiled autograd function on (heads, length, head_dim)."""
    apply = torch.compile(FlashAttention2Triton.apply)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), case.causal).view(q.shape)

    return attend


def implementations(set_name: str, case: Case) -> dict[str, Callable[[], Attention]]:
    """Ours and its peers, for one case; each is made when it is wanted."""
    ours = functools.partial(flash_attention, causal=case.causal)
    portable = functools.partial(flash_attention, causal=case.causal, implementation="triton")
    x = torch.empty(1, 1, 16, case.head_dim, device="cuda", dtype=DTYPES[case.dtype])
    options = resolve_options(head_dim=case.head_dim, causal=case.causal)
    found: dict[str, Callable[[], Attention]] = {OURS: lambda: ours}
    if choose(x, x, x, options).tier != "triton":
        found[PORTABLE] = lambda: portable
    if set_name == "leaderboard":
        found[ASSIGNMENT] = lambda: assignment(case)
    backends = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
    if case.dtype == "fp32":
        backends = {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
    for name, backend in backends.items():
        found[name] = functools.partial(sdpa, backend, case.causal)
    if case.dtype != "fp32":
        found[FLEX] = lambda: flex(case)
        if importlib.util.find_spec("flash_attn") is not None:  # optional, and measured if present
            found[FLASH_4] = lambda: flash_4(case)
    return found


def compile_flex(case: Case) -> str | None:
    """Fills the compilers' disk caches in a process of its own; the reason if that fails."""
    torch._functorch.config.donated_buffer = False  # as where the caches are read
    try:
        leaves = case.leaves()
        flex(case)(*leaves).sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{case}: {error}"[:200]
    return None


HEAD = (slice(-1, None), slice(-1, None))


def exact_head(case: Case, leaves: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of the last head, in fp32 tiles."""
    options = resolve_options(head_dim=case.head_dim, causal=case.causal)
    q, k, v, do = (x.detach()[HEAD].float() for x in (*leaves, grad_out))
    side = max(2048, case.length // 8)
    tiles = {"query_tile": side, "key_tile": side}
    out, lse = tiled_forward(q, k, v, options, **tiles)
    return (out, *tiled_backward(q, k, v, out, lse, do, None, options, **tiles))


def relative_errors(
    attend: Attention, leaves: list[Tensor], grad_out: Tensor, exact: tuple[Tensor, ...]
) -> dict[str, float]:
    """Largest error of the last head's output and gradients over their largest element."""
    out = attend(*leaves)
    results = (out, *torch.autograd.grad(out, leaves, grad_out))
    return {
        name: ((a.detach()[HEAD].float() - e).abs().max() / e.abs().max()).item()
        for name, a, e in zip(("out", "dq", "dk", "dv"), results, exact, strict=True)
    }


def timed(which: str, attend: Attention, leaves: list[Tensor]) -> Callable[[], Any]:
    """The pass as a function without arguments."""
    if which == "forward":
        return torch.no_grad()(lambda: attend(*leaves))
    if which == "both":
        return lambda: attend(*leaves).sum().backward()
    out = attend(*leaves)
    grad_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def environment(commit: str | None) -> dict[str, Any]:
    """What the figures hold for."""
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def driver_version() -> str | None:
    """As the driver's own tool says it, None without the tool."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.splitlines()[0].strip()


def statistics_of(ms: list[float]) -> dict[str, float]:
    """Median and the range that holds three fifths of the samples."""
    p20, *_, p80 = statistics.quantiles(ms, n=5)
    numbers = {"ms": statistics.median(ms), "ms_p20": p20, "ms_p80": p80}
    return numbers | {"ms_min": min(ms), "samples": len(ms)}


def measure(
    case: Case, wanted: dict[str, Callable[[], Attention]], rounds: int, rep: int
) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    leaves = case.leaves()
    grad_out = torch.randn_like(leaves[0])
    exact = exact_head(case, leaves, grad_out)
    attentions, errors = {}, {}
    for name, make in wanted.items():
        row = {**dataclasses.asdict(case), "implementation": name}
        try:
            attend = make()
            found = relative_errors(attend, leaves, grad_out, exact)
        except Exception as error:  # noqa: BLE001 - whatever stops one peer, the others go on
            yield row | {"note": str(error)[:200]}
            continue
        if not max(found.values()) <= TOLERANCE[case.dtype]:
            yield row | {"note": f"wrong: {found}"}
            continue
        attentions[name], errors[name] = attend, found
    for which in PASSES:
        calls = {name: timed(which, attend, leaves) for name, attend in attentions.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name] += triton.testing.do_bench(
                    call, warmup=rep // 5, rep=rep, grad_to_none=leaves, return_mode="all"
                )
        for name, ms in samples.items():
            numbers = statistics_of(ms)
            yield {
                **dataclasses.asdict(case),
                "implementation": name,
                "pass": which,
                **numbers,
                "tflops": case.flops(which) / numbers["ms"] / 1e9,
                "errors": errors[name],
            }


def host_rows() -> Iterator[dict[str, Any]]:
    """Time from the start of a call to its return, while the GPU has less to do than the host."""
    case = Case(batch=1, heads=2, length=64, head_dim=64, causal=True)
    leaves = case.leaves()
    for name, make in implementations("host", case).items():
        if name == FLEX:
            continue
        attend = make()
        differentiated = functools.partial(attend, *leaves)
        calls: dict[str, Callable[[], Any]] = {
            "forward": torch.no_grad()(differentiated),
            "forward, differentiated": differentiated,
            "both": timed("both", attend, leaves),
        }
        for which, call in calls.items():
            ms = []
            for _ in range(20):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(50):
                    call()
                ms.append((time.perf_counter() - started) / 50 * 1e3)
            numbers = statistics_of(ms)
            yield {**dataclasses.asdict(case), "implementation": name, "pass": which, **numbers}


FIRST_CALL = """
import json, sys, time
started = time.perf_counter()
import torch
head_dim, dtype, causal = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "True"
shape = (1, 16, 4096, head_dim)
leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
torch.cuda.synchronize()
torch_ready = time.perf_counter()
from flashattn_triton import flash_attention
imported = time.perf_counter()
out = flash_attention(*leaves, causal=causal, implementation=sys.argv[4])
torch.cuda.synchronize()
forward = time.perf_counter()
out.sum().backward()
torch.cuda.synchronize()
backward = time.perf_counter()
flash_attention(*(x.detach()[:, :, :2048] for x in leaves), causal=causal,
                implementation=sys.argv[4])
torch.cuda.synchronize()
other_length = time.perf_counter()
print(json.dumps({
    "import torch": torch_ready - started,
    "import": imported - torch_ready,
    "forward": forward - imported,
    "backward": backward - forward,
    "both": backward - imported,
    "forward, other length": other_length - backward,
}))
"""


def first_call(head_dim: int, dtype: str, causal: bool, name: str) -> list[dict[str, Any]]:
    """The first calls of one new process without anything in Triton's disk cache."""
    row = {"head_dim": head_dim, "dtype": dtype, "causal": causal, "implementation": name}
    implementation = {OURS: "auto", PORTABLE: "triton"}[name]
    with tempfile.TemporaryDirectory() as cache:
        child = subprocess.run(
            [sys.executable, "-c", FIRST_CALL, str(head_dim), dtype, str(causal), implementation],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        return [row | {"note": child.stderr[-200:]}]
    seconds = json.loads(child.stdout.splitlines()[-1])
    return [row | {"pass": which, "ms": s * 1e3} for which, s in seconds.items()]


def first_call_rows() -> Iterator[dict[str, Any]]:
    """All kinds, three processes at a time."""
    kinds = [(64, "bfloat16", True), (128, "bfloat16", False), (128, "float32", True)]
    calls = [(*kind, name) for name in (OURS, PORTABLE) for kind in kinds]
    with ThreadPoolExecutor(3) as pool:
        for rows in pool.map(lambda call: first_call(*call), calls):
            yield from rows


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Rows of a file: one JSON object per line, or one list of them."""
    text = path.read_text() if path.exists() else ""
    if text.startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a run need not measure again."""
    fields = [field.name for field in dataclasses.fields(Case)]
    where = ("set", "implementation", "gpu", "torch", "triton", "commit")
    return tuple(row.get(key) for key in (*fields, *where))


def run(arguments: argparse.Namespace) -> int:
    """Measures, and appends each case's rows."""
    started = time.monotonic()
    where = environment(arguments.commit)
    done = {identity(row) for row in rows_in(arguments.rows)}
    sets = SETS if "all" in arguments.set else arguments.set
    # Backward is timed alone, over one graph that is kept; compiled functions then may not reuse
    # the memory of what they saved.
    torch._functorch.config.donated_buffer = False

    def wanted(name: str, case: Case) -> dict[str, Callable[[], Attention]]:
        row = {"set": name, **dataclasses.asdict(case), **where}
        return {
            implementation: make
            for implementation, make in implementations(name, case).items()
            if arguments.only is None or any(part in implementation for part in arguments.only)
            if identity(row | {"implementation": implementation}) not in done
        }

    def save(name: str, rows: Iterator[dict[str, Any]]) -> None:
        complete = list(rows)  # a case is saved whole, or measured again
        with arguments.rows.open("a") as file:
            for row in complete:
                file.write(json.dumps({"set": name, **row, **where}) + "\n")
                print_row(row)

    cases = [(name, case) for name in CASES if name in sets for case in CASES[name]()]
    cases = [(name, case) for name, case in cases if wanted(name, case)]
    flexible = {case for name, case in cases if FLEX in wanted(name, case)}
    if arguments.jobs > 1 and flexible:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
            for future in as_completed([pool.submit(compile_flex, case) for case in flexible]):
                failure = future.exception() or future.result()
                if failure:
                    print(failure, flush=True)
        print(f"FlexAttention compiled after {time.monotonic() - started:.0f} s", flush=True)
    others: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "host": host_rows,
        "first-call": first_call_rows,
    }
    for name, rows in others.items():
        known = {key[len(dataclasses.fields(Case))] for key in done if key[-1] == where["commit"]}
        if name in sets and name not in known:
            print(f"-- {name} ({time.monotonic() - started:.0f} s)", flush=True)
            save(name, rows())
    for name, case in cases:
        if time.monotonic() - started > arguments.seconds:
            print("out of time: run again to continue", flush=True)
            return 3
        print(f"-- {name}: {case} ({time.monotonic() - started:.0f} s)", flush=True)
        save(name, measure(case, wanted(name, case), arguments.rounds, arguments.rep))
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def print_row(row: dict[str, Any]) -> None:
    """One line of progress."""
    figure = f"{row['ms']:10.3f} ms" if "ms" in row else f"           {row['note']}"
    print(f"    {row['implementation']:40s} {row.get('pass', ''):25s} {figure}", flush=True)


def frame_of(paths: list[Path]) -> Any:
    """The timed cells of all files as a table."""
    import pandas as pd

    rows = [row for path in paths for row in rows_in(path) if row["set"] in CASES and "ms" in row]
    frame = pd.DataFrame(rows)
    frame["mask"] = frame["causal"].map({True: "causal", False: "full"})
    frame["problem"] = (
        frame["batch"].astype(str) + " × " + frame["heads"].astype(str) + " × "
        + frame["length"].astype(str)
    )  # fmt: skip
    return frame


CELL = ["dtype", "head_dim", "mask", "length", "problem"]


def lost_cells(frame: Any, factor: float) -> str:
    """A list of the passes in which ours takes more than ``factor`` times a peer's time."""
    times = frame.pivot_table(
        index=[*CELL, "pass"], columns="implementation", values="ms", aggfunc="median"
    )
    lines = []
    for ours in (OURS, PORTABLE):
        for peer in (FLASH, EFFICIENT, FLEX, CUDNN, FLASH_4):
            if ours not in times or peer not in times:
                continue
            both = times[[ours, peer]].dropna()
            slower = both[both[ours] > factor * both[peer]]
            lines.append(f"{ours} against {peer}: slower in {len(slower)} of {len(both)} cells")
            for index, row in slower.iterrows():
                cell = ", ".join(map(str, index))
                lines.append(f"- {cell}: {row[ours]:.3f} against {row[peer]:.3f} ms")
            lines.append("")
    return "\n".join(lines)


BEGIN = "<!-- measured: scripts/bench_attention.py report writes what is between these marks -->\n"
END = "<!-- end of measured -->\n"


def markdown(frame: Any) -> str:
    """All cells: forward / backward / both in milliseconds, implementations side by side."""
    keys = [*CELL, "implementation"]
    wide = frame.pivot_table(index=keys, columns="pass", values="ms", aggfunc="median")
    wide = wide[list(PASSES)].map(lambda ms: f"{ms:.3f}")
    cells = wide.agg(" / ".join, axis=1).unstack("implementation").fillna("–")
    cells = cells.reset_index().drop(columns="length")
    return str(cells.to_markdown(index=False)) + "\n"


def report(arguments: argparse.Namespace) -> int:
    """Table, plot and lost cells from saved rows."""
    frame = frame_of(arguments.rows)
    if arguments.table:
        arguments.table.write_text(markdown(frame))
    if arguments.readme:
        text = arguments.readme.read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        table = f"{before}{BEGIN}\n{markdown(frame)}\n{END}{after}"
        arguments.readme.write_text(table)
    if arguments.lost:
        arguments.lost.write_text(lost_cells(frame, arguments.factor))
    if arguments.plot:
        draw(frame, arguments.plot)
    return 0


def draw(frame: Any, path: Path) -> None:
    """TFLOP/s of forward + backward over the length, one panel for head_dim and mask."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    frame = frame[(frame["pass"] == "both") & (frame["set"] == "lengths")]
    panels = sorted({(d, m) for d, m in zip(frame["head_dim"], frame["mask"], strict=True)})
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False
    )
    for axis, (head_dim, mask) in zip(axes[0], panels, strict=True):
        panel = frame[(frame["head_dim"] == head_dim) & (frame["mask"] == mask)]
        for name, line in panel.groupby("implementation"):
            line = line.sort_values("length")
            axis.plot(line["length"], line["tflops"], marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="sequence length", title=f"head_dim {head_dim}, {mask}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)  # shared
    axes[0][0].set_ylabel("forward + backward, TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(f"{frame['gpu'].iloc[0]}, bf16, 16,384 tokens in all", fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("rows", type=Path, help="JSON lines are appended to this file")
    runner.add_argument("--set", nargs="+", choices=[*SETS, "all"], default=["leaderboard"])
    runner.add_argument("--only", nargs="+", help="parts of implementation names")
    runner.add_argument("--rounds", type=int, default=4)
    runner.add_argument("--rep", type=int, default=50, help="milliseconds per round and pass")
    runner.add_argument("--jobs", type=int, default=8, help="processes that compile FlexAttention")
    runner.add_argument("--seconds", type=float, default=float("inf"), help="start no case later")
    runner.add_argument("--commit", help="of the code that is measured, where git cannot say it")
    runner.set_defaults(command=run)
    reporter = commands.add_parser("report", help="table, plot and lost cells from saved rows")
    reporter.add_argument("rows", type=Path, nargs="+")
    reporter.add_argument("--table", type=Path)
    reporter.add_argument("--readme", type=Path, help="file whose marked part is rewritten")
    reporter.add_argument("--plot", type=Path)
    reporter.add_argument("--lost", type=Path, help="cells in which a peer is faster")
    reporter.add_argument("--factor", type=float, default=1.0, help="that still counts as a tie")
    reporter.set_defaults(command=report)
    arguments = parser.parse_args()
    return int(arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
