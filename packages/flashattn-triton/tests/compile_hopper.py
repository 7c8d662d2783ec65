"""Compiles the Hopper tier's kernels without a GPU, and reads what ptxas says about them.

Run as a program, in a process where TRITON_INTERPRET is not set: it reads a JSON list of requests
from standard input and writes one JSON row for each kernel with matrix products. The launchers
themselves are called, on the "meta" device, as compile_kernels.py does for the portable tier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from launch_kernels import hopper_backward, hopper_forward
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from flashattn_triton.hopper import backward, forward
from flashattn_triton.hopper.key_pass import P_READ, P_WRITTEN
from flashattn_triton.hopper.support import FIRST_NAMED_BARRIER
from flashattn_triton.launch import Launch
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import new_problem

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PTXAS_SAID: dict[str, str] = {}  # about each kernel, by its hash, when this process compiled it


class AbsentHopper:
    """What the launcher asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> None:
        """The index of "meta" tensors' device."""

    def get_current_stream(self, device: None) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Request:
    """One problem. ``direction``: "forward" or "backward"; ``sequences``: packed ones, if any.

    ``value_dim``: None if it is ``head_dim``. ``adds``: gradients to fp32 tensors.
    """

    head_dim: int
    dtype: str
    options: dict[str, Any]
    lengths: tuple[int, int] = (4096, 4096)
    direction: str = "forward"
    sinks: bool = False
    sequences: int = 0
    value_dim: int | None = None
    adds: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of query and key, and of value."""
        return self.head_dim, self.value_dim or self.head_dim


def shipped() -> list[Request]:
    """Every mask at both widths, the shapes that lengths choose, and narrower heads."""
    masks: tuple[tuple[str, dict[str, Any], tuple[int, int]], ...] = (
        ("bf16", {"causal": False}, (4096, 4096)),
        ("bf16", {"causal": True}, (4096, 4096)),
        ("bf16", {"causal": "bottom-right"}, (4096, 5000)),
        ("fp16", {"causal": True}, (4000, 2000)),
        ("bf16", {"causal": True, "scale": -0.5}, (4096, 4096)),
        ("bf16", {"causal": True, "window": (500, None)}, (4096, 4096)),
        ("bf16", {"window": (500, 300)}, (4096, 4000)),
        ("bf16", {"window": (500, None)}, (4096, 4000)),
    )
    both = ("forward", "backward")
    requests = [Request(d, *mask, direction) for direction in both for d in (64, 128)
                for mask in masks]  # fmt: skip
    # Kernels depend on lengths where there are other configurations for short sequences.
    requests += [
        Request(64, "bf16", {"causal": causal}, (1000, n_keys))
        for causal in (False, True, "bottom-right")
        for n_keys in (500, 2000)
    ]
    # Tiles are as wide as the next of the two head_dims above.
    requests += [
        Request(d, "fp16", {"causal": False}, direction=direction)
        for d in (40, 120)
        for direction in both
    ]
    # Of these tiles, 96 or 80 columns are in use.
    requests += [
        Request(d, "bf16", options, direction=direction)
        for d, options in (
            (96, {"causal": True}),
            (96, {"causal": True, "window": (500, None)}),
            (80, {"causal": False}),
        )
        for direction in both
    ]
    # Those of long sequences add products in order.
    requests += [
        Request(96, "bf16", {"causal": "bottom-right"}, (4096, 5000)),
        Request(96, "bf16", {"causal": True, "softcap": 30.0}),
        Request(96, "bf16", {"causal": True}, (8192, 8192), sequences=9),
        Request(96, "bf16", {"causal": True, "out_dtype": "float32"}, sinks=True),
        Request(96, "bf16", {"causal": True}, (2000, 2000)),
        Request(128, "bf16", {"causal": False}, (2000, 2000)),
    ]
    # Wide heads. The window's diagonal is not aligned to tiles.
    for d, e in ((256, 256), (192, 128)):
        plain: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (500, 300)})
        requests += [Request(d, "bf16", {"causal": False} | x, value_dim=e) for x in plain]
        requests += [Request(d, "bf16", {"causal": True}, value_dim=e, sequences=9)]
    requests += [
        Request(192, "bf16", {"causal": causal}, lengths, "backward", value_dim=128)
        for causal, lengths in ((False, (4096, 4096)), (True, (4096, 4096)), (True, (4096, 4000)))
    ]
    others: tuple[dict[str, Any], ...] = (
        {"window": (500, 300)},
        {"deterministic": True},
        {"softcap": 30.0},
    )
    requests += [
        Request(192, "bf16", {"causal": True} | x, direction="backward", value_dim=128)
        for x in others
    ]
    requests += [
        Request(192, "bf16", {"causal": True}, direction="backward", value_dim=128, sequences=9)
    ]
    # Without a mask, with one, packed, and with everything at once.
    requests += [
        Request(256, "bf16", {"causal": causal}, direction="backward") for causal in (False, True)
    ]
    requests += [Request(256, "bf16", {"causal": True}, (8192, 8192), "backward", sequences=9)]
    everything = {"causal": True, "window": (500, None), "softcap": 30.0, "deterministic": True}
    requests += [Request(256, "bf16", everything, direction="backward", sequences=9)]
    # A soft-cap, up to head_dim 64 forward alone.
    capped: dict[str, Any] = {"causal": True, "softcap": 30.0}
    requests += [Request(64, "bf16", capped)]
    for options in (capped, capped | {"window": (500, None)}):
        requests += [Request(128, "bf16", options, direction=direction) for direction in both]
    # Of short causal sequences, programs store a part of dQ.
    requests += [Request(128, "bf16", {"causal": True}, (512, 512), "backward")]
    # Packed sequences, with the mask that has most code, and dQ added up in order, also in rings.
    for d in (64, 128):
        causal, lengths = {"causal": True}, (8192, 8192)
        requests += [Request(d, "bf16", causal, lengths, x, sequences=9) for x in both]
        in_fp32 = causal | {"out_dtype": "float32"}
        requests += [
            Request(d, "bf16", in_fp32),
            Request(d, "bf16", in_fp32, lengths, sequences=9),
            Request(d, "bf16", causal, direction="backward", adds=True),
            Request(d, "bf16", causal, lengths, "backward", sequences=9, adds=True),
        ]
        requests += [
            Request(d, "bf16", options | {"deterministic": True}, direction="backward")
            for options in (
                {"causal": True},
                {"causal": False},
                {"causal": True, "window": (500, None)},
            )
        ]
    return requests


def launch(request: Request) -> None:
    """Calls the launcher of one problem."""
    (n_queries, n_keys), (width, value_width) = request.lengths, request.head_dims
    batch = 1 if request.sequences else 2
    query, key, value = (
        torch.empty(batch, *shape, dtype=DTYPES[request.dtype], device="meta")
        for shape in ((4, n_queries, width), (2, n_keys, width), (2, n_keys, value_width))
    )
    tensors = {}
    if request.sequences:
        starts = torch.empty(request.sequences + 1, dtype=torch.int32, device="meta")
        tensors = {"cu_seqlens_q": starts, "cu_seqlens_k": starts.clone()}
    if request.direction == "forward" and request.sinks:
        tensors["sinks"] = torch.empty(4, dtype=query.dtype, device="meta")
    given = Given(**tensors)
    keywords = dict(request.options)  # as JSON has them
    if "out_dtype" in keywords:
        keywords["out_dtype"] = getattr(torch, keywords["out_dtype"])
    longest = (n_queries, n_keys) if request.sequences else (0, 0)
    options = new_problem(head_dim=width, longest=longest, **keywords)
    if request.direction == "forward":
        hopper_forward(query, key, value, options, given)
    else:
        lse = torch.empty(query.shape[:3], device="meta")
        out = query.new_empty(*query.shape[:3], value_width)
        into = [x.float() for x in (query, key, value)] if request.adds else []
        hopper_backward(query, key, value, out, lse, out, None, options, given, into)


def compiled(work: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of everything that ``work`` launches; nothing is."""
    kernels = []
    launch = Launch.__call__

    def compile_only(self: Launch, addresses: Sequence[int]) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = self.compile()
        PTXAS_SAID.setdefault(kernel.hash, said.getvalue())
        kernels.append((self.kernel.__name__, kernel))

    driver.set_active(AbsentHopper())
    triton.knobs.compilation.always_compile = True  # a kernel from the cache comes without words
    triton.knobs.nvidia.dump_ptxas_log = True
    forward.multiprocessors = lambda device: 132
    forward.current_device = backward.current_device = lambda: None
    Launch.__call__ = compile_only
    try:
        work()
    finally:
        Launch.__call__ = launch
    yield from kernels


