"""Which reports of compute-sanitizer are not of races."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).parents[1] / "packages/flashattn-triton/tools"
KERNEL = "hopper_forward_kernel"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("sanitize_attention")


def report(*accesses: tuple[str, int], kernel: str = KERNEL, file: str = "forward_kernel") -> str:
    places = [f"{kind} access at {kernel}+0x180 in {file}.py:{line}" for kind, line in accesses]
    others = "".join(f"=========     and {place} [9 hazards]\n" for place in places[1:])
    return f"========= Error: Race reported between {places[0]}\n{others}========= \n"


def test_only_reads_of_the_compiler_and_handovers_at_mbarriers_are_no_races(script):
    source = script.KERNELS / "hopper/forward_kernel.py"
    lines = ["", *source.read_text().splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith(f"def {KERNEL}("))
    handed_over = next(i for i, line in enumerate(lines) if line.endswith(script.HANDED_OVER))
    compilers = report(("Read", first), ("Write", first), ("Write", first + 20))
    read = report(("Read", 200), ("Write", handed_over), ("Write", handed_over))
    written = report(("Write", handed_over), ("Read", 200), ("Read", 205))

    def expected(output: str, handovers: bool = True) -> int | None:
        found: int | None = script.expected_reports(output, handovers)
        return found

    assert expected(compilers) == expected(compilers, handovers=False) == 1
    assert expected(compilers * 3 + read + written) == 5
    assert expected(read, handovers=False) is None
    assert expected(compilers + report(("Read", first + 30), ("Write", first + 20))) is None
    assert expected(report(("Read", 200), ("Write", handed_over), ("Write", 210))) is None
    assert expected(report(("Write", first), ("Read", first))) is None
    assert expected(report(("Read", first), ("Write", first), kernel="another_kernel")) is None
    assert expected("========= Invalid __global__ read of size 4 bytes\n") is None
    assert expected(read + "========= Error: no host memory\n") is None
    assert expected("") is None


def test_the_control_must_report_more_than_the_compilers_reads(script, monkeypatch):
    lines = ["", *script.CONTROL.read_text().splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("def control("))
    handed_over = next(i for i, line in enumerate(lines) if line.endswith(script.HANDED_OVER))
    names = {"kernel": "control", "file": "racecheck_control"}
    compilers = report(("Read", first), ("Write", first), **names)
    handover = report(("Read", 28), ("Write", handed_over), **names)

    def found(output: str) -> bool:
        result = SimpleNamespace(stdout=output)
        monkeypatch.setattr(script, "watched", lambda *arguments: result)
        answer: bool = script.reports_control("compute-sanitizer")
        return answer

    assert found(compilers + handover + "control ran\n")
    assert not found(compilers + "control ran\n")
    assert not found(compilers + handover + "control is wrong\n")
    assert not found("control ran\n")


def test_two_tiers_have_a_file_of_one_name(script):
    for source in script.KERNELS.rglob("key_pass.py"):
        lines = source.read_text().splitlines()
        first = 1 + next(i for i, x in enumerate(lines) if x.startswith("def key_pass_kernel("))
        read = report(("Read", first), ("Write", 20), kernel="key_pass_kernel", file="key_pass")
        assert script.expected_reports(read, handovers=True) == 1
    past_the_end = report(("Read", 10_000), ("Write", 10_000), file="key_pass")
    assert script.expected_reports(past_the_end, handovers=True) is None
