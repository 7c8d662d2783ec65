"""The kernel of the copies, compiled for GPUs that need not be there."""

import json
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

capability, world_size, names, tensors = json.loads(sys.argv[1])
rows, given, into = ({str(d): t for d, t in DTYPES.items()}["torch." + name] for name in names)
arguments = average_kernel.arg_names
aligned = [["tt.divisibility", 16]]
signature, attributes = {}, {}
for place, name in enumerate(arguments):
    if name in ("owns", "targets", "starts", "numels"):
        signature[name] = ("i64" if name in ("owns", "targets") else "i32",) * tensors
        attributes |= {(place, index): aligned for index in range(tensors)}
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
accesses = set(re.findall(r"(?:ld|st)\\.global\\.(v\\d\\.b\\d+|[a-z]?\\d+)", compiled.asm["ptx"]))
print(json.dumps(sorted(accesses)))
"""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [
        (4, ("float32", "float32", "float32")),
        (4, ("bfloat16", "bfloat16", "float32")),  # averages of a stage 3
        (1, ("bfloat16", "float32", "bfloat16")),  # its shards, published
        (8, ("float16", "float16", "float16")),
    ],
    ids=str,
)
def test_16_bytes_at_a_time(
    capability: int, world_size: int, dtypes: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that share a launch are read and written by the widest instructions."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = json.dumps([capability, world_size, dtypes, 8])
    command = [sys.executable, "-c", COMPILE, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= {"v4.b32", "v2.b64"}
