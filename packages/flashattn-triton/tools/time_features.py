"""Times each optional feature of ``flash_attention`` in turns with the call without it.

    python packages/flashattn-triton/tools/time_features.py features.jsonl [--features bias sinks]

A feature is added to a causal call, ``--batch`` rows of ``--tokens``, and both are timed in turns:
the forward pass, and forward and backward pass together. A row is written as soon as it is
measured: medians in milliseconds, and their ratio with its 95 % interval; above 1 the feature
costs time. What has only one of the two passes has one row. On a GPU ``--processes`` compile the
kernels before, each for one feature, because compiling takes longer than measuring. On a CPU the
tool is only good to find out that it works: ``--tokens 64 --heads 2 --head-dim 16 --turns 3``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_harness.environment import describe, measured_on
from bench_harness.stats import ratio_interval
from bench_harness.timing import Samples, record_sample
from flashattn_triton import flash_attention, largest_scores

SAMPLE_MS = 2.0  # what a sample takes at least on a GPU, by repeated calls


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A call with a feature, the call without it, and what both differentiate.

    Steps are made from ``call`` and ``plain`` unless ``forward`` or ``both`` is one already.
    """

    call: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    plain_leaves: tuple[Tensor, ...]
    passes: tuple[str, ...] = ("forward", "both")
    forward: Callable[[], object] | None = None
    both: Callable[[], object] | None = None

    def steps(self, direction: str) -> tuple[Callable[[], object], Callable[[], object]]:
        """The plain step and the one with the feature."""
        if direction == "forward":
            return without_gradient(self.plain), self.forward or without_gradient(self.call)
        with_feature = self.both or gradients(self.call, self.leaves)
        return gradients(self.plain, self.plain_leaves), with_feature


def without_gradient(call: Callable[[], Tensor]) -> Callable[[], object]:
    """The forward pass."""
    return torch.no_grad()(call)


def gradients(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    """Both passes."""
    ones = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, ones)


