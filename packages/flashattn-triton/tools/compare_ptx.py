"""Compares the PTX that every shipped configuration compiles to between two commits.

    python tools/compare_ptx.py BASE [OTHER] [--architectures 90 80] [--only hopper] [--match TEXT]
                                [--assemble] [--keep FOLDER]

BASE and OTHER are commits; without OTHER it is the working tree. A change of the package that
should not change what a GPU runs, such as another way to pass arguments, prints "0 differ". No GPU
is needed: the compiler stops before ptxas, whose program is a function of the PTX. Each side is
compiled by its own tests/compile_kernels.py and tests/compile_hopper.py, which call the launchers.
Line numbers are left out of the PTX, because every edit moves them.

A change of the source often only orders or names the PTX in another way. ``--assemble`` has ptxas
assemble the kernels that differ: those with the same machine code differ no more, and of the others
registers, spilled bytes and instructions are printed on both sides. ``--match`` is a regular
expression for the requests, which are JSON.

``--triton FOLDER`` compiles with the Triton that is installed there instead (``uv pip install
--no-deps --target FOLDER triton==3.6.0``). ``--keep FOLDER`` leaves the PTX of OTHER in a folder,
which can be BASE the next time. Exit status 1 if a kernel differs or exists on one side only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
SCRIPTS = {"portable": "compile_kernels", "hopper": "compile_hopper"}
#: Besides the masks of compile_kernels.shipped(): what else adds code to a kernel.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"options": {"causal": True, "deterministic": True}, "forward": False},
    {"options": {"causal": "bottom-right", "window": [300, 20], "softcap": 5.0, "scale": -0.1}},
    {"options": {"causal": True}, "tensors": ["alibi_slopes", "bias", "prefix_lengths"]},
    {"options": {"causal": True}, "packed": True},
)


#: Before the options of ptxas, in the last line of PTX.
OPTIONS = "// ptxas "


def wanted(package: Path, only: str | None, architectures: Sequence[int]) -> list[list[Any]]:
    """[kind, request] of every shipped configuration, as the package's own scripts list them."""
    sys.path[:0] = [str(package / "src"), str(package / "tests")]
    found = []
    for kind, script in SCRIPTS.items():
        if only in (None, kind) and (kind == "portable" or 90 in architectures):
            for request in importlib.import_module(script).shipped():
                given = dataclasses.asdict(request)
                if given.get("architecture", 90) not in architectures:
                    continue
                found.append([kind, given])
                if kind == "portable" and given["options"] == {"causal": True}:
                    found += [[kind, given | variant] for variant in VARIANTS]
    return found