def assembled(kernel: Any) -> dict[str, Any]:
    """What ptxas said for sm_90a, and where it spills.

    registers: at entry. spills: bytes of a thread, stores and loads. warnings: codes. shared: bytes
    of a block. loops: counts of LDL and STL in each of :func:`inner_loops`, in the order of the
    code. steps: of all instructions there. after: the share of its exponentials (or other work of
    the special function unit) that comes after the last barrier of such a step. loads: as of
    :func:`loads_before_arrivals`.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass = output([CUOBJDUMP, "-sass", file.name])
    said = PTXAS_SAID[kernel.hash]
    loops = inner_loops(sass)
    return {
        "triton": triton.__version__,
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "warnings": re.findall(r"C7\d{3}", said),
        "shared": kernel.metadata.shared,
        "loops": [body.count("LDL") + body.count("STL") for body in loops],
        "steps": [len(body) for body in loops],
        "after": [after_last_barrier(body) for body in loops],
        "loads": loads_before_arrivals(sass),
    }


def output(command: list[Any]) -> str:
    """Both streams of a program that must succeed."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?([A-Z0-9]+)\S* ?([^;]*);")


def after_last_barrier(body: list[str]) -> float:
    """Which share of all MUFU in a loop comes after its last hardware barrier; 0 without one."""
    last = max((i for i, op in enumerate(body) if op == "BAR"), default=len(body))
    return body[last:].count("MUFU") / max(body.count("MUFU"), 1)


