"""Which reports of compute-sanitizer are taken for the compiler's own."""

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "packages/flashattn-triton/tools"
RAN = "12 problems ran with implementation 'auto'\n"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("sanitize_attention")


def report(kernel: str, line: int) -> str:
    return (
        "========= Error: Race reported between Read access at "
        f"{kernel}+0x180 in forward_kernel.py:{line}\n"
        f"=========     and Write access at {kernel}+0xbbb0 in forward_kernel.py:{line + 20} [9]\n"
    )


def test_only_races_on_a_kernels_first_line_are_the_compilers(script):
    kernel = "hopper_forward_kernel"
    source = script.KERNELS / "hopper/forward_kernel.py"
    lines = source.read_text().splitlines()
    first = 1 + next(i for i, line in enumerate(lines) if line.startswith(f"def {kernel}("))

    def accepted(output: str) -> int | None:
        found: int | None = script.compilers_own(output)
        return found

    assert accepted(report(kernel, first) + RAN) == 1
    assert accepted(report(kernel, first) * 3 + RAN) == 3
    assert accepted(report(kernel, first)) is None  # the program did not end
    assert accepted(report(kernel, first) + report(kernel, first + 30) + RAN) is None
    assert accepted(report("another_kernel", first) + RAN) is None
    other = "========= Error: Race reported between Write access at f+0x1 in forward_kernel.py:1\n"
    assert accepted(report(kernel, first) + other + RAN) is None
    assert accepted("========= Invalid __global__ read of size 4 bytes\n" + RAN) is None
