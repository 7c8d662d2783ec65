"""One attention problem: its tensors, the proof of implementations, and the timing of passes."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bench_harness.attentions import Window, find, stores_scores
from bench_harness.case import Row
from bench_harness.experiments.base import CaseSkipped
from bench_harness.flops import attention_flops
from bench_harness.sampling import Enough
from bench_harness.timing import Samples, record_sample, synchronize

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from bench_harness.attentions import Attend

PASSES = ("forward", "training forward", "backward", "forward+backward", "forward+sum+backward")
CLOCKS = ("device", "wall", "host")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Largest error allowed of output and gradients, as a share of the reference's largest value: one
#: rounding to the dtype, of inputs and of probabilities.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
#: Attention that stores its scores also rounds them to the dtype, before their exponential.
_STORED_SCORES = 4
#: Longest sequence whose reference stores all scores of a head, 64 MB in fp32; longer ones are
#: computed in tiles of 16 MB.
_DEFINED, _TILE = 4096, 2048
#: Calls in a row, without waiting for the device, of one sample of the host's own time.
_HOST_CALLS = 50


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Attributes:
        kv_heads: key and value heads; they divide ``heads``.
        value_head_dim: of value and output.
        window: (left, right) visible keys beside the diagonal, None for no limit.
        lengths: of sequences packed one after another; the batch is 1 and ``sequence`` their sum.
    """

    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    value_head_dim: int
    dtype: str
    causal: bool
    window: Window | None = None
    softcap: float | None = None
    deterministic: bool = False
    lengths: tuple[int, ...] = ()

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random query, key and value that need gradients, and the output's gradient."""
        import torch

        torch.manual_seed(0)

        def random(heads: int, width: int) -> Tensor:
            shape: tuple[int, ...] = (self.batch, heads, self.sequence, width)
            if self.lengths:
                shape = (self.sequence, heads, width)
            return torch.randn(shape, device=device, dtype=getattr(torch, DTYPES[self.dtype]))

        query = random(self.heads, self.head_dim).requires_grad_()
        key = random(self.kv_heads, self.head_dim).requires_grad_()
        value = random(self.kv_heads, self.value_head_dim).requires_grad_()
        return query, key, value, random(self.heads, self.value_head_dim)

    def settings(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of an implementation: ``causal``, and what is not the default."""
        import torch

        given: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            given["window"] = self.window
        if self.softcap is not None:
            given["softcap"] = self.softcap
        if self.deterministic:
            given["deterministic"] = True
        if self.lengths:
            starts = [0, *itertools.accumulate(self.lengths)]
            given["cu_seqlens"] = torch.tensor(starts, device=device, dtype=torch.int32)
            given["max_seqlen"] = max(self.lengths)
        return given

    def flops(self, name_of_pass: str) -> int:
        """Operations of a pass; hidden scores are not counted."""
        shape = (self.heads, self.head_dim, self.value_head_dim)
        count = {
            backward: sum(
                attention_flops(
                    self.batch,
                    self.heads,
                    length,
                    self.head_dim,
                    value_head_dim=shape[2],
                    causal=self.causal,
                    window=self.window,
                    backward=backward,
                )
                for length in self.lengths or (self.sequence,)
            )
            for backward in (False, True)
        }
        forward, backward = count[False], count[True]
        return _of_pass(name_of_pass, forward, backward)

    def least_bytes(self, name_of_pass: str) -> int:
        """Memory traffic that a pass cannot do without: its inputs and results, once each."""
        size = 4 if self.dtype == "fp32" else 2
        tokens = self.batch * self.sequence * size
        inputs = tokens * (self.heads + self.kv_heads) * self.head_dim
        inputs += tokens * self.kv_heads * self.value_head_dim
        output = tokens * self.heads * self.value_head_dim
        # Backward reads inputs, output and its gradient, and writes the inputs' gradients.
        return _of_pass(name_of_pass, inputs + output, 2 * inputs + 2 * output)

    def predicted_bytes(self) -> Row:
        """What naive attention keeps for backward, and what it needs at its peak.

        Saved: the softmax output (B·H·S²), which both the softmax and the second product need; a
        causal mask (S² booleans); the output (B·H·S·E). Query, key and value exist anyway. The peak
        of backward adds three more B·H·S² matrices: the gradient of the softmax output, its product
        with that output, which PyTorch's softmax computes first, and the gradient of the scores.
        """
        size = 4 if self.dtype == "fp32" else 2
        scores = self.batch * self.heads * self.sequence**2 * size
        output = self.batch * self.heads * self.sequence * self.value_head_dim * size
        saved = scores + self.causal * self.sequence**2 + output
        return {"predicted_saved_bytes": saved, "predicted_peak_bytes": saved + 3 * scores}

    @property
    def is_plain(self) -> bool:
        """Whether :meth:`predicted_bytes` holds: nothing but a mask and as many key heads."""
        special = self.window or self.softcap or self.lengths
        return not special and self.kv_heads == self.heads


def _of_pass(name: str, forward: int, backward: int) -> int:
    alone = {"forward": forward, "training forward": forward, "backward": backward}
    return alone.get(name, forward + backward)


class Attempts:
    """Implementations on one problem: those that are still in, and why the others are out."""

    def __init__(self, names: Sequence[str], problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.tensors = problem.tensors(device)
        self.calls: dict[str, Callable[[], Tensor]] = {}
        self.about: dict[str, Row] = {name: {} for name in names}
        self.ended: dict[str, Row] = {}

    @contextmanager
    def ending(self, name: str) -> Iterator[None]:
        """Takes an implementation out that fails inside; lack of memory ends the whole case."""
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
        exact = _exact(self.problem, self.tensors)
        for name in self.about:
            with self.ending(name):
                self.calls[name] = _call(name, self.problem, self.tensors, self.device)
                rounded = _STORED_SCORES if stores_scores(name) else 1
                limit = rounded * TOLERANCE[self.problem.dtype]
                self.about[name] |= _errors(
                    self.calls[name], self.problem, self.tensors, exact, limit
                )
                self.about[name]["saved_bytes"] = _saved_bytes(
                    self.calls[name], self.tensors[:3], self.device
                )
                if name.startswith("naive") and self.problem.is_plain:
                    self.about[name] |= self.problem.predicted_bytes()
                if name.startswith("flashattn-triton") and not self.problem.lengths:
                    self.about[name]["plan"] = _plan(name, self.problem, *self.tensors[:3])

    def passes(self, name: str, wanted: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The passes of an implementation; backward alone reuses one graph."""
        import torch

        attend, (*_, grad_out) = self.calls[name], self.tensors
        for each in wanted:
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
    name: str, problem: Problem, tensors: tuple[Tensor, ...], device: torch.device
) -> Callable[[], Tensor]:
    """An implementation as a call without arguments.

    Raises:
        CaseSkipped: it has no argument for something that the problem asks for.
    """
    attend: Attend = find(name)
    settings = problem.settings(device)
    try:
        inspect.signature(attend).bind(*tensors[:3], **settings)
    except TypeError as error:
        raise CaseSkipped(f"{name} does not take this problem: {error}") from error
    return lambda: attend(*tensors[:3], **settings)