def loads_before_arrivals(sass: str) -> list[int]:
    """How often a thread loads from shared memory where ``key_pass`` hands over P, place by place.

    From where it waits until P is written, to where it says that P may be overwritten. Both places
    load the same, unless a compiler has moved loads too far.
    """
    written, read = (FIRST_NAMED_BARRIER.value + x.value for x in (P_WRITTEN, P_READ))
    found, loads = [], None
    for op, operands in re.findall(r"\b(BAR\.SYNC|BAR\.ARV|LDS)\S* ([^;]*);", sass):
        barrier = operands.startswith
        if op == "BAR.SYNC" and barrier(f"{written:#x}, "):
            loads = 0
        elif op == "BAR.ARV" and barrier(f"{read:#x}, ") and loads is not None:
            found.append(loads)
            loads = None
        elif op == "LDS" and loads is not None:
            loads += 1
    return found


def inner_loops(sass: str) -> list[list[str]]:
    """Instructions of innermost loops with HGMMA; a loop ends in a conditional branch.

    Forward, only the loops that compare the fewest fp32 numbers: others are for the diagonal, and
    for tiles of queries that come once more.
    """
    code = [(int(a, 16), guard, op, rest) for a, guard, op, rest in INSTRUCTION.findall(sass)]
    loops = []
    for address, guard, op, target in code:
        if op == "BRA" and guard and int(target.split()[-1], 16) < address:
            body = [op for at, _, op, _ in code if int(target.split()[-1], 16) <= at <= address]
            if "HGMMA" in body:
                loops.append((int(target.split()[-1], 16), address, body))
    innermost = [
        x for x in loops if not any(x[0] <= y[0] and y[1] <= x[1] and y != x for y in loops)
    ]
    fewest = min((body.count("FMNMX") for _, _, body in innermost), default=0)
    usual = [x for x in innermost if x[2].count("FMNMX") == fewest]
    return [body for _, _, body in sorted(usual)]


def main() -> None:
    """Requests from standard input, rows to standard output."""
    for request in (Request(**r) for r in json.load(sys.stdin)):
        for name, kernel in compiled(lambda request=request: launch(request)):
            if "wgmma" in kernel.asm["ptx"]:
                row = dataclasses.asdict(request) | {"kernel": name} | assembled(kernel)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
