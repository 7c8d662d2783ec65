"""Measures attention: one problem, the proof beside an fp32 reference, and passes timed in turns.

A problem has at most one feature, which adds a keyword argument of ``flash_attention`` to the call:

- "sinks": a learned logit per head in the softmax's denominator;
- "alibi": ALiBi's slopes, one per head, as constants (arXiv:2108.12409);
- "bias": a learned bias of (1, heads, sequence, sequence), shared by the batch;
- "deterministic": gradients must be the same, bit for bit, from run to run.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench_harness import attentions
from bench_harness.core import CaseSkipped, Config, Progress, Row
from bench_harness.roofline import attention_flops
from bench_harness.timing import Samples, in_turns, record_sample, synchronize
from bench_harness.workload import ran

#: Scores that the reference holds at a time, 64 MB in fp32.
_SCORES = 2**24
#: Largest error allowed of output and gradients, as a share of the reference's largest value: one
#: rounding to the dtype, of inputs and of probabilities.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
#: Attention that stores its scores also rounds them to the dtype, before their exponential.
_STORED_SCORES = 4
#: Calls in a row, without waiting for the device, of one sample of the host's own time.
_HOST_CALLS = 50
#: Pauses: times what ran before, at least so many seconds; bytes overwritten before each call.
_PAUSE, _SHORTEST_PAUSE, _CACHE = 4.0, 0.002, 2**28


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Attributes:
        kv_heads: key and value heads; they divide ``heads``.
        value_head_dim: of value and output.
        window: (left, right) visible keys beside the diagonal, None for no limit.
        lengths: of sequences packed one after another; the batch is 1 and ``sequence`` their sum.
        feature: one of :data:`FEATURES`; "deterministic" sets ``deterministic`` too.
    """

    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    value_head_dim: int
    dtype: str
    causal: bool
    window: attentions.Window | None = None
    softcap: float | None = None
    deterministic: bool = False
    lengths: tuple[int, ...] = ()
    feature: str = "plain"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random query, key and value that need gradients, and the output's gradient."""
        torch.manual_seed(0)

        def random(heads: int, width: int) -> Tensor:
            shape: tuple[int, ...] = (self.batch, heads, self.sequence, width)
            if self.lengths:
                shape = (self.sequence, heads, width)
            return torch.randn(
                shape, device=device, dtype=getattr(torch, attentions.DTYPES[self.dtype])
            )

        query = random(self.heads, self.head_dim).requires_grad_()
        key = random(self.kv_heads, self.head_dim).requires_grad_()
        value = random(self.kv_heads, self.value_head_dim).requires_grad_()
        return query, key, value, random(self.heads, self.value_head_dim)

    def options(self) -> Any:
        """The problem as flashattn-triton describes it, without tensors."""
        from flashattn_triton.problem import new_problem

        names = ("head_dim", "causal", "window", "softcap", "deterministic")
        return new_problem(**{name: getattr(self, name) for name in names})

    def settings(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of an implementation: ``causal``, and what is not the default."""
        given: dict[str, Any] = {"causal": self.causal}
        for name in ("window", "softcap", "deterministic"):
            if getattr(self, name) not in (None, False):
                given[name] = getattr(self, name)
        if self.lengths:
            starts = [0, *itertools.accumulate(self.lengths)]
            given["cu_seqlens"] = torch.tensor(starts, device=device, dtype=torch.int32)
            given["max_seqlen"] = max(self.lengths)
        return {**given, **self._feature_arguments(device)}

    def _feature_arguments(self, device: torch.device) -> dict[str, Tensor]:
        """The tensor that the feature adds to the call; what is learned requires a gradient."""
        torch.manual_seed(1)
        like: dict[str, Any] = {
            "device": device,
            "dtype": getattr(torch, attentions.DTYPES[self.dtype]),
        }
        if self.feature == "sinks":
            return {"sinks": torch.randn(self.heads, **like).requires_grad_()}
        if self.feature == "alibi":
            ranks = torch.arange(1, self.heads + 1, device=device, dtype=torch.float32)
            return {"alibi_slopes": torch.exp2(-8 * ranks / self.heads)}
        if self.feature == "bias":
            shape = (1, self.heads, self.sequence, self.sequence)
            return {"bias": torch.randn(shape, **like).requires_grad_()}
        return {}

    def flops(self, name_of_pass: str) -> int:
        """Operations of a pass; hidden scores are not counted."""
        names = ("batch", "heads", "head_dim", "value_head_dim", "causal", "window")
        shared = {name: getattr(self, name) for name in names}
        lengths = self.lengths or (self.sequence,)
        forward, backward = (
            sum(attention_flops(**shared, sequence=each, backward=is_backward) for each in lengths)
            for is_backward in (False, True)
        )
        return of_pass(name_of_pass, forward, backward)

    def least_bytes(self, name_of_pass: str) -> int:
        """Memory traffic that a pass cannot do without: its inputs and results, once each."""
        size = 4 if self.dtype == "fp32" else 2
        tokens = self.batch * self.sequence * size
        inputs = tokens * (self.heads + self.kv_heads) * self.head_dim
        inputs += tokens * self.kv_heads * self.value_head_dim
        if self.feature == "bias":
            inputs += self.heads * self.sequence**2 * size // (2 if self.causal else 1)
        output = tokens * self.heads * self.value_head_dim
        # Backward reads inputs, output and its gradient, and writes the inputs' gradients.
        return of_pass(name_of_pass, inputs + output, 2 * inputs + 2 * output)

    def predicted_bytes(self) -> Row:
        """What naive attention keeps for backward.

        The softmax output (B·H·S²), which both the softmax and the second product need; a causal
        mask (S² booleans); the output (B·H·S·E). Query, key and value exist anyway.
        """
        size = 4 if self.dtype == "fp32" else 2
        scores = self.batch * self.heads * self.sequence**2 * size
        output = self.batch * self.heads * self.sequence * self.value_head_dim * size
        return {"predicted_saved_bytes": scores + self.causal * self.sequence**2 + output}

    @property
    def name(self) -> str:
        """The problem's name within its case: its length, and its feature if it has one."""
        return f"length {self.sequence}" + f", {self.feature}" * (self.feature != "plain")

    @property
    def is_plain(self) -> bool:
        """Whether :meth:`predicted_bytes` holds: nothing but a mask and as many key heads."""
        special = self.window or self.softcap or self.lengths or self.feature != "plain"
        return not special and self.kv_heads == self.heads


def of_pass(name: str, forward: int, backward: int) -> int:
    """Operations or bytes of a pass, from those of forward and of backward."""
    alone = {"forward": forward, "training forward": forward, "backward": backward}
    return alone.get(name, forward + backward)


def learned(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments that have a gradient: sinks or a bias."""
    return {name: settings[name] for name in ("sinks", "bias") if name in settings}


def exact(
    problem: Problem, tensors: Sequence[Tensor], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Output and gradients of the heads that are checked, by the definition of attention in fp32.

    As many queries at a time as the memory for their scores allows.

    Returns:
        "out", "dq", "dk" and "dv", and "dsinks" or "dbias" where these are learned.
    """
    leaves = {
        name: _checked_heads(problem, name, x).detach().float().requires_grad_()
        for name, x in learned(settings).items()
    }
    given: dict[str, Any] = {name: settings.get(name) for name in ("causal", "window", "softcap")}
    if "alibi_slopes" in settings:
        given["alibi_slopes"] = _checked_heads(problem, "", settings["alibi_slopes"])
    names = ("dq", "dk", "dv", *(f"d{name}" for name in leaves))
    found: list[dict[str, Tensor]] = []
    for *tensors_of_part, grad_out in _checked(problem, tensors):
        q, k, v = (x.requires_grad_() for x in tensors_of_part)
        inputs = (q, k, v, *leaves.values())
        sums = [torch.zeros_like(x) for x in inputs]
        outs: list[Tensor] = []
        count = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        for first in range(0, q.shape[2], count):
            rows = slice(first, first + count)
            given |= {n: x[..., rows, :] if n == "bias" else x for n, x in leaves.items()}
            out = attentions.naive(q[:, :, rows], k, v, first=first, **given)
            for total, part in zip(
                sums, torch.autograd.grad(out, inputs, grad_out[:, :, rows]), strict=True
            ):
                total += part
            outs.append(out.detach())
        found.append({"out": torch.cat(outs, dim=2), **dict(zip(names, sums, strict=True))})
    # Several parts are packed sequences, which have no learned arguments.
    return {name: torch.cat([part[name] for part in found], dim=-2 if found[1:] else 0)
            for name in found[0]}  # fmt: skip


def errors(
    attend: Callable[[], Tensor],
    problem: Problem,
    tensors: Sequence[Tensor],
    settings: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    limit: float,
    *,
    forward_only: bool = False,
) -> Row:
    """Largest errors of output and gradients of the checked heads, as shares of the largest value.

    Raises:
        ArithmeticError: an error is too large, or a gradient is missing; nothing is timed then.
    """
    leaves = learned(settings)
    out = attend()
    if forward_only:
        parts = [o for *_, o in _checked(problem, (*tensors[:3], out))]
        return _within({"out": torch.cat(parts, dim=2)}, {"out": wanted["out"]}, limit)
    inputs = (*tensors[:3], *leaves.values())
    gradients = torch.autograd.grad(out, inputs, tensors[3], allow_unused=True)
    names = ("query", "key", "value", *leaves)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            raise ArithmeticError(f"{name} must have a gradient, but got none. It is not timed")
    pieces = list(_checked(problem, (*gradients[:3], out)))
    dq, dk, dv, out = (torch.cat(each, dim=2) for each in zip(*pieces, strict=True))
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    for name, gradient in zip(leaves, gradients[3:], strict=True):
        found[f"d{name}"] = _checked_heads(problem, name, gradient).float()
    return _within(found, wanted, limit)


def _within(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], limit: float) -> Row:
    """The errors as columns of a row; one that is larger than the limit is raised."""
    row: Row = {}
    for what, exactly in wanted.items():
        error = float((found[what] - exactly).abs().max() / exactly.abs().max())
        if not error <= limit:  # also catches NaN
            raise ArithmeticError(
                f"error of {what} must be at most {limit:g} of its largest "
                f"value, but got {error:.2e}. It is not timed"
            )
        row[f"error_{what}"] = error
    return row


def _heads(problem: Problem) -> tuple[int, int]:
    """How many query heads and key heads are checked, counted from the last.

    Those of the last key head; all of them for sinks, whose gradients are single numbers: the error
    of one that is small by chance says nothing.
    """
    if problem.feature == "sinks":
        return problem.heads, problem.kv_heads
    return problem.heads // problem.kv_heads, 1


def _checked(
    problem: Problem, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(query, key, value, output or its gradient) of the checked heads, in fp32.

    One part, of the last batch element, or of all of them if they share a gradient; or a part for
    each packed sequence.
    """
    group, keys = _heads(problem)
    heads = (group, keys, keys, group)
    if problem.lengths:
        for start, end in itertools.pairwise([0, *itertools.accumulate(problem.lengths)]):
            q, k, v, o = (
                x.detach()[start:end, -n:].transpose(0, 1)[None].float()
                for x, n in zip(tensors, heads, strict=True)
            )
            yield q, k, v, o
        return
    batch = slice(None) if problem.feature in ("sinks", "bias") else slice(-1, None)
    q, k, v, o = (
        x.detach()[batch, -n:].float().clone() for x, n in zip(tensors, heads, strict=True)
    )
    yield q, k, v, o


def _checked_heads(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """The part of a keyword argument, or of its gradient, that belongs to the checked heads."""
    group, _ = _heads(problem)
    return tensor[:, -group:] if name == "bias" else tensor[-group:]


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
        #: By implementation and pass.
        self.samples: dict[tuple[str, str], Samples] = {}

    @contextmanager
    def ending(self, name: str) -> Iterator[None]:
        """Excludes an implementation that fails inside; lack of memory ends the whole case."""
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
        given = (self.problem, self.tensors, self.settings)
        wanted = exact(*given)
        for name in self.about:
            with self.ending(name):
                attend = self.calls[name] = _call(name, self.tensors, self.settings)
                rounded = _STORED_SCORES if attentions.stores_scores(name) else 1
                limit = rounded * TOLERANCE[self.problem.dtype]
                self.about[name] |= errors(
                    attend, *given, wanted, limit, forward_only=attentions.forward_only(name)
                )
                self.about[name]["saved_bytes"] = _saved_bytes(attend, self.leaves, self.device)
                if name.startswith("naive") and self.problem.is_plain:
                    self.about[name] |= self.problem.predicted_bytes()
                if not self.problem.lengths:
                    options = self.problem.options()
                    kernel = ran(name, self.tensors[:3], options, self.settings)
                    self.about[name] |= {} if kernel is None else {"ran": kernel}

    def passes(self, name: str, wanted: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The passes of an implementation; backward alone reuses one graph."""
        attend, (*_, grad_out) = self.calls[name], self.tensors
        for each in wanted:
            if attentions.forward_only(name) and each != "forward":
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
    """An implementation as a call without arguments; skipped if the problem asks for more."""
    attend: attentions.Attend = attentions.find(name)
    with attentions.refusals(name, TypeError):
        inspect.signature(attend).bind(*tensors[:3], **settings)
    return lambda: attend(*tensors[:3], **settings)


def _saved_bytes(
    attend: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device
) -> int:
    """Bytes that forward leaves allocated: its output and what autograd keeps, inputs left out."""
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


def time_in_turns(everyone: Sequence[Attempts], config: Config, progress: Progress) -> None:
    """Times the passes of all implementations on some problems in turns."""
    rounds = config["rounds"]
    how: Row = {name: config[name] / rounds for name in ("warmup_ms", "rep_ms")}
    how |= {"clock": config["clock"], "least": -(-config["samples"] // rounds)}
    for number, order in in_turns(
        lambda: [(attempts, name) for attempts in everyone for name in attempts.calls],
        config,
        lambda: [samples.wall_ms for each in everyone for samples in each.samples.values()],
        least=rounds,
        parts=max(1, len(config["sequences"])),
    ):
        for attempts, name in order:
            progress(f"{attempts.problem.name}, round {number + 1}: {name}")
            with attempts.ending(name):
                for each, call in attempts.passes(name, config["passes"]):
                    samples = attempts.samples.setdefault((name, each), Samples())
                    taken = sampled(call, attempts.device, leaves=attempts.leaves, **how)
                    samples.wall_ms += taken
                    samples.note_gpu(attempts.device, len(taken))


def sampled(
    call: Callable[[], object],
    device: torch.device,
    *,
    clock: str,
    leaves: Sequence[Tensor],
    least: int,
    warmup_ms: float,
    rep_ms: float,
) -> list[float]:
    """Milliseconds of single calls; gradients of ``leaves`` are dropped before each of them.

    Args:
        clock: "device" is ``triton.testing.do_bench``, as on the public leaderboard: events, L2
            cache overwritten before every call; "cool" the same for two calls after each pause of
            four times as long, so that the GPU's power does not limit its clock. A CPU uses "wall"
            for both, the host's clock around a synchronised call. "host" is the time until a call
            returns, averaged over a block.
        least: samples, however long they take.
        rep_ms: measuring goes on until so much time has been measured.
    """
    if clock == "device" and device.type == "cuda":
        from triton.testing import do_bench

        bench = functools.partial(do_bench, call, warmup=warmup_ms, return_mode="all")
        readings: list[float] = bench(rep=rep_ms, grad_to_none=list(leaves))
        while len(readings) < least:
            more = (least - len(readings)) * max(readings)
            readings += bench(rep=more, grad_to_none=list(leaves))
        return readings
    if clock == "cool" and device.type == "cuda":
        return _after_pauses(call, leaves, least, (warmup_ms + rep_ms) / 1e3)
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


def _after_pauses(
    call: Callable[[], object], leaves: Sequence[Tensor], least: int, seconds: float
) -> list[float]:
    """Milliseconds of single calls: the second and third after each pause."""
    cache = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    readings: list[float] = []
    started, end = time.perf_counter(), time.perf_counter() + seconds
    while len(readings) < least or time.perf_counter() < end:
        time.sleep(max(_SHORTEST_PAUSE, _PAUSE * (time.perf_counter() - started)))
        started = time.perf_counter()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(3)]
        for begin, stop in events:
            for leaf in leaves:
                leaf.grad = None
            cache.zero_()
            begin.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        readings += [begin.elapsed_time(stop) for begin, stop in events[1:]]
    return readings


def timer_overhead_ms(clock: str, device: torch.device) -> float:
    """The median time that the clock reports for a call that does nothing."""
    times = {"least": 20, "warmup_ms": 1, "rep_ms": 5}
    return statistics.median(sampled(lambda: None, device, clock=clock, leaves=(), **times))


def measured(
    group: Sequence[Problem], config: Config, device: torch.device, progress: Progress
) -> list[Row]:
    """Measures problems in turns: a row per variant and pass, and one per excluded variant."""
    everyone = [Attempts(config["variants"], problem, device) for problem in group]
    for attempts in everyone:
        progress(f"{attempts.problem.name}: comparing with the reference")
        attempts.prove()
    time_in_turns(everyone, config, progress)
    clocks = {"device": "do_bench"} if device.type == "cuda" else {"device": "wall", "cool": "wall"}
    rows: list[Row] = []
    for attempts in everyone:
        problem = attempts.problem
        about: Row = {
            "batch": problem.batch,
            "sequence": problem.sequence,
            "length": f"s{problem.sequence}",
            "feature": problem.feature,
            "clock": clocks.get(config["clock"], config["clock"]),
        }
        rows += _rows([problem], attempts, about, attempts.about)
    del everyone, attempts
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def measured_over_lengths(
    problems: Sequence[Problem], config: Config, device: torch.device, progress: Progress
) -> list[Row]:
    """Times calls of many lengths one after another, with the host: a row per variant and pass.

    A library that plans, tunes or compiles for each length shows what that costs. The first time
    through all lengths is kept apart. Variants take turns, after a proof on the first length.
    """
    attempts = Attempts(config["variants"], problems[0], device)
    attempts.prove()
    inputs = [problem.tensors(device) for problem in problems]
    passes = [each for each in ("forward", "forward+backward") if each in config["passes"]]
    measured = attempts.samples
    for number, names in in_turns(
        lambda: attempts.calls,
        config,
        lambda: [each.wall_ms for each in measured.values()],
        least=config["samples"] + 1,
    ):
        for name in names:
            progress(f"{len(problems)} lengths, round {number + 1}: {name}")
            with attempts.ending(name):
                attend = attentions.find(name) if number == 0 else attempts.calls[name]
                attempts.calls[name] = attend
                for each in passes[:1] if attentions.forward_only(name) else passes:
                    samples = measured.setdefault((name, each), Samples())
                    call = functools.partial(attend, **attempts.settings)
                    time_ms = _through(call, inputs, device, backward=each != "forward")
                    if number == 0:
                        samples.first_ms = time_ms
                    else:
                        samples.wall_ms.append(time_ms)
    about: Row = {
        "batch": problems[0].batch,
        "sequence": max(problem.sequence for problem in problems),
        "length": f"{len(problems)} lengths",
        "varied": len(problems),
        "feature": "plain",
        "clock": "wall",
    }
    ran_by = {name: {"ran": each.get("ran")} for name, each in attempts.about.items()}
    return _rows(problems, attempts, about, ran_by)


def _rows(
    problems: Sequence[Problem], attempts: Attempts, about: Row, found: Mapping[str, Row]
) -> list[Row]:
    """A row per variant and pass over all problems, and one per excluded variant."""
    rows = [
        {"variant": name, "phase": each, **about}
        | {"flops": sum(problem.flops(each) for problem in problems)}
        | {"least_bytes": sum(problem.least_bytes(each) for problem in problems)}
        | {**found[name], **samples.row()}
        for (name, each), samples in attempts.samples.items()
        if name not in attempts.ended
    ]
    return rows + [{"variant": n, **about, "ended": end} for n, end in attempts.ended.items()]


def _through(
    attend: attentions.Attend,
    inputs: Sequence[Sequence[Tensor]],
    device: torch.device,
    *,
    backward: bool,
) -> float:
    """Milliseconds of calls on all lengths, the device synchronised at both ends alone."""
    samples = Samples()
    with record_sample(samples, device), torch.set_grad_enabled(backward):
        for query, key, value, grad_out in inputs:
            out = attend(query, key, value)
            if backward:
                out.backward(grad_out)
                query.grad = key.grad = value.grad = None
    return samples.wall_ms[0]