def features(
    arguments: argparse.Namespace, device: torch.device
) -> dict[str, Callable[[], Feature]]:
    """What makes each feature's calls, by its name; the cheapest ones to compile come first."""
    batch, heads, tokens = arguments.batch, arguments.heads, arguments.tokens
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    torch.manual_seed(0)
    shape = (batch, heads, tokens, arguments.head_dim)
    inputs = tuple(torch.randn(shape, **like).requires_grad_() for _ in range(3))
    rows = torch.arange(tokens, device=device).expand(batch, tokens)

    def plain() -> Tensor:
        return flash_attention(*inputs, causal=True)

    def added(
        *learned: str, passes: tuple[str, ...] = ("forward", "both"), **given: Any
    ) -> Feature:
        leaves = (*inputs, *(given[name].requires_grad_() for name in learned))
        call = lambda: flash_attention(*inputs, causal=True, **given)  # noqa: E731
        return Feature(call=call, plain=plain, leaves=leaves, plain_leaves=inputs, passes=passes)

    def key_mask() -> Tensor:
        return torch.rand(batch, 1, 1, tokens, device=device) < 0.9

    def bias() -> Tensor:
        return torch.randn(1, heads, tokens, tokens, **like)

    def with_logsumexp() -> Feature:
        def call() -> Tensor:
            return flash_attention(*inputs, causal=True, return_lse=True)[0]

        return replace(added(), call=call)

    def with_maximum() -> Feature:
        def call() -> Tensor:
            largest_scores(*inputs[:2], causal=True)
            return plain()

        return replace(added(), call=call)

    def jvp() -> Feature:
        directions = tuple(torch.randn_like(x) for x in inputs)

        def forward() -> object:
            attend = lambda *x: flash_attention(*x, causal=True)  # noqa: E731
            return torch.func.jvp(attend, tuple(x.detach() for x in inputs), directions)

        return replace(added(passes=("forward",)), forward=forward)

    def double_backward() -> Feature:
        def both() -> object:
            first = torch.autograd.grad(plain().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

        return replace(added(passes=("both",)), both=both)

    def cache(n_queries: int) -> Feature:
        lengths = torch.full((batch,), tokens, device=device)
        query = inputs[0][:, :, -n_queries:]
        given = {"causal": "bottom-right"}
        return replace(
            added(passes=("forward", "both") if n_queries == tokens else ("forward",)),
            call=lambda: flash_attention(query, *inputs[1:], key_lengths=lengths, **given),
            plain=lambda: flash_attention(query, *inputs[1:], **given),
        )

    def learned_bias(**given: Any) -> Feature:
        return added("bias", bias=bias(), **given)

    return {
        "return_lse": with_logsumexp,
        "out_dtype=float32": lambda: added(out_dtype=torch.float32),
        "deterministic": lambda: added(passes=("both",), deterministic=True),
        "window": lambda: added(window=(tokens // 4, 0)),
        "sinks": lambda: added("sinks", sinks=torch.zeros(heads, **like)),
        "softcap": lambda: added(softcap=30.0),
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
        "bias": learned_bias,
        "bias and key mask": lambda: learned_bias(mask=key_mask()),
        "jvp": jvp,
        "double backward": double_backward,
    }


def measure(feature: Feature, direction: str, turns: int, device: torch.device) -> dict[str, Any]:
    """Medians of both, in milliseconds, and their ratio."""
    steps = feature.steps(direction)
    samples = Samples(), Samples()
    repeats = []
    for step in steps:
        once = Samples()
        for _ in range(3):  # the first compiles
            with record_sample(once, device):
                step()
        least = min(once.device_ms or once.wall_ms)
        repeats.append(max(1, round(SAMPLE_MS / least)) if device.type == "cuda" else 1)
    for turn in range(turns):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            with record_sample(samples[i], device, calls=repeats[i]):
                for _ in range(repeats[i]):
                    steps[i]()
    plain, own = (each.device_ms or each.wall_ms for each in samples)
    ratio, low, high = ratio_interval(own, plain)
    return {
        "ms": statistics.median(own), "plain_ms": statistics.median(plain), "ratio": ratio,
        "ratio_low": low, "ratio_high": high, "samples_ms": own, "plain_samples_ms": plain,
    }  # fmt: skip


def compile_kernels(arguments: argparse.Namespace, name: str) -> None:
    """Runs one feature once in this process, which leaves its kernels in Triton's cache."""
    feature = features(arguments, torch.device("cuda"))[name]()
    for direction in feature.passes:
        for step in feature.steps(direction):
            step()
    torch.cuda.synchronize()


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
    parser.add_argument("--processes", type=int, default=8, help="that compile; 0 for none")
    arguments = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    made = features(arguments, device)
    unknown = set(arguments.features or ()) - set(made)
    if unknown:
        parser.error(f"--features must be among {', '.join(made)}, but got {', '.join(unknown)}.")
    names = arguments.features or list(made)
    if device.type == "cuda" and arguments.processes:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
            for name in names:
                pool.submit(compile_kernels, arguments, name)
    same = {
        "batch": arguments.batch, "heads": arguments.heads, "tokens": arguments.tokens,
        "head_dim": arguments.head_dim, "measured_on": measured_on(describe()),
    }  # fmt: skip
    for name in names:
        row: dict[str, Any] = {"feature": name}
        try:
            feature = made[name]()
            for direction in feature.passes:
                found = measure(feature, direction, arguments.turns, device)
                row = {"feature": name, "pass": direction, **found, **same}
                write(arguments.rows, row)
        except (RuntimeError, ValueError) as error:  # what does not run is a row too
            write(arguments.rows, {"feature": name, "error": str(error), **same})
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def write(path: Path, row: dict[str, Any]) -> None:
    """Appends a row, and prints it."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if "error" in row:
        print(f"{row['feature']:36} {row['error'].splitlines()[0]}", flush=True)
        return
    interval = (
        "" if row["ratio_low"] is None else f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
    )
    print(
        f"{row['feature']:36} {row['pass']:8} {row['plain_ms']:8.3f} -> {row['ms']:8.3f} ms, "
        f"{row['ratio']:.3f}{interval}",
        flush=True,
    )


if __name__ == "__main__":
    main()
