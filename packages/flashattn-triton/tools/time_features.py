"""Times each optional feature of ``flash_attention`` in turns with the call without it.

    python packages/flashattn-triton/tools/time_features.py features.jsonl [--features bias sinks]

A feature is added to a causal call of ``--batch`` rows of ``--tokens``. Its results are first
compared with the same call in fp32 on the tier "tiled", or, for derivatives beyond the first, with
the definition on two heads of the first row. What differs is a row with an error, and not timed.
Then the forward pass, and forward and backward pass together, are timed in turns with the plain
call; where the feature leaves the Hopper tier, with the plain call of the portable kernels too. A
row is written as soon as it is measured: medians in milliseconds, and ratios with their 95 %
interval; above 1 the feature costs time.

On a GPU ``--processes`` compile the kernels before, each for one feature, because compiling takes
longer than measuring. Nothing begins after ``--seconds``, of which compiling has six tenths; what
is left out is a row that says so. On a CPU the tool is only good to find out that it works:
``--tokens 64 --heads 2 --head-dim 16 --turns 3``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_harness.environment import describe, measured_on
from bench_harness.stats import ratio_interval
from bench_harness.timing import Samples, record_sample
from flashattn_triton import explain, flash_attention, largest_scores

SAMPLE_MS = 2.0  # what a sample takes at least on a GPU, by repeated calls
ROW_SECONDS = 4.0  # after which a row is measured no further
LEAST_TURNS = 5
# Root mean square error over the root mean square of what is right, at most. Products of bf16
# operands have 2e-3, derivatives of them 1e-2; a wrong mask has 0.1 and more.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-4}
DERIVATIVES = ("jvp", "double backward")

# The tensors that are differentiated, then ``implementation``, to the output.
Call = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A call with a feature, the call without it, and what either differentiates.

    ``tier`` and ``plain_tier`` compute them. ``passes``: rows of the table. ``beside``: a call that
    joins the one with the feature.
    """

    call: Call
    plain: Call
    leaves: tuple[Tensor, ...]
    plain_leaves: tuple[Tensor, ...]
    grad_out: Tensor
    tier: str
    plain_tier: str
    passes: tuple[str, ...]
    derivative: str | None = None
    beside: Call | None = None

    def step(self, direction: str) -> Callable[[], object]:
        """The timed step with the feature."""
        return lambda: self._results(direction, self.leaves, self.grad_out, "auto")

    def plain_step(self, direction: str, implementation: str = "auto") -> Callable[[], object]:
        """The timed step without it."""
        run = STEPS[direction]
        return lambda: run(self.plain, self.plain_leaves, self.grad_out, implementation)

    def _results(
        self, direction: str, leaves: Sequence[Tensor], grad_out: Tensor, implementation: str
    ) -> tuple[Tensor, ...]:
        results = STEPS[self.derivative or direction](self.call, leaves, grad_out, implementation)
        if self.beside is None:
            return results
        return *results, self.beside(*leaves, implementation=implementation)

    def error(self) -> float:
        """The largest relative error of all results.

        Raises:
            RuntimeError: it is above the limit.
        """
        leaves, grad_out = self.leaves, self.grad_out
        oracle = "tiled" if grad_out.is_cuda else "reference"
        if self.derivative is not None:  # which the tiled form computes on every tier
            leaves, oracle = tuple(x[:1, :2, :1024] for x in leaves), "reference"
            grad_out = grad_out[:1, :2, :1024]
        own, exact = (tuple(as_leaf(x, dtype) for x in leaves) for dtype in (None, torch.float32))
        results = self._results(self.passes[-1], own, grad_out, "auto")
        expected = self._results(self.passes[-1], exact, grad_out, oracle)
        limit, worst = LIMITS[leaves[0].dtype], 0.0
        for i, (x, right) in enumerate(zip(results, expected, strict=True)):
            error = float(relative_error(x.detach(), right.detach()))
            if not error <= limit:
                raise RuntimeError(
                    f"result {i} of {len(results)} differs from {oracle} in fp32 by "
                    f"{error:.1e}, more than {limit}"
                )
            worst = max(worst, error)
        return worst


