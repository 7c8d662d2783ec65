"""Faults × wrappers × ranks, with the weights of every rank hashed after every step.

A fault is what the last rank does in one step of a training loop instead of the usual step, what it
does instead of the usual construction, or what all ranks do. Each is tried with ddp-lite's
wrappers, with gradients exchanged by copies, and with torch's ``DistributedDataParallel``, on gloo
with a collective timeout of three seconds. Buckets hold a parameter or two, so that messages of
different sizes meet where ranks stray: gloo ends a process by SIGABRT that receives one of another
size than it expects.

``python packages/ddp-lite/tests/fault_suite.py docs/results/fault-suite.jsonl.gz`` runs all of them
and writes the rows that the package's documentation shows. With ``--gpus`` two ranks train on GPUs
over NCCL, and the copies are real ones; ``--wrappers BucketedDDP,torch DDP`` leaves others out.
``--jobs 8`` tries eight faults at a time, for a host with many cores. A run that was cut leaves
what it has found beside the target, as ``.partial``, and the next one goes on from there.
``test_fault_suite.py`` runs a sample on CPUs, and all of ours nightly.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

WRAPPERS: dict[str, Any] = {
    "NaiveDDP": NaiveDDP,
    "FlatDDP": FlatDDP,
    "OverlapDDP": OverlapDDP,
    "BucketedDDP": functools.partial(BucketedDDP, bucket_size_mb=0.0002, last_bucket_size_mb=1e-4),
}
#: ``BucketedDDP`` whose ranks exchange gradients as GPUs do that copy to each other.
BY_COPIES = "BucketedDDP by copies"
OURS = (*WRAPPERS, BY_COPIES)
TORCHS = "torch DDP"
WORLD_SIZES = (2, 4)
STEPS, FAULTY_STEP = 6, 2
TIMEOUT_S = 3.0
#: Whatever answers a timeout of three seconds has ended by then, on a busy machine too.
HUNG_S = 60.0


class Tap(nn.Module):
    """Identity that can run something in the middle of forward or of backward. It has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.zeros(5))
        self.in_forward: Callable[[], object] | None = None
        self.in_backward: Callable[[], object] | None = None
        self.again: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward is not None:
            self.in_forward()
        if (action := self.in_backward) is not None:
            x.register_hook(lambda gradient: (action(), gradient)[1])
        if self.again is not None:  # a backward of its own, in which gradients arrive twice
            x = checkpoint(self.again, x, use_reentrant=True)
        return x


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Tap(), nn.Linear(8, 8), nn.Linear(8, 2))


class Loop:
    """A training loop on one rank."""

    def __init__(self, wrapped: nn.Module, rank: int, world_size: int, folder: str) -> None:
        self.wrapped, self.rank, self.world_size, self.folder = wrapped, rank, world_size, folder
        self.module: Any = wrapped.module
        self.optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        inputs = torch.full((2, 4), self.rank + 1.0, dtype=dtype)
        output: Tensor = (model or self.wrapped)(inputs)
        return output.square().mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


Fault = Callable[[Loop], object]


def die(number: signal.Signals) -> Callable[[], None]:
    def action() -> None:
        if number == signal.SIGINT:  # a program that nohup or a shell's & started ignores it
            signal.signal(number, signal.default_int_handler)
        os.kill(os.getpid(), number)

    return action


def fail() -> None:
    raise ArithmeticError("injected")


def in_forward(action: Callable[[], object]) -> Fault:
    def fault(loop: Loop) -> None:
        loop.module[2].in_forward = action
        loop.step()

    return fault


def in_backward(action: Callable[[], object]) -> Fault:
    def fault(loop: Loop) -> None:
        loop.module[2].in_backward = action
        loop.step()

    return fault


def stopped_in_backward(loop: Loop) -> None:
    """Stops this process. As nothing else would end it, a child kills it after the others ended."""
    others = f"cat $(ls -d {loop.folder}/* | grep -v /{loop.rank}$)"
    ended = f"$({others} | grep -c -e error -e finished) -ge {loop.world_size - 1}"
    script = f"for i in $(seq {HUNG_S:.0f}); do sleep 1; [ {ended} ] && break; done"
    subprocess.Popen(["sh", "-c", f"{script}; kill -9 {os.getpid()}"], start_new_session=True)
    in_backward(die(signal.SIGSTOP))(loop)


