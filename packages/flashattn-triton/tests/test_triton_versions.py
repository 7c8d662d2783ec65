"""What is private to Triton: compiled launchers get what Triton's own launch would give them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.runtime.driver import driver as active_driver

from flashattn_triton import triton_versions
from flashattn_triton.launch import tile_view
from flashattn_triton.triton_versions import TileView

known = pytest.mark.skipif(
    triton_versions.refusal() is not None, reason=str(triton_versions.refusal())
)

GRID = (5, 1, 1)
POINTER = torch.bfloat16
POINTERS = {"q": POINTER, "k": POINTER}
ENCODING = {
    "swizzle": 3,
    "elem_size": 2,
    "elem_type": 10,
    "block_size": [1, 1, 64, 64],
    "fp4_padded": False,
}
SIGNATURES = {
    True: {"q": "*bf16", "k": "tensordesc<bf16[1, 1, 64, 64]>", "n": "i32", "D": "constexpr"},
    False: {"q": "*bf16", "k": "*bf16", "n": "i32", "D": "constexpr"},
}


class Driver:
    """Encodes descriptors as what they are made of, and counts; records what would be launched."""

    def __init__(self) -> None:
        self.utils = self
        self.encoded = 0
        self.stream = 7
        self.launched: list[tuple[Any, ...]] = []
        self.launch = Compiled(self.launched)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def fill_tma_descriptor(self, *what: Any) -> tuple[Any, ...]:
        self.encoded += 1
        return _as_tuples(what)

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Compiled:
    """A compiled function, which has no source; lists and tuples are the same to it."""

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def __call__(self, *arguments: Any) -> None:
        self.launched.append(_as_tuples(arguments))


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list | tuple) else x


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(active_driver, "_active", fake)
    return fake


def launcher_of(driver: Driver, with_descriptor: bool, **attributes: Any) -> SimpleNamespace:
    """What Triton's launcher of a compiled kernel holds."""
    encodings = [ENCODING] * with_descriptor
    held: dict[str, Any] = {
        "launch": wrap_handle_tensordesc(driver.launch, SIGNATURES[with_descriptor], encodings),
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
        "gsan_enabled": False,
        "arg_annotations": "annotations",
        "kernel_signature": b"signature",
    }
    return SimpleNamespace(**held | attributes)


def compiled_with(launcher: Any, with_descriptor: bool) -> Any:
    return SimpleNamespace(
        run=launcher,
        function=4711,
        packed_metadata=(4, 1, 99),
        metadata=SimpleNamespace(tensordesc_meta=[ENCODING] * with_descriptor),
        launch_metadata=lambda grid, stream: ("metadata", grid, stream),
    )


def started(driver: Driver, with_descriptor: bool, **parameters: Any) -> Any:
    compiled = compiled_with(launcher_of(driver, with_descriptor), with_descriptor)
    return triton_versions.fast_launcher(compiled, GRID, parameters, REST)


def by_triton(
    driver: Driver, with_descriptor: bool, *arguments: Any, hooks: Any = (None, None, None)
) -> tuple[Any, ...]:
    """What the compiled launcher gets from the installed Triton itself."""
    held = launcher_of(driver, with_descriptor)
    CudaLauncher.__call__(held, *GRID, driver.stream, 4711, (4, 1, 99), *hooks, *arguments)
    return driver.launched.pop()


REST = (300, 64)


@known
@pytest.mark.parametrize("with_descriptor", [False, True])
def test_arguments_are_tritons(driver: Driver, with_descriptor: bool) -> None:
    q, k = torch.empty(2, 3, 100, 64), torch.empty(2, 3, 100, 64)
    view = tile_view(k.shape, k.stride(), [1, 1, 64, 64], k.dtype) if with_descriptor else None
    start = started(driver, with_descriptor, q=POINTER, k=view or POINTER)
    start({"k": k.data_ptr(), "q": q.data_ptr()})
    fast = driver.launched.pop()
    described = view.of(k) if view else k.data_ptr()
    assert fast == by_triton(driver, with_descriptor, q.data_ptr(), described, *REST)


@known
def test_absent_tensors_are_passed_on(driver: Driver) -> None:
    started(driver, False, q=POINTER, k=None)({"q": 16})
    fast = driver.launched.pop()
    assert fast == by_triton(driver, False, 16, None, *REST)


@known
def test_an_address_is_encoded_once_and_few_are_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_versions, "_KEPT", 2)
    view = TileView([2, 3, 100, 64], [19200, 6400, 64, 1], [1, 1, 64, 64], torch.float32)
    start = started(driver, True, q=POINTER, k=view)
    for address, encodings in ((16, 1), (32, 2), (16, 2), (32, 2), (48, 3), (16, 4)):
        start({"q": 0, "k": address})
        assert driver.encoded == encodings
        assert f"({address}, 3, 2," in str(driver.launched[-1])


