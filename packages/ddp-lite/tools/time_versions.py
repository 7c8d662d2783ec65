"""Times of two versions of ddp-lite, taken in turns: host time of a step, and training steps.

::

    git archive a5ad6cc packages/ddp-lite/src | tar -x -C /tmp
    uv run python packages/ddp-lite/tools/time_versions.py --before /tmp/packages/ddp-lite/src

Each version runs in processes of its own, and the versions take turns, so that a slow minute of the
machine slows both. Host time is that of all hooks and of the end of backward with the 435
parameters of the 2-billion-parameter model, a hundredth as wide, on the fake process group: the
smallest of many steps, in milliseconds of this thread. A training step is forward, backward and
SGD of linear layers in bf16 autocast with float32 weights, on every GPU over NCCL (two ranks on
CPUs over gloo without GPUs): the median over blocks of five steps, in milliseconds. With two H100s
it takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, BLOCKS = 5, 4

Build = Callable[[nn.Module], Any]


class Stack(nn.Module):
    """As many parameters as the "xl" model has."""

    def __init__(self) -> None:
        super().__init__()
        width, inner, vocabulary = 16, 64, 100
        block = [(width,), *[(width, width)] * 4, (width,)]
        block += [(inner, width), (inner, width), (width, inner)]
        shapes = [(vocabulary, width), *block * 48, (width,), (vocabulary, width)]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def builds(explicit: bool) -> dict[str, Build]:
    """The wrappers to time; ``explicit`` ones wait for the call that ends a step."""
    from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

    own = {"auto_finish": not explicit}
    if explicit:
        return {
            "one bucket": lambda m: BucketedDDP(m, None, **own),
            "34 buckets": lambda m: BucketedDDP(m, 0.025, last_bucket_size_mb=0.0025, **own),
            "OverlapDDP": lambda m: OverlapDDP(m, **own),
            "NaiveDDP": lambda m: NaiveDDP(m, **own),
            "FlatDDP": lambda m: FlatDDP(m, **own),
        }
    return {
        "BucketedDDP, auto": lambda m: BucketedDDP(m),
        "BucketedDDP, collectives": lambda m: BucketedDDP(m, comm_hook="collectives"),
        "BucketedDDP, bf16": lambda m: BucketedDDP(
            m, comm_hook="collectives", wire_dtype=torch.bfloat16
        ),
        "OverlapDDP": lambda m: OverlapDDP(m),
        "FlatDDP": lambda m: FlatDDP(m),
        "NaiveDDP": lambda m: NaiveDDP(m),
    }


def host_times() -> dict[str, float]:
    """Milliseconds of the host for each wrapper, on the fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    best = {}
    for name, build in builds(explicit=True).items():
        wrapped = build(Stack())
        parameters = list(wrapped.parameters())
        gradients = [torch.zeros_like(p) for p in parameters]
        times = []
        for _ in range(60):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            hooks = [h for p in parameters for h in p._post_accumulate_grad_hooks.values()]
            begin = time.thread_time()
            for hook, p in zip(reversed(hooks), reversed(parameters), strict=True):
                hook(p)
            wrapped.finish_gradient_synchronization()
            times.append((time.thread_time() - begin) * 1e3)
        best[name] = min(times)
    dist.destroy_process_group()
    return best


def train(rank: int, world_size: int, store: str, layers: int, width: int) -> dict[str, float]:
    """Milliseconds of a training step with each wrapper, on one rank."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
    )
    medians = {}
    for name, build in builds(explicit=False).items():
        torch.manual_seed(0)
        blocks = [nn.Linear(width, width, device=device) for _ in range(layers)]
        wrapped = build(nn.Sequential(*blocks))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
        x = torch.randn(2048 if on_gpu else 4, width, device=device)
        times = []
        for block in range(BLOCKS + 1):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16):
                    loss = wrapped(x).square().mean()
                loss.backward()
                optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            if block:  # the first one warms up
                times.append((time.perf_counter() - begin) * 1e3 / STEPS)
        medians[name] = statistics.median(times)
        wrapped.detach()
        del wrapped, optimizer, blocks
    dist.destroy_process_group()
    return medians


def in_processes(source: Path, *roles: list[str]) -> list[dict[str, float]]:
    """Runs this file once for each role, with ddp_lite from ``source``; their results."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--role"]
    running = [
        subprocess.Popen([*command, *role], env=environment, stdout=subprocess.PIPE, text=True)
        for role in roles
    ]
    found = []
    for process in running:
        output, _ = process.communicate(timeout=280)
        if process.returncode:
            raise RuntimeError(f"a process of {source} ended with exit code {process.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    return found


def main() -> None:
    """Prints one line per wrapper: before, after, and after divided by before."""
    parser = argparse.ArgumentParser(description="times of two versions of ddp-lite, in turns")
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--role", nargs="+", help="used between processes of this program")
    options = parser.parse_args()
    if options.role is not None:
        kind, *rest = options.role
        rank, world_size, store, layers, width = [*rest, *["0"] * 5][:5]
        found = (
            host_times()
            if kind == "host"
            else train(int(rank), int(world_size), store, int(layers), int(width))
        )
        print(json.dumps(found))
        return
    world_size = torch.cuda.device_count() or 2
    results: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.rounds):
        for version, source in (("before", options.before), ("after", options.after)):
            (host,) = in_processes(source.resolve(), ["host"])
            with tempfile.TemporaryDirectory() as folder:
                size = [str(options.layers), str(options.width)]
                ranks = [
                    ["train", str(rank), str(world_size), f"{folder}/store", *size]
                    for rank in range(world_size)
                ]
                slowest = in_processes(source.resolve(), *ranks)[0]
            for kind, times in (("host", host), ("step", slowest)):
                for name, value in times.items():
                    results.setdefault((kind, name, version), []).append(value)
    print(
        "| time | wrapper | before (ms) | after (ms) | after / before |\n|---|---|---:|---:|---:|"
    )
    for kind, name, version in results:
        if version == "before":
            before = min(results[kind, name, "before"])
            after = min(results[kind, name, "after"])
            print(f"| {kind} | {name} | {before:.3f} | {after:.3f} | {after / before:.2f} |")


if __name__ == "__main__":
    main()