def then(action: Fault) -> Fault:
    """The usual step, and something after it."""

    def fault(loop: Loop) -> None:
        loop.step()
        action(loop)

    return fault


def between(action: Fault) -> Fault:
    """Something between backward and the optimizer's step."""

    def fault(loop: Loop) -> None:
        loop.backward()
        action(loop)
        loop.optimizer.step()

    return fault


def before(action: Fault) -> Fault:
    """Something before the usual step."""

    def fault(loop: Loop) -> None:
        action(loop)
        loop.step()

    return fault


def extra_backward(loop: Loop) -> None:
    loop.loss().backward()


def backward_around_the_wrapper(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.loss(loop.module).backward()
    loop.optimizer.step()


def without_synchronising(loop: Loop) -> None:
    with loop.wrapped.no_sync():  # type: ignore[operator]
        loop.step()


def uses_a_part(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.module[0](torch.ones(2, 4)).sum().backward()
    loop.optimizer.step()


def replace_weight(loop: Loop) -> None:
    loop.module[3].weight = nn.Parameter(loop.module[3].weight.detach().clone())


def change_weight(loop: Loop) -> None:
    with torch.no_grad():
        loop.module[4].bias.add_(1)


def change_gradient(loop: Loop) -> None:
    loop.module[3].weight.grad.mul_(2)


def load_other_weights(loop: Loop) -> None:
    loop.module.load_state_dict({k: v + 1 for k, v in loop.module.state_dict().items()})


def other_learning_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.02


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.loss()


def several_threads(loop: Loop) -> None:
    """Two losses, whose backward passes run at the same time in two threads."""
    loop.optimizer.zero_grad()
    losses = [loop.loss(), loop.loss()]
    errors: list[Exception] = []

    def run(loss: Tensor) -> None:
        try:
            loss.backward()
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that trains
            errors.append(error)

    threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    loop.optimizer.step()


def another_collective(loop: Loop) -> None:
    dist.all_reduce(torch.ones(3))


def shrink(loop: Loop) -> None:
    """Pruning in place: the same memory, fewer elements."""
    for parameter in loop.module[4].parameters():
        parameter.data = parameter.data[:1]


def joins(loop: Loop) -> None:
    torchs = isinstance(loop.wrapped, nn.parallel.DistributedDataParallel)
    arguments = () if torchs else (lambda: None,)
    with loop.wrapped.join(*arguments):  # type: ignore[operator]
        loop.step()


def uses_a_layer_twice(loop: Loop) -> None:
    loop.module[2].again = lambda x: loop.module[3](x)
    loop.step()
    loop.module[2].again = None


def trains_in_a_fork(loop: Loop) -> None:
    """The child, which is no rank, must not train; this rank goes on."""
    child = os.fork()
    if child == 0:
        signal.alarm(round(4 * TIMEOUT_S))  # ends a child that waits
        try:
            loop.step()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise ArithmeticError("the child trained, or waited for others")


def functional(loop: Loop) -> None:
    """One step of MAML, through the wrapper."""
    slow = dict(loop.wrapped.named_parameters())
    inner = loop.loss()
    gradients = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
    loop.optimizer.zero_grad()
    functional_call(loop.wrapped, fast, (torch.ones(2, 4),)).square().mean().backward()
    loop.optimizer.step()


#: What the last rank does in one step instead of the usual one.
ON_ONE_RANK: dict[str, Fault] = {
    "is killed in forward": in_forward(die(signal.SIGKILL)),
    "is killed in backward": in_backward(die(signal.SIGKILL)),
    "is killed between backward and the optimizer": between(lambda loop: die(signal.SIGKILL)()),
    "is terminated in backward": in_backward(die(signal.SIGTERM)),
    "is interrupted in backward": in_backward(die(signal.SIGINT)),
    "leaves with exit code 1": before(lambda loop: os._exit(1)),
    "ends its program": before(lambda loop: sys.exit(1)),
    "is stopped in backward": stopped_in_backward,
    "sleeps in backward": in_backward(lambda: time.sleep(4 * TIMEOUT_S)),
    "raises in forward": in_forward(fail),
    "raises in backward": in_backward(fail),
    "raises between backward and the optimizer": between(lambda loop: fail()),
    "destroys its process group": before(lambda loop: dist.destroy_process_group()),
    "leaves a step out": lambda loop: None,
    "runs forward without backward": lambda loop: loop.loss(),
    "runs one backward more": before(extra_backward),
    "runs the module around its wrapper": backward_around_the_wrapper,
    "trains a step inside no_sync": without_synchronising,
    "uses a part of the model": uses_a_part,
    "zeroes the gradients after backward": between(lambda loop: loop.optimizer.zero_grad()),
    "changes a gradient after backward": between(change_gradient),
    "leaves the optimizer's step out": Loop.backward,
    "steps the optimizer twice": then(lambda loop: loop.optimizer.step()),
    "has another learning rate": before(other_learning_rate),
    "changes a weight": then(change_weight),
    "loads other weights": then(load_other_weights),
    "replaces a parameter": before(replace_weight),
    "freezes a parameter": before(lambda loop: loop.module[3].requires_grad_(False)),
    "converts the module to float64": before(lambda loop: loop.module.double()),
    "converts the module to bfloat16": before(lambda loop: loop.module.bfloat16()),
    "shrinks a parameter in place": before(shrink),
    "runs a collective of its own": before(another_collective),
    "runs a collective in backward": in_backward(lambda: dist.all_reduce(torch.ones(3))),
    "sends its buffers": before(lambda loop: loop.wrapped.sync_buffers()),  # type: ignore[operator]
    "joins": joins,
    "uses a layer twice": uses_a_layer_twice,
    "trains in a forked child": before(trains_in_a_fork),
    "evaluates meanwhile": before(evaluate),
}

#: What all ranks do.
ON_ALL_RANKS: dict[str, Fault] = {
    "all run two backwards in two threads": several_threads,
    "all add a parameter": before(
        lambda loop: loop.module.register_parameter("scale", nn.Parameter(torch.ones(3)))
    ),
    "all use a part of the model": uses_a_part,
    "all convert the module to float64": before(lambda loop: loop.module.double()),
    "all call the wrapper with other parameters": functional,
}

Construct = Callable[[type[nn.Module]], nn.Module]


def bigger(wrapper: type[nn.Module]) -> nn.Module:
    model = build()
    model[3] = nn.Linear(8, 8, bias=False)
    return wrapper(model)


def transposed(wrapper: type[nn.Module]) -> nn.Module:
    """The same shapes, another layout in memory."""
    model = build()
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    return wrapper(model)


def absent(wrapper: type[nn.Module]) -> nn.Module:
    time.sleep(2 * TIMEOUT_S)
    raise ArithmeticError("this rank wraps nothing")


#: How the last rank constructs its wrapper instead of the usual way.
CONSTRUCTED: dict[str, Construct] = {
    "has another model": bigger,
    "wraps another dtype": lambda wrapper: wrapper(build().double()),
    "wraps another layout in memory": transposed,
    "never constructs its wrapper": absent,
}


def two_wrappers_of_one_trunk(wrapper: type[nn.Module]) -> nn.Module:
    trunk = build()
    first = wrapper(nn.Sequential(trunk, nn.Linear(2, 1)))
    second = wrapper(nn.Sequential(trunk, nn.Linear(2, 2)))
    second.first = first  # keeps it alive
    return second


#: How all ranks construct their wrappers.
CONSTRUCTED_BY_ALL: dict[str, Construct] = {
    "all wrap two models that share a trunk": two_wrappers_of_one_trunk,
}

NAMES = (*ON_ONE_RANK, *ON_ALL_RANKS, *CONSTRUCTED, *CONSTRUCTED_BY_ALL)
#: torch's wrapper has no such call, or its ranks share sockets with the child.
NOT_TORCHS = ("sends its buffers", "trains in a forked child")


def wrapper_named(name: str, folder: str) -> Any:
    """What wraps modules; ``folder`` has room for the files that ranks share."""
    if name == BY_COPIES:
        return by_copies(folder)
    return nn.parallel.DistributedDataParallel if name == TORCHS else WRAPPERS[name]


def by_copies(folder: str) -> Any:
    """Wraps modules in ``BucketedDDP`` with a hook of its own each; on CPUs its memory is files."""
    from ddp_lite.peer import PeerCopyAverage, PeerMemory
    from process_memory import ProcessMemory

    numbers = itertools.count()

    def wrap(module: nn.Module) -> BucketedDDP:
        memory: Any
        if dist.get_backend() == "nccl":
            timeout = timedelta(seconds=TIMEOUT_S)
            memory = PeerMemory(dist.group.WORLD, buffer_mb=1, timeout=timeout)  # type: ignore[arg-type]
        else:
            memory = ProcessMemory(Path(folder) / f".memory-{next(numbers)}", row_bytes=256)
        return BucketedDDP(module, 0.0001, comm_hook=PeerCopyAverage(memory))

    return wrap


def train(rank: int, world_size: int, name: str, fault: str, folder: str, timeout_s: float) -> None:
    """Trains with a fault. Appends a line per event to ``folder/RANK``: a hash, or an error."""
    if dist.get_backend() == "nccl":
        torch.set_default_device("cuda")
    wrapper = wrapper_named(name, folder)
    odd = rank == world_size - 1
    begin, injected = time.monotonic(), False
    with (Path(folder) / str(rank)).open("w", buffering=1) as log:

        def say(**event: object) -> None:
            log.write(json.dumps(event) + "\n")

        try:
            # Connections and first steps, which import more of torch, take longer than the timeout
            # on a busy host; so it is set where the fault is next.
            dist.barrier()
            if fault in CONSTRUCTED_BY_ALL or fault in CONSTRUCTED:
                injected = True
                set_timeout(timeout_s)
            begin = time.monotonic()
            construct = CONSTRUCTED_BY_ALL.get(fault) or (CONSTRUCTED.get(fault) if odd else None)
            wrapped = (construct or (lambda wrapper: wrapper(build())))(wrapper)
            loop = Loop(wrapped, rank, world_size, folder)
            for step in range(STEPS):
                broken = ON_ALL_RANKS.get(fault) or (ON_ONE_RANK.get(fault) if odd else None)
                if step == FAULTY_STEP:
                    injected = True
                    set_timeout(timeout_s)
                    begin = time.monotonic()
                (broken if broken and step == FAULTY_STEP else Loop.step)(loop)
                say(step=step, weights=hashed(loop.module))
        except BaseException as error:
            seconds = time.monotonic() - begin
            about = {"text": str(error)[:500], "seconds": seconds, "injected": injected}
            say(error=type(error).__name__, **about)
            raise
        say(finished=True)


def set_timeout(seconds: float) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # new name in torch 2.15
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def hashed(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the ranks ended.

    Attributes:
        verdict: "hung", "aborted" (a healthy rank by SIGABRT or SIGSEGV), "silently diverged"
            (weights differ and no rank said so), "error" (every healthy rank raised), "partly"
            (some healthy ranks raised and others finished), or "unharmed" (all ranks finished with
            equal weights).
        errors: what healthy ranks raised.
        seconds: from the beginning of the faulty step to the last of their errors.
    """

    fault: str
    wrapper: str
    ranks: int
    verdict: str
    errors: str
    seconds: float | None


def inject(
    fault: str, name: str, world_size: int, timeout_s: float = TIMEOUT_S, backend: str = "gloo"
) -> Result:
    """Runs one fault and says how it ended.

    Args:
        timeout_s: of a collective, from the fault on.
        backend: "gloo" on CPUs, "nccl" on GPUs.
    """
    from ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        arguments = (name, fault, folder, timeout_s)
        outcomes = run_ranks(
            train, world_size, *arguments, backend=backend, timeout=2 * HUNG_S, check=False
        )
        events = [
            [json.loads(line) for line in (Path(folder) / str(rank)).read_text().splitlines()]
            for rank in range(world_size)
        ]
    for event in itertools.chain(*events):
        if not event.get("injected", True):
            raise RuntimeError(f"{name} failed before the fault: {event['error']}: {event['text']}")
    everyone = fault in ON_ALL_RANKS or fault in CONSTRUCTED_BY_ALL
    healthy = range(world_size if everyone else world_size - 1)
    errors = [event for rank in healthy for event in events[rank] if "error" in event]
    finished = [rank for rank in healthy if any("finished" in event for event in events[rank])]
    weights: dict[int, set[str]] = collections.defaultdict(set)
    for event in itertools.chain(*events):
        if "weights" in event:
            weights[event["step"]].add(event["weights"])
    said = any("error" in event for event in itertools.chain(*events))
    late = any("still running" in (outcomes[rank].error or "") for rank in healthy)
    if late or any(event["seconds"] > HUNG_S for event in errors):
        verdict = "hung"
    elif any(outcomes[rank].exitcode in (-signal.SIGABRT, -signal.SIGSEGV) for rank in healthy):
        verdict = "aborted"
    elif any(len(found) > 1 for found in weights.values()) and not said:
        verdict = "silently diverged"
    elif len(errors) == len(healthy):
        verdict = "error"
    else:
        verdict = "unharmed" if len(finished) == len(healthy) and not said else "partly"
    return Result(
        fault=fault,
        wrapper=name,
        ranks=world_size,
        verdict=verdict,
        errors=" / ".join(sorted({event["error"] for event in errors})),
        seconds=round(max(e["seconds"] for e in errors), 2) if errors else None,
    )


def summary(results: Iterable[Result]) -> Iterator[dict[str, object]]:
    """Counts per wrapper and number of ranks."""
    results = list(results)
    for wrapper, ranks in dict.fromkeys((r.wrapper, r.ranks) for r in results):
        own = [r for r in results if (r.wrapper, r.ranks) == (wrapper, ranks)]
        counts = collections.Counter(r.verdict for r in own)
        times = [r.seconds for r in own if r.seconds is not None]
        yield {
            "wrapper": wrapper,
            "ranks": ranks,
            "injected": len(own),
            "ended by an error": counts["error"],
            "unharmed": counts["unharmed"],
            "partly": counts["partly"],
            "hung": counts["hung"],
            "silently diverged": counts["silently diverged"],
            "aborted": counts["aborted"],
            "slowest_s": max(times, default=None),
        }


def by_fault(results: Iterable[Result]) -> Iterator[dict[str, object]]:
    """One row per fault: what ddp-lite's wrappers do, and what torch's does."""
    results = list(results)
    for fault in NAMES:
        row: dict[str, object] = {"fault": fault}
        for title, torchs in (("ddp-lite", False), (TORCHS, True)):
            own = [r for r in results if r.fault == fault and (r.wrapper == TORCHS) is torchs]
            found = {r.errors if r.verdict == "error" else r.verdict for r in own}
            row[title] = "; ".join(sorted(found)) or "–"
            times = [r.seconds for r in own if r.seconds is not None]
            row[f"{title}_s"] = max(times, default=None)
        yield row


def finished(partial: Path) -> dict[tuple[str, str, int], Result]:
    """Results of a run that ended early, by fault, wrapper and number of ranks."""
    lines = partial.read_text(encoding="utf-8").splitlines() if partial.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {(each.fault, each.wrapper, each.ranks): each for each in results}


def main() -> None:
    """Runs the suite and writes its rows, in the layout of published rows."""
    from bench_harness.environment import git_state

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path, help="the file of rows; compressed if it ends in .gz")
    parser.add_argument("--gpus", action="store_true", help="two ranks on GPUs, over NCCL")
    parser.add_argument("--wrappers", default=",".join((*OURS, TORCHS)), help="names, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    arguments = parser.parse_args()
    machine, backend, sizes = f"{os.cpu_count()} CPU cores, gloo", "gloo", WORLD_SIZES
    if arguments.gpus:
        machine, backend, sizes = f"2 {torch.cuda.get_device_name()}, NCCL", "nccl", WORLD_SIZES[:1]
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # ranks name who is lost, as on gloo
    commit = (git_state(Path(__file__).parent) or {}).get("commit")
    wanted = [
        (fault, name, size)
        for fault, name, size in itertools.product(NAMES, arguments.wrappers.split(","), sizes)
        if name != TORCHS or fault not in NOT_TORCHS
    ]
    found = finished(partial := arguments.target.with_suffix(".partial"))
    pool = ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn"))
    left = [pool.submit(inject, *each, backend=backend) for each in wanted if each not in found]
    try:
        for done in as_completed(left):
            result = done.result()
            found[result.fault, result.wrapper, result.ranks] = result
            print(row := json.dumps(asdict(result)), flush=True)
            with partial.open("a", encoding="utf-8") as file:
                file.write(row + "\n")
    finally:
        pool.shutdown(cancel_futures=True)
    results = [found[each] for each in wanted]
    compressed = arguments.target.suffix == ".gz"
    with (gzip.open if compressed else open)(arguments.target, "wt", encoding="utf-8") as file:
        for label, rows in (
            ("runs", [asdict(result) for result in results]),
            ("by wrapper", list(summary(results))),
            ("by fault", list(by_fault(results))),
        ):
            about = {"experiment": "fault-suite", "case_key": label, "label": label}
            where = f"{machine}, torch {torch.__version__}"
            line = {**about, "commit": commit, "measured_on": where, "config": {}, "rows": rows}
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    partial.unlink()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))
    with contextlib.suppress(KeyboardInterrupt):
        main()