@known
def test_streams_are_those_of_each_call(driver: Driver) -> None:
    start = started(driver, False, q=POINTER, k=POINTER)
    for stream in (7, 8):
        driver.stream = stream
        start({"q": 16, "k": 32})
        fast = driver.launched.pop()
        assert fast == by_triton(driver, False, 16, 32, *REST)


@pytest.fixture
def hook() -> Iterator[Any]:
    """A profiler's."""

    def called(metadata: Any) -> None:
        """The compiled launcher would call it."""

    knobs.runtime.launch_exit_hook.add(called)
    yield called
    knobs.runtime.launch_exit_hook.remove(called)


@known
def test_profilers_hooks_are_told(driver: Driver, hook: Any) -> None:
    start = started(driver, False, q=POINTER, k=POINTER)
    start({"q": 16, "k": 32})
    told = driver.launched.pop()
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    seen = ("metadata", GRID, 7)
    assert told == by_triton(driver, False, 16, 32, *REST, hooks=(seen, *hooks))
    knobs.runtime.launch_exit_hook.remove(hook)
    start({"q": 16, "k": 32})
    untold = driver.launched.pop()
    assert untold == by_triton(driver, False, 16, 32, *REST)


@known
@pytest.mark.parametrize("which", ["global_scratch_size", "profile_scratch_size"])
def test_scratch_memory_is_left_to_triton(driver: Driver, which: str) -> None:
    compiled = compiled_with(launcher_of(driver, False, **{which: 128}), False)
    assert triton_versions.fast_launcher(compiled, GRID, POINTERS, REST) is None


PUBLIC = ("", "language", "experimental", "tools.tensor_descriptor", "runtime.errors")


def test_nobody_else_imports_private_modules() -> None:
    """Kernels and launchers import Triton's languages and its descriptors, and nothing else."""
    for file in Path(triton_versions.__file__).parent.rglob("*.py"):
        if file.name == "triton_versions.py":
            continue
        for module in re.findall(r"^\s*(?:from|import) triton\b\.?(\S*)", file.read_text(), re.M):
            assert module in PUBLIC or module.startswith("experimental.gluon"), (file, module)
        assert "from triton import" not in file.read_text(), file


def test_another_vendors_launcher_is_left_to_triton(driver: Driver) -> None:
    compiled = compiled_with(SimpleNamespace(launch=print), False)
    assert triton_versions.fast_launcher(compiled, GRID, POINTERS, REST) is None


def test_descriptors_without_a_tma_are_left_to_triton(driver: Driver) -> None:
    view = TileView([2, 3, 100, 64], [19200, 6400, 64, 1], [1, 1, 64, 64], torch.float32)
    for encodings in (None, [], [None]):
        compiled = compiled_with(launcher_of(driver, False), False)
        compiled.metadata.tensordesc_meta = encodings
        assert (
            triton_versions.fast_launcher(compiled, GRID, {"q": POINTER, "k": view}, REST) is None
        )


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A version from the future."""
    monkeypatch.setattr(triton, "__version__", "3.99.1+git1234")
    triton_versions.refusal.cache_clear()
    yield
    triton_versions.refusal.cache_clear()


@pytest.mark.usefixtures("untested")
def test_untested_versions_are_left_to_triton(driver: Driver) -> None:
    assert triton_versions.installed() == (3, 99)
    assert triton_versions.refusal() == (
        f"it needs {triton_versions.KNOWN}, and Triton 3.99.1+git1234 is installed"
    )
    assert started(driver, False, q=POINTER, k=POINTER) is None


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(triton_versions.importlib, "import_module", missing)
    triton_versions.refusal.cache_clear()
    assert triton_versions.refusal() == "Triton is not installed"
    triton_versions.refusal.cache_clear()


def _literals_that_stay(source: str) -> list[str]:
    """Names that have a value before a loop, to which the loop assigns a literal."""
    found = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        assigned = [
            (target.id, node.lineno, isinstance(node.value, ast.Constant))
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        for loop in (n for n in ast.walk(function) if isinstance(n, ast.For | ast.While)):
            before = {name for name, line, _ in assigned if line < loop.lineno}
            found += [
                f"{function.name}: {name}, line {line}"
                for name, line, literal in assigned
                if literal and name in before and loop.lineno < line <= (loop.end_lineno or 0)
            ]
    return found


def test_loops_of_gluon_kernels_assign_no_literal_to_what_was_there_before() -> None:
    """Gluon of Triton 3.6 and 3.7 would go on with the value from before the loop.

    The simulator, which runs kernels as Python, cannot see that.
    """
    trap = "def kernel(n):\n    x = 1\n    for _ in range(n):\n        use(x)\n        x = 0"
    assert _literals_that_stay(trap) == ["kernel: x, line 5"]
    kernels = Path(triton_versions.__file__).parent.joinpath("hopper").glob("*.py")
    found = {path.name: _literals_that_stay(path.read_text()) for path in kernels}
    assert len(found) > 10
    assert not any(found.values()), found