def _exact(problem: Problem, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output and gradients of the last key head, with the queries that read it, in fp32.

    By the definition of attention, or in tiles where its scores would take too much memory.
    """
    import torch

    from flashattn_triton.options import resolve_options
    from flashattn_triton.reference import attention_reference
    from flashattn_triton.tiled import tiled_backward, tiled_forward

    options = resolve_options(
        head_dim=problem.head_dim,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
    )
    group = problem.heads // problem.kv_heads
    tiles = {"query_tile": max(1, _TILE // group), "key_tile": _TILE}
    pieces = []
    for q, k, v, grad_out in _last_head(problem, tensors):
        if q.shape[2] <= _DEFINED:
            leaves = tuple(x.requires_grad_() for x in (q, k, v))
            out, _ = attention_reference(q, k, v, options)
            gradients = torch.autograd.grad(out, leaves, grad_out)
        else:
            out, lse = tiled_forward(q, k, v, options, **tiles)
            gradients = tiled_backward(q, k, v, out, lse, grad_out, None, options, **tiles)
        pieces.append((out.detach(), *gradients))
    return tuple(torch.cat(each, dim=2) for each in zip(*pieces, strict=True))


def _last_head(
    problem: Problem, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(query, key, value, output or its gradient) of the last key head, a sequence at a time."""
    group = problem.heads // problem.kv_heads
    heads = (group, 1, 1, group)
    if not problem.lengths:
        q, k, v, o = (
            x.detach()[-1:, -n:].float().clone() for x, n in zip(tensors, heads, strict=True)
        )
        yield q, k, v, o
        return
    for start, end in itertools.pairwise([0, *itertools.accumulate(problem.lengths)]):
        q, k, v, o = (
            x.detach()[start:end, -n:].transpose(0, 1)[None].float()
            for x, n in zip(tensors, heads, strict=True)
        )
        yield q, k, v, o


def _errors(
    attend: Callable[[], Tensor],
    problem: Problem,
    tensors: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    limit: float,
) -> Row:
    """Largest errors of the last key head's output and gradients, as shares of their largest value.

    Raises:
        ArithmeticError: an error is too large; nothing is timed then.
    """
    import torch

    out = attend()
    dq, dk, dv = torch.autograd.grad(out, tensors[:3], tensors[3])
    pieces = list(_last_head(problem, (dq, dk, dv, out)))
    dq, dk, dv, out = (torch.cat(each, dim=2) for each in zip(*pieces, strict=True))
    row: Row = {}
    for what, found, wanted in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), exact, strict=True
    ):
        error = float((found - wanted).abs().max() / wanted.abs().max())
        if not error <= limit:  # also catches NaN
            raise ArithmeticError(
                f"error of {what} must be at most {limit:g} of its largest "
                f"value, but got {error:.2e}. It is not timed"
            )
        row[f"error_{what}"] = error
    return row


