"""Compares implementations of attention with the reference, and times their passes in turns."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from bench_harness.attentions import find, forward_only, ran, stores_scores
from bench_harness.core import CaseSkipped, Row
from bench_harness.experiments.attention_problem import Problem, learned
from bench_harness.experiments.attention_proof import errors, exact
from bench_harness.sampling import Enough
from bench_harness.timing import Samples, record_sample, synchronize

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from bench_harness.attentions import Attend

PASSES = ("forward", "training forward", "backward", "forward+backward", "forward+sum+backward")
CLOCKS = ("device", "wall", "host")
#: Largest error allowed of output and gradients, as a share of the reference's largest value: one
#: rounding to the dtype, of inputs and of probabilities.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
#: Attention that stores its scores also rounds them to the dtype, before their exponential.
_STORED_SCORES = 4
#: Calls in a row, without waiting for the device, of one sample of the host's own time.
_HOST_CALLS = 50


class Attempts:
    """Implementations on one problem: those that can be timed, and why the others were excluded."""

    def __init__(self, names: Sequence[str], problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.tensors, self.settings = problem.tensors(device), problem.settings(device)
        #: What a backward pass gives gradients.
        self.leaves = [*self.tensors[:3], *learned(self.settings).values()]
        self.calls: dict[str, Callable[[], Tensor]] = {}
        self.about: dict[str, Row] = {name: {} for name in names}
        self.ended: dict[str, Row] = {}

    @contextmanager
    def ending(self, name: str) -> Iterator[None]:
        """Excludes an implementation that fails inside; lack of memory ends the whole case."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (CaseSkipped, ImportError, NotImplementedError, ValueError) as error:
            self._end(name, "skipped", str(error))
        except Exception as error:  # noqa: BLE001 - whatever stops one of them, the others go on
            self._end(name, "error", f"{type(error).__name__}: {error}")

    def _end(self, name: str, status: str, text: str) -> None:
        self.calls.pop(name, None)
        self.ended[name] = {"status": status, "error": " ".join(text.split())[:300]}

    def prove(self) -> None:
        """Compares every implementation with the fp32 reference on this problem."""
        wanted = exact(self.problem, self.tensors, self.settings)
        for name in self.about:
            with self.ending(name):
                attend = self.calls[name] = _call(name, self.tensors, self.settings)
                rounded = _STORED_SCORES if stores_scores(name) else 1
                limit = rounded * TOLERANCE[self.problem.dtype]
                self.about[name] |= errors(
                    attend,
                    self.problem,
                    self.tensors,
                    self.settings,
                    wanted,
                    limit,
                    forward_only=forward_only(name),
                )
                self.about[name]["saved_bytes"] = _saved_bytes(attend, self.leaves, self.device)
                if name.startswith("naive") and self.problem.is_plain:
                    self.about[name] |= self.problem.predicted_bytes()
                if name.startswith("flashattn-triton"):
                    self.about[name] |= _plan(name, self.problem, self.tensors, self.settings)
                if kernel := ran(name, *self.tensors[:3], **self.settings):
                    self.about[name]["ran"] = kernel

    def passes(self, name: str, wanted: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The passes of an implementation; backward alone reuses one graph."""
        import torch

        attend, (*_, grad_out) = self.calls[name], self.tensors
        for each in wanted:
            if forward_only(name) and each != "forward":
                continue
            if each == "forward":
                yield each, torch.no_grad()(attend)
            elif each == "training forward":
                yield each, attend
            elif each == "backward":
                out = attend()
                yield each, lambda out=out: out.backward(grad_out, retain_graph=True)  # type: ignore[misc]
                del out
            elif each == "forward+backward":
                yield each, lambda: attend().backward(grad_out)
            else:
                yield each, lambda: attend().sum().backward()


def _call(
    name: str, tensors: Sequence[Tensor], settings: Mapping[str, Any]
) -> Callable[[], Tensor]:
    """An implementation as a call without arguments.

    Raises:
        CaseSkipped: it has no argument for something that the problem asks for.
    """
    attend: Attend = find(name)
    try:
        inspect.signature(attend).bind(*tensors[:3], **settings)
    except TypeError as error:
        raise CaseSkipped(
            f"the problem must be one that {name} takes, but got an error: {error}. Leave it out "
            "of variants."
        ) from error
    return lambda: attend(*tensors[:3], **settings)


def _plan(
    name: str, problem: Problem, tensors: Sequence[Tensor], settings: Mapping[str, Any]
) -> Row:
    """Which tier of flashattn-triton runs, and why, as ``flashattn_triton.choose`` says.

    Nothing for packed sequences and for documents, which the package packs.
    """
    from flashattn_triton import choose
    from flashattn_triton.mask_and_bias import NAMES
    from flashattn_triton.problem import new_problem

    if problem.lengths or problem.feature == "documents":
        return {}
    options = new_problem(
        head_dim=problem.head_dim,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        deterministic=problem.deterministic,
    )
    named = {"portable": "triton", "hopper": "hopper", "tiled": "tiled"}
    asked: Any = named.get(name.rpartition("-")[2], "auto")
    given = tuple(each for each in NAMES if each in settings)
    query, key, value, _ = tensors
    found = choose(query, key, value, options, implementation=asked, tensors=given)
    return {"plan": {"tier": found.tier, "why": found.reason}, "ran": found.tier}


def _saved_bytes(
    attend: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device
) -> int:
    """Bytes that forward leaves allocated: its output and what autograd keeps, inputs left out."""
    import torch

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        out = attend()
        held = torch.cuda.memory_allocated(device) - before
        del out
        return held
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(attend())
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def time_in_turns(
    everyone: Sequence[Attempts], config: Mapping[str, Any], progress: Callable[[str], None]
) -> list[dict[tuple[str, str], Samples]]:
    """Times the passes of all implementations on some problems in turns, to and fro.

    Further turns follow until every interval is narrow, or the case's seconds for it are over.

    Returns:
        For each of ``everyone`` the samples by implementation and pass.
    """
    measured: list[dict[tuple[str, str], Samples]] = [{} for _ in everyone]
    rounds, lengths = config["rounds"], max(1, len(config["sequences"]))
    least = -(-config["samples"] // rounds)
    enough, round_number = None, 0
    while enough is None or not enough.reached(
        samples.wall_ms for of_problem in measured for samples in of_problem.values()
    ):
        order = [(i, name) for i, attempts in enumerate(everyone) for name in attempts.calls]
        for i, name in order if round_number % 2 == 0 else order[::-1]:
            attempts = everyone[i]
            progress(f"{attempts.problem.name}, round {round_number + 1}: {name}")
            with attempts.ending(name):
                for each, call in attempts.passes(name, config["passes"]):
                    samples = measured[i].setdefault((name, each), Samples())
                    samples.wall_ms += sampled(
                        call,
                        attempts.device,
                        clock=config["clock"],
                        leaves=attempts.leaves,
                        least=least,
                        warmup_ms=config["warmup_ms"] / rounds,
                        rep_ms=config["rep_ms"] / rounds,
                    )
        round_number += 1
        if round_number == rounds:
            enough = Enough(config, parts=lengths)
    return [
        {key: samples for key, samples in found.items() if key[0] not in attempts.ended}
        for attempts, found in zip(everyone, measured, strict=True)
    ]


def sampled(
    call: Callable[[], object],
    device: torch.device,
    *,
    clock: Literal["device", "wall", "host"],
    leaves: Sequence[Tensor],
    least: int,
    warmup_ms: float,
    rep_ms: float,
) -> list[float]:
    """Milliseconds of single calls; gradients of ``leaves`` are dropped before each of them.

    Args:
        clock: "device" is ``triton.testing.do_bench``, as on the public leaderboard: events, L2
            cache overwritten before every call; a CPU uses "wall", the host's clock around a
            synchronised call. "host" is the time until a call returns, averaged over a block.
        least: samples, however long they take.
        rep_ms: measuring goes on until so much time has been measured.
    """
    if clock == "device" and device.type == "cuda":
        from triton.testing import do_bench

        def benchmark(milliseconds: float) -> list[float]:
            return list(
                do_bench(
                    call,
                    warmup=warmup_ms,
                    rep=milliseconds,
                    grad_to_none=list(leaves),
                    return_mode="all",
                )
            )

        readings = benchmark(rep_ms)
        while len(readings) < least:
            readings += benchmark((least - len(readings)) * max(readings))
        return readings
    calls = _HOST_CALLS if clock == "host" else 1
    samples = Samples()
    kept = time.perf_counter() + warmup_ms / 1e3
    end = kept + rep_ms / 1e3
    while len(samples.wall_ms) < least or time.perf_counter() < end:
        for leaf in leaves:
            leaf.grad = None
        if clock == "host":
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            samples.wall_ms.append(1e3 * (time.perf_counter() - begin) / calls)
        else:
            with record_sample(samples, device):
                call()
        if time.perf_counter() < kept:
            samples.wall_ms.clear()
    return samples.wall_ms


def timer_overhead_ms(clock: str, device: torch.device) -> float:
    """The median time that the clock reports for a call that does nothing."""
    nothing = sampled(
        lambda: None,
        device,
        clock=clock,  # type: ignore[arg-type]
        leaves=(),
        least=20,
        warmup_ms=1,
        rep_ms=5,
    )
    return sorted(nothing)[len(nothing) // 2]