def relative_error(x: Tensor, right: Tensor) -> Tensor:
    """Root mean square error over the root mean square of what is right."""
    error: Tensor = (x.float() - right.float()).norm() / right.float().norm().clamp_min(1e-20)
    return error


def as_leaf(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy in ``dtype``, or in its own, that is differentiated."""
    return x.detach().to(dtype or x.dtype).clone().requires_grad_()


def forward(
    call: Call, leaves: Sequence[Tensor], grad_out: Tensor, implementation: str = "auto"
) -> tuple[Tensor, ...]:
    """The output."""
    with torch.no_grad():
        return (call(*leaves, implementation=implementation),)


def both(
    call: Call, leaves: Sequence[Tensor], grad_out: Tensor, implementation: str = "auto"
) -> tuple[Tensor, ...]:
    """The output and the gradients."""
    out = call(*leaves, implementation=implementation)
    return out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))


def jvp(
    call: Call, leaves: Sequence[Tensor], grad_out: Tensor, implementation: str = "auto"
) -> tuple[Tensor, ...]:
    """Output and tangent, in the direction of the inputs themselves."""
    primals = tuple(x.detach() for x in leaves)
    results: tuple[Tensor, ...] = torch.func.jvp(
        lambda *x: call(*x, implementation=implementation), primals, primals[::-1]
    )
    return results


def double_backward(
    call: Call, leaves: Sequence[Tensor], grad_out: Tensor, implementation: str = "auto"
) -> tuple[Tensor, ...]:
    """Gradients of the squares of the gradients."""
    out = call(*leaves, implementation=implementation)
    first = torch.autograd.grad(out, leaves, grad_out.to(out.dtype), create_graph=True)
    return torch.autograd.grad([g.float().square().sum() for g in first], leaves)


STEPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "forward": forward, "both": both, "jvp": jvp, "double backward": double_backward,
}  # fmt: skip


def features(
    arguments: argparse.Namespace, device: torch.device
) -> dict[str, Callable[[], Feature]]:
    """What makes each feature's calls, by its name, in the order in which they are measured."""
    batch, heads, tokens = arguments.batch, arguments.heads, arguments.tokens
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    torch.manual_seed(0)
    shape = (batch, heads, tokens, arguments.head_dim)
    inputs = tuple(torch.randn(shape, **like).requires_grad_() for _ in range(3))
    grad_out = torch.randn(shape, **like)
    rows = torch.arange(tokens, device=device).expand(batch, tokens)
    both_passes = ("forward", "both")

    def plain(*leaves: Tensor, implementation: str) -> Tensor:
        return attend(leaves, implementation=implementation)

    def attend(leaves: Sequence[Tensor], **given: Any) -> Tensor:
        return flash_attention(*leaves, **{"causal": True, **given})

    def tier_of(**given: Any) -> str:
        return explain(*inputs, **{"causal": True, **given}).split()[1]

    def feature(call: Call, *, leaves: tuple[Tensor, ...] = inputs, **changes: Any) -> Feature:
        return Feature(**{
            "call": call, "plain": plain, "leaves": leaves, "plain_leaves": inputs,
            "grad_out": grad_out, "tier": tier_of(), "plain_tier": tier_of(),
            "passes": both_passes, **changes,
        })  # fmt: skip

    def added(*, passes: tuple[str, ...] = both_passes, **given: Any) -> Feature:
        learned = {
            name: given[name].requires_grad_() for name in ("bias", "sinks") if name in given
        }
        rest = {name: x for name, x in given.items() if name not in learned}

        def call(*leaves: Tensor, implementation: str) -> Tensor:
            own = dict(zip(learned, leaves[3:], strict=True))
            return attend(leaves[:3], implementation=implementation, **own, **rest)

        leaves = (*inputs, *learned.values())
        return feature(call, leaves=leaves, tier=tier_of(**given), passes=passes)

    def key_mask() -> Tensor:
        return torch.rand(batch, 1, 1, tokens, device=device) < 0.9

    def bias() -> Tensor:
        return torch.randn(1, heads, tokens, tokens, **like)

    def with_logsumexp() -> Feature:
        return feature(
            lambda *leaves, implementation: attend(
                leaves, return_lse=True, implementation=implementation
            )[0]
        )

    def with_maximum() -> Feature:
        def beside(*leaves: Tensor, implementation: str) -> Tensor:
            return largest_scores(*leaves[:2], causal=True, implementation=implementation)

        tier = tier_of()
        return feature(plain, beside=beside, tier="hopper, triton" if tier == "hopper" else tier)

    def derivative(name: str, direction: str) -> Feature:
        return feature(plain, derivative=name, passes=(direction,), tier="tiled")

    def cache(n_queries: int) -> Feature:
        lengths = torch.full((batch,), tokens, device=device)
        leaves = (inputs[0][:, :, -n_queries:], *inputs[1:])
        given = {"causal": "bottom-right"}
        return feature(
            lambda *leaves, implementation: attend(
                leaves, key_lengths=lengths, implementation=implementation, **given
            ),
            plain=lambda *leaves, implementation: attend(
                leaves, implementation=implementation, **given
            ),
            leaves=leaves,
            plain_leaves=leaves,
            passes=both_passes if n_queries == tokens else ("forward",),
        )

    return {
        "return_lse": with_logsumexp,
        "out_dtype=float32": lambda: added(out_dtype=torch.float32),
        "deterministic": lambda: added(passes=("both",), deterministic=True),
        "window": lambda: added(window=(tokens // 4, 0)),
        "sinks": lambda: added(sinks=torch.zeros(heads, **like)),
        "softcap": lambda: added(softcap=30.0),
        "alibi_slopes": lambda: added(alibi_slopes=torch.full((heads,), 0.01, device=device)),
        "document_ids, one": lambda: added(document_ids=rows * 0),
        "document_ids, eight": lambda: added(document_ids=rows * 8 // tokens),
        "document_ids, eight, max_documents": lambda: added(
            document_ids=rows * 8 // tokens, max_documents=8 * batch
        ),
        "key_lengths": lambda: cache(tokens),
        "key_lengths, one query": lambda: cache(1),
        "largest_scores": with_maximum,
        "key mask": lambda: added(mask=key_mask()),
        "mask": lambda: added(mask=torch.rand(1, 1, tokens, tokens, device=device) < 0.9),
        "bias": lambda: added(bias=bias()),
        "bias and key mask": lambda: added(bias=bias(), mask=key_mask()),
        "jvp": lambda: derivative("jvp", "forward"),
        "double backward": lambda: derivative("double backward", "both"),
    }


def measure(
    steps: Sequence[Callable[[], object]], turns: int, device: torch.device
) -> list[list[float]]:
    """Milliseconds of each step, turn by turn, in the order of ``steps``."""
    repeats = []
    for step in steps:
        once = Samples()
        for _ in range(3):  # the first may load a kernel
            with record_sample(once, device):
                step()
        least = min(once.device_ms or once.wall_ms)
        repeats.append(max(1, round(SAMPLE_MS / least)) if device.type == "cuda" else 1)
    samples = [Samples() for _ in steps]
    end = time.monotonic() + ROW_SECONDS
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.monotonic() > end:
            break
        order = range(len(steps))
        for i in order if turn % 2 == 0 else reversed(order):
            with record_sample(samples[i], device, calls=repeats[i]):
                for _ in range(repeats[i]):
                    steps[i]()
    return [each.device_ms or each.wall_ms for each in samples]


def rows_of(feature: Feature, direction: str, turns: int, device: torch.device) -> dict[str, Any]:
    """Medians in milliseconds, and ratios to the plain call, and to that of the same tier."""
    steps = [feature.step(direction), feature.plain_step(direction)]
    elsewhere = (feature.tier, feature.plain_tier) == ("triton", "hopper")
    if elsewhere:
        steps.append(feature.plain_step(direction, "triton"))
    own, plain, *portable = measure(steps, turns, device)
    row: dict[str, Any] = {"ms": statistics.median(own), "plain_ms": statistics.median(plain)}
    row["ratio"], row["ratio_low"], row["ratio_high"] = ratio_interval(own, plain)
    row |= {"samples_ms": own, "plain_samples_ms": plain}
    for samples in portable:
        row["same_tier_ms"] = statistics.median(samples)
        row["same_tier_ratio"], *_ = ratio_interval(own, samples)
        row["same_tier_samples_ms"] = samples
    return row


def compile_kernels(arguments: argparse.Namespace, name: str) -> None:
    """Runs one feature once in this process, which leaves its kernels in Triton's cache."""
    made = features(arguments, torch.device("cuda"))
    feature = made["return_lse" if name.startswith("plain") else name]()
    for direction in feature.passes:
        if name == "plain, portable":
            feature.plain_step(direction, "triton")()
            continue
        feature.step(direction)()
        feature.plain_step(direction)()
    torch.cuda.synchronize()


def compiled(arguments: argparse.Namespace, names: Sequence[str], end: float) -> dict[str, str]:
    """Compiles in other processes until ``end``; what failed or is not ready, by feature."""
    wanted = ["plain, portable", *(name for name in names if name not in DERIVATIVES)]
    problems = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        tasks = {name: pool.apply_async(compile_kernels, (arguments, name)) for name in wanted}
        for name, task in tasks.items():
            try:
                task.get(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                problems[name] = "its kernels were not compiled in time"
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                problems[name] = f"{type(error).__name__}: {error}"
    return problems


def main(given: list[str] | None = None) -> None:
    """Measures, writes rows, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--features", nargs="+", help="only these")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20, help="samples of either call")
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing begins after them")
    parser.add_argument(
        "--processes", type=int, default=min(16, os.cpu_count() or 1), help="compile; 0 for none"
    )
    parser.add_argument("--commit", help="of the rows, where there is no repository")
    arguments = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    made = features(arguments, device)
    unknown = set(arguments.features or ()) - set(made)
    if unknown:
        parser.error(f"--features must be among {', '.join(made)}, but got {', '.join(unknown)}.")
    names = arguments.features or list(made)
    machine = describe()
    commit = arguments.commit or (machine["git"] or {}).get("commit")
    about = {
        "experiment": "attention-options", "commit": commit, "measured_on": measured_on(machine),
        "config": {
            "batch": arguments.batch, "heads": arguments.heads, "tokens": arguments.tokens,
            "head_dim": arguments.head_dim,
        },
    }  # fmt: skip
    problems: dict[str, str] = {}
    if device.type == "cuda" and arguments.processes:
        problems = compiled(arguments, names, started + 0.6 * arguments.seconds)
        print(f"compiled after {time.monotonic() - started:.0f} s; {problems}", flush=True)
    for name in names:
        row: dict[str, Any] = {"feature": name}
        try:
            if name in problems:
                raise RuntimeError(problems[name])
            if time.monotonic() - started > arguments.seconds:
                raise RuntimeError(f"not measured within {arguments.seconds:.0f} s")
            feature = made[name]()
            error = feature.error()
            for direction in feature.passes:
                row = {"feature": name, "pass": direction, "tier": feature.tier, "error_rms": error}
                row |= rows_of(feature, direction, arguments.turns, device)
                write(arguments.rows, row, about)
        except (RuntimeError, ValueError, TypeError) as error:  # what does not run is a row too
            wrong = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            write(arguments.rows, {"feature": name, **wrong}, about)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def write(path: Path, row: dict[str, Any], about: dict[str, Any]) -> None:
    """Appends a row as the pages of the repository read it, and prints it."""
    label = ", ".join([row["feature"], *([row["pass"]] if "pass" in row else [])])
    with path.open("a") as file:
        file.write(json.dumps({"case_key": label, "label": label, **about, "rows": [row]}) + "\n")
    if "error" in row:
        print(f"{label:44} {row['error'].splitlines()[0]}", flush=True)
        return
    interval = (
        "" if row["ratio_low"] is None else f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
    )
    same_tier = f", {row['same_tier_ratio']:.3f} of triton" if "same_tier_ratio" in row else ""
    print(
        f"{label:44} {row['plain_ms']:8.3f} -> {row['ms']:8.3f} ms, "
        f"{row['ratio']:.3f}{interval}{same_tier}; {row['tier']}, error {row['error_rms']:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
