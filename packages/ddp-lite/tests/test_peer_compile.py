"""The kernel of the copies, compiled for GPUs that need not be there."""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddp_lite.peer.kernel import DTYPES, average_kernel

TENSORS = 8  # that share a launch


def accesses(capability, world_size, names):
    rows, given, into = ({str(d): t for d, t in DTYPES.items()}["torch." + name] for name in names)
    arguments = average_kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    signature, attributes = {}, {}
    for place, name in enumerate(arguments):
        if name in ("owns", "targets", "starts", "numels"):
            signature[name] = ("i64" if name in ("owns", "targets") else "i32",) * TENSORS
            attributes |= {(place, index): aligned for index in range(TENSORS)}
        elif name in ("rows", "row_length"):
            signature[name] = "i64"
            attributes[place,] = aligned
        else:
            signature[name] = "constexpr"
    chosen = {"world_size": world_size, "result": None, "dtype": rows, "given": given, "into": into}
    chosen |= {"aligned": True, "block": 4096}
    constants = {(arguments.index(name),): value for name, value in chosen.items()}
    compiled = triton.compile(
        ASTSource(average_kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8, "enable_fp_fusion": False},
    )
    access = r"(?:ld|st)\\.global\\.(v\\d\\.b\\d+|[a-z]?\\d+)"
    return sorted(set(re.findall(access, compiled.asm["ptx"])))


print(json.dumps([accesses(*case) for case in json.loads(sys.argv[1])]))
"""


CASES = [
    (capability, world_size, dtypes)
    for world_size, dtypes in (
        (4, ("float32", "float32", "float32")),
        (4, ("bfloat16", "bfloat16", "float32")),  # averages of a stage 3
        (1, ("bfloat16", "float32", "bfloat16")),  # its shards, published
        (8, ("float16", "float16", "float16")),
    )
    for capability in (80, 90)
]


@pytest.fixture(scope="module")
def accesses() -> list[list[str]]:
    """Kinds of access to memory in the code of each case, by one process without interpreter."""
    pytest.importorskip("triton")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_16_bytes_at_a_time(case: int, accesses: list[list[str]]) -> None:
    """Tensors that share a launch are read and written by the widest instructions."""
    assert set(accesses[case]) <= {"v4.b32", "v2.b64"}