def compile_here(tests: Path, folder: Path) -> None:
    """Writes the PTX of the requests on standard input into ``folder``, and an index of it."""
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.make_cubin = lambda *_: b""
    sys.path.insert(0, str(tests))
    index = {}
    for number, (kind, given) in enumerate(json.load(sys.stdin)):
        script = importlib.import_module(SCRIPTS[kind])
        known = {field.name for field in dataclasses.fields(script.Request)}  # to that commit
        request = script.Request(**{name: x for name, x in given.items() if name in known})
        if kind == "portable":
            kernels = script.compiled_kernels(request)
        else:
            kernels = script.compiled(functools.partial(script.launch, request))
        seen: Counter[str] = Counter()  # a request may launch one kernel twice
        for position, (name, kernel) in enumerate(kernels):
            seen[name] += 1
            file = f"{number}-{position}-{name}.ptx"
            options = getattr(getattr(kernel, "metadata", None), "ptx_options", None) or ""
            text = f"{kernel.asm['ptx']}{OPTIONS}{options}\n" if options else kernel.asm["ptx"]
            (folder / file).write_text(text, encoding="utf-8")
            index[f"{kind} {name} {seen[name]} {json.dumps(given, sort_keys=True)}"] = file
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def check_out(commit: str | None, folder: Path) -> Path:
    """The package as a commit has it, unpacked into ``folder``; the working tree for None.

    Raises:
        SystemExit: no such commit, or the package is not in it.
    """
    if commit is None:
        return PACKAGE
    root, prefix = (
        subprocess.run(
            ["git", "-C", str(PACKAGE), "rev-parse", which],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for which in ("--show-toplevel", "--show-prefix")
    )
    archive = subprocess.run(
        ["git", "-C", root, "archive", f"{commit}:{prefix}"], capture_output=True, check=False
    )
    if archive.returncode:
        raise SystemExit(
            f"a side must be a commit that holds {prefix}, but got {commit!r}: "
            f"{archive.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def compiled(package: Path, folder: Path, requests: Sequence[Any], triton: Path | None) -> None:
    """Compiles requests with the package in ``package``, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(x) for x in (triton, package / "src") if x is not None]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_DISABLE_LINE_INFO": "1"}
    with tempfile.TemporaryDirectory() as cache:  # it would keep kernels without machine code
        result = subprocess.run(
            [sys.executable, __file__, "--compile", str(package / "tests"), str(folder)],
            input=json.dumps(requests),
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise SystemExit(f"{package} cannot be compiled:\n{result.stderr[-3000:]}")


def kernels(folder: Path, requests: Sequence[Any]) -> dict[str, str]:
    """The PTX in a folder that some requests compiled to, by what it was compiled from."""
    asked = {(kind, json.dumps(given, sort_keys=True)) for kind, given in requests}
    return {
        name: (index.parent / file).read_text(encoding="utf-8")
        for index in folder.glob("*/index.json")
        for name, file in json.loads(index.read_text(encoding="utf-8")).items()
        if (name.split()[0], name[name.index("{") :]) in asked
    }


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """What ptxas makes of a kernel."""

    registers: int
    spills: int
    code: tuple[str, ...]

    def __str__(self) -> str:
        """All but the code itself."""
        return (
            f"{self.registers} registers, {self.spills} bytes spilled, "
            f"{len(self.code)} instructions"
        )


def assembled(ptx: str, triton: Path | None) -> MachineCode:
    """The machine code of a kernel, by the ptxas that comes with Triton."""
    package = triton / "triton" if triton else Path(importlib.import_module("triton").__path__[0])
    tools = package / "backends/nvidia/bin"
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.M)
    # Triton 3.9 brings two, of CUDA 12 and 13, and writes PTX 9 for the latter alone.
    ptxas = "ptxas-blackwell" if re.search(r"^\.version 9", ptx, re.M) else "ptxas"
    options = [x for line in ptx.splitlines() if line.startswith(OPTIONS)
               for x in line.removeprefix(OPTIONS).split()]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        said, listing = (
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True).stdout
            for command in (
                [tools / ptxas, "-v", f"-arch={architecture}", *options, source, "-o", cubin],
                [tools / "cuobjdump", "-sass", cubin],
            )
        )  # fmt: skip
    return MachineCode(
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spills=sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        code=tuple(re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?;)", listing)),
    )


def report(
    base: dict[str, str], other: dict[str, str], assemble: bool = False, triton: Path | None = None
) -> bool:
    """Prints what differs, and whether nothing does."""
    both = base.keys() & other.keys()
    different = sorted(name for name in both if base[name] != other[name])
    lone = sorted(base.keys() ^ other.keys())
    if assemble:
        codes = {name: [assembled(x[name], triton) for x in (base, other)] for name in different}
        same = [name for name, (before, after) in codes.items() if before.code == after.code]
        print(f"{len(same)} kernels have other PTX and the same machine code")
        different = [name for name in different if name not in same]
    for name in different:
        print(f"differs: {name}")
        if assemble:
            print("    BASE  {}\n    OTHER {}".format(*codes[name]))
    for name in lone:
        print(f"only in {'BASE' if name in base else 'OTHER'}: {name}")
    print(f"{len(both)} kernels compared: {len(different)} differ; {len(lone)} on one side only")
    return not different and not lone


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="commit, or a folder that --keep left")
    parser.add_argument("other", nargs="?", help="commit; the working tree if left out")
    parser.add_argument("--architectures", type=int, nargs="+", default=[90])
    parser.add_argument("--only", choices=SCRIPTS)
    parser.add_argument("--match", default="", help="regular expression that requests contain")
    parser.add_argument("--assemble", action="store_true", help="compare machine code")
    parser.add_argument("--triton", type=Path, help="folder of another Triton")
    parser.add_argument("--keep", type=Path, help="folder for the PTX of OTHER")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(given.base) if Path(given.base).is_dir() else None
        folders = {"base": kept or Path(scratch) / "base", "other": given.keep or
                   Path(scratch) / "other"}  # fmt: skip
        packages = {"other": check_out(given.other, Path(scratch) / "other-package")}
        if kept is None:
            packages["base"] = check_out(given.base, Path(scratch) / "base-package")
        requests = [
            request
            for request in wanted(packages["other"], given.only, given.architectures)
            if re.search(given.match, json.dumps(request))
        ]
        parts = max(1, given.jobs // len(packages))
        with ThreadPoolExecutor(given.jobs) as pool:
            running = [
                pool.submit(
                    compiled,
                    package,
                    folders[side] / str(part),
                    requests[part::parts],
                    given.triton,
                )
                for side, package in packages.items()
                for part in range(parts)
            ]
            for each in running:
                each.result()
        base, other = (kernels(folders[side], requests) for side in ("base", "other"))
        return 0 if report(base, other, given.assemble, given.triton) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_here(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        raise SystemExit(main())