def _plan(name: str, problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Row:
    """Which tier of flashattn-triton runs, and why, by the package's own account."""
    from flashattn_triton import choose
    from flashattn_triton.options import resolve_options

    options = resolve_options(
        head_dim=problem.head_dim,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        deterministic=problem.deterministic,
    )
    asked: Any = {"portable": "triton", "tiled": "tiled"}.get(name.rpartition("-")[2], "auto")
    found = choose(query, key, value, options, implementation=asked)
    return {"tier": found.tier, "why": found.reason}


def _saved_bytes(
    attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], device: torch.device
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
    attempts: Attempts, config: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[tuple[str, str], Samples]:
    """Times the passes of all implementations in turns, the order going back and forth.

    Further turns follow until every interval is narrow, or the case's seconds for it are over.
    """
    taken: dict[tuple[str, str], Samples] = {}
    rounds, lengths = config["rounds"], max(1, len(config["sequences"]))
    least = -(-config["samples"] // rounds)
    enough, turn = None, 0
    while enough is None or not enough.reached(each.wall_ms for each in taken.values()):
        names = list(attempts.calls)
        for name in names if turn % 2 == 0 else names[::-1]:
            progress(f"length {attempts.problem.sequence}, turn {turn + 1}: {name}")
            with attempts.ending(name):
                for each, call in attempts.passes(name, config["passes"]):
                    samples = taken.setdefault((name, each), Samples())
                    samples.wall_ms += sampled(
                        call,
                        attempts.device,
                        clock=config["clock"],
                        leaves=attempts.tensors[:3],
                        least=least,
                        warmup_ms=config["warmup_ms"] / rounds,
                        rep_ms=config["rep_ms"] / rounds,
                    )
        turn += 1
        if turn == rounds:
            enough = Enough(config, parts=lengths)
    return {key: samples for key, samples in taken.items() if key[0] not in attempts.ended}


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
