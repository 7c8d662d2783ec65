"""Runs on GPUs, by versions of torch and Triton: tests that were recorded, and published rows.

``docs/gpu-tests.jsonl`` holds one line for each part of the GPU tests, which :func:`record` writes
from pytest's JUnit file. :func:`table` joins it with the published rows.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.pages import rows as published

from bench_harness.core import plural
from bench_harness.store import replace_file

_MACHINE = re.compile(
    r"(?:(?:(?P<count>\d+) × )?NVIDIA (?P<gpu>\w+))?.*?\btorch (?P<torch>\d+\.\d+)"
    r"(?:.*\btriton (?P<triton>\d+\.\d+))?"
)


def record(target: Path, junit: Path, part: str, commit: str, machine: str) -> dict[str, Any]:
    """Puts one run of a part of the tests into the file, in place of an earlier one of that part.

    Args:
        junit: what ``pytest --junitxml`` wrote.
        part: "one GPU" or "several GPUs".
        machine: GPUs and versions, as "2 × NVIDIA H100, torch 2.11.0, triton 3.6.0".

    Raises:
        ValueError: the file is no JUnit file, a test failed, or the machine names no versions.
    """
    try:
        suite = next(ET.parse(junit).getroot().iter("testsuite")).attrib
    except (OSError, ET.ParseError, StopIteration) as error:
        raise ValueError(f"junit must be pytest's file, but got {junit}: {error!r}.") from None
    tests, skipped, *bad = (int(suite[n]) for n in ("tests", "skipped", "failures", "errors"))
    if any(bad):
        raise ValueError(
            f"recorded tests must pass, but got {bad[0]} failures and {bad[1]} errors in {junit}. "
            "Correct them first."
        )
    _machine(machine)
    run = {"part": part, "commit": commit, "measured_on": machine, "passed": tests - skipped}
    run |= {"skipped": skipped, "seconds": round(float(suite["time"]))}
    runs = [each for each in recorded(target) if each["part"] != part] if target.exists() else []
    lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in [*runs, run])
    replace_file(target, "".join(lines).encode())
    return run


def recorded(file: Path) -> list[dict[str, Any]]:
    """The recorded runs of tests."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(tests: Path, rows: Iterable[Path]) -> str:
    """A Markdown table: for each torch and Triton that ran on GPUs, tests and measurements."""
    ran: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run in recorded(tests):
        minutes, seconds = divmod(run["seconds"], 60)
        took = f" in {minutes} min {seconds} s" if run["seconds"] else ""
        skipped = f", {run['skipped']} skipped" if run["skipped"] else ""
        versions, gpus = _machine(run["measured_on"])
        ran[versions].append(
            f"{run['part']}: {run['passed']:,} passed{skipped}{took}, on {gpus} at {run['commit']}"
        )
    cases = {
        (file, row["case_key"]): _machine(row["measured_on"])
        for file in rows
        for row in published.read(file)
    }
    on_gpus = [(versions, gpus) for versions, gpus in cases.values() if gpus]
    lines = ["| torch | Triton | tests on GPUs | measured |", "|---|---|---|---|"]
    for key in sorted({*ran, *dict(on_gpus)}, reverse=True):
        own = [gpus for versions, gpus in on_gpus if versions == key]
        count, of = plural(len(own), "case"), ", ".join(sorted({*own}))
        measured = f"{count}, on {of}" if own else "nothing"
        lines.append(f"| {key[0]} | {key[1]} | {'; '.join(ran[key]) or 'none'} | {measured} |")
    return "\n".join(lines)


def _machine(text: str) -> tuple[tuple[str, str], str]:
    """The versions of torch and Triton of a machine, and its GPUs if it names any."""
    found = _MACHINE.match(text)
    if found is None:
        raise ValueError(
            f"machine must name its torch and triton, but got {text!r}. Write "
            '"2 × NVIDIA H100, torch 2.11.0, triton 3.6.0".'
        )
    # Rows of an earlier program name torch alone, which requires one Triton.
    triton = found["triton"] or {"2.11": "3.6"}.get(found["torch"], "unknown")
    gpus = f"{found['count'] or 1} × {found['gpu']}" if found["gpu"] else ""
    return (found["torch"], triton), gpus
