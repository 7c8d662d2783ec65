"""Compiles the kernels for a GPU that is not there, and reads what the compiler says.

Run as a program, in a process where TRITON_INTERPRET is not set: it reads a JSON list of requests
from standard input and writes one JSON row for each compiled kernel. The launchers themselves are
called, with tensors on the "meta" device and a driver that only knows the GPU's architecture, so
that what is compiled is what would be launched.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from launch_kernels import triton_backward, triton_bias_backward, triton_forward
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from flashattn_triton.configs import TABLE, Tiling
from flashattn_triton.launch import Launch
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import MAX_HEAD_DIM_BACKWARD, new_problem

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class AbsentGPU:
    """What the launcher asks of a driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Request:
    """One problem on one GPU.

    ``tiling`` as ``Tiling.pack`` writes it; ``tensors``: which of ``mask_and_bias.NAMES`` it has;
    ``bias``: its dtype; ``packed``: two sequences without padding instead of a batch of two.
    """

    architecture: int
    head_dim: int
    dtype: str
    tiling: list[int]
    options: dict[str, Any]
    length: int = 4096
    forward: bool = True
    backward: bool = True
    tensors: list[str] = dataclasses.field(default_factory=list)
    bias: str = "fp32"
    packed: bool = False

    def given(self, shape: tuple[int, ...]) -> Given:
        """The tensors for queries and keys of ``shape``, with one bias for the whole batch."""
        batch, heads, length, _ = shape
        tensors = {
            "alibi_slopes": torch.empty(batch, heads, device="meta"),
            "bias": torch.empty(1, heads, length, length, dtype=DTYPES[self.bias], device="meta"),
            "prefix_lengths": torch.empty(batch, dtype=torch.int32, device="meta"),
            "mask": torch.empty(batch, length, dtype=torch.uint8, device="meta"),
        }
        starts = torch.empty(3, dtype=torch.int32, device="meta") if self.packed else None
        own = {name: tensors[name] for name in self.tensors}
        return Given(cu_seqlens_q=starts, cu_seqlens_k=starts, **own)


def compiled_kernels(request: Request) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of everything that the request launches."""
    kernels = []
    launch = Launch.__call__

    def compile_only(self: Launch, addresses: Mapping[str, int]) -> None:
        kernels.append((self.kernel.__name__, self.compile(addresses)))

    driver.set_active(AbsentGPU(request.architecture))
    Launch.__call__ = compile_only
    try:
        sizes = (1, 4, 2 * request.length) if request.packed else (2, 4, request.length)
        shape = (*sizes, request.head_dim)
        query, key, value, grad_out = (
            torch.empty(shape, dtype=DTYPES[request.dtype], device="meta") for _ in range(4)
        )
        longest = (request.length, request.length) if request.packed else (0, 0)
        options = new_problem(head_dim=request.head_dim, longest=longest, **request.options)
        tiling = Tiling.unpack(request.tiling)
        given = request.given(shape)
        if request.forward:
            triton_forward(query, key, value, options, tiling.forward, given)
        if request.backward:
            lse = torch.empty(shape[:3], device="meta")
            tensors = (query, key, value, value, lse, grad_out, None)
            triton_backward(*tensors, options, tiling, given=given)
            if given.bias is not None:
                triton_bias_backward(*tensors, options, tiling, given=given)
    finally:
        Launch.__call__ = launch
    yield from kernels


def resources(kernel: Any) -> dict[str, int]:
    """Registers and bytes of stack of one thread (spills live there); shared bytes of a block."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", text)}
    return {
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }


# Shared memory that one block may have, in KB (CUDA C++ programming guide, compute capabilities),
# and which rows of the shipped table that selects.
ARCHITECTURES = {90: 227, 100: 227, 80: 163, 86: 99, 89: 99, 120: 99}


def shipped() -> list[Request]:
    """Every row of the table on every architecture that takes it."""
    return [
        Request(
            architecture,
            width,
            {2: "bf16", 4: "fp32"}[itemsize],
            tiling.pack(),
            {"causal": c},
            backward=width <= MAX_HEAD_DIM_BACKWARD,
        )
        for architecture, limit in ARCHITECTURES.items()
        for (kilobytes, width, itemsize), tiling in TABLE.items()
        for c in (False, True)
        if kilobytes == max(row for row, _, _ in TABLE if row <= limit)
    ]


def main() -> None:
    """Compiles the requests on standard input.

    ``--shipped`` compiles the whole table instead.
    """
    everything = "--shipped" in sys.argv[1:]
    requests = shipped() if everything else [Request(**r) for r in json.load(sys.stdin)]
    for request in requests:
        for name, kernel in compiled_kernels(request):
            row = dataclasses.asdict(request) | {"kernel": name} | resources(kernel)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
