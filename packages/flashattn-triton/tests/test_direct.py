"""Kernels started directly: the compiled launcher gets what Triton's own launch would give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.driver import driver as active_driver

from flashattn_triton import direct
from flashattn_triton.launch import TileView

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(direct.VERSION), reason="written for Triton 3.6"
)

GRID = (5, 1, 1)
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
    """Encodes descriptors as what they are made of, and counts."""

    def __init__(self) -> None:
        self.utils = self
        self.encoded = 0
        self.stream = 7

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def fill_tma_descriptor(self, *what: Any) -> tuple[Any, ...]:
        self.encoded += 1
        return tuple(tuple(x) if isinstance(x, list) else x for x in what)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(active_driver, "_active", fake)
    return fake


class Launcher:
    """Triton's launcher of a compiled kernel, with a record in place of the driver."""

    def __init__(self, with_descriptor: bool, **attributes: Any) -> None:
        self.launched: list[tuple[Any, ...]] = []

        def launch(*arguments: Any) -> None:
            self.launched.append(arguments)

        signature = SIGNATURES[with_descriptor]
        self.launch = wrap_handle_tensordesc(launch, signature, [ENCODING] * with_descriptor)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False
        vars(self).update(attributes)


def compiled_with(launcher: Any) -> Any:
    return SimpleNamespace(
        run=launcher,
        function=4711,
        packed_metadata=(4, 1, 99),
        launch_metadata=lambda grid, stream: ("metadata", grid, stream),
    )


def by_triton(launcher: Launcher, *arguments: Any) -> tuple[Any, ...]:
    """What the compiled launcher gets from Triton 3.6 itself, without hooks."""
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    launcher.launch(*GRID, 7, 4711, *flags, None, None, (4, 1, 99), None, None, None, *arguments)
    return launcher.launched.pop()


REST = (300, 64)


@pytest.mark.parametrize("with_descriptor", [False, True])
def test_arguments_are_tritons(driver: Driver, with_descriptor: bool) -> None:
    q, k = torch.empty(2, 3, 100, 64), torch.empty(2, 3, 100, 64)
    view = TileView(k.shape, k.stride(), [1, 1, 64, 64]) if with_descriptor else None
    launcher = Launcher(with_descriptor)
    start = direct.starter(compiled_with(launcher), GRID, ["pointer", view or "pointer"], REST)
    assert start is not None
    start([q.data_ptr(), k.data_ptr()])
    expected = by_triton(launcher, q.data_ptr(), view.of(k) if view else k.data_ptr(), *REST)
    assert launcher.launched == [expected]


def test_absent_tensors_are_passed_on(driver: Driver) -> None:
    launcher = Launcher(False)
    start = direct.starter(compiled_with(launcher), GRID, ["pointer", None], REST)
    assert start is not None
    start([16])
    assert launcher.launched == [by_triton(launcher, 16, None, *REST)]


def test_an_address_is_encoded_once_and_few_are_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_KEPT", 2)
    view = TileView([2, 3, 100, 64], [19200, 6400, 64, 1], [1, 1, 64, 64])
    launcher = Launcher(True)
    start = direct.starter(compiled_with(launcher), GRID, ["pointer", view or "pointer"], REST)
    assert start is not None
    for address, encodings in ((16, 1), (32, 2), (16, 2), (32, 2), (48, 3), (16, 4)):
        start([0, address])
        assert driver.encoded == encodings
        assert launcher.launched[-1][14][0] == address


def test_streams_are_those_of_each_call(driver: Driver) -> None:
    launcher = Launcher(False)
    start = direct.starter(compiled_with(launcher), GRID, ["pointer", "pointer"], REST)
    assert start is not None
    for stream in (7, 8):
        driver.stream = stream
        start([16, 32])
    assert [arguments[3] for arguments in launcher.launched] == [7, 8]


def test_profilers_hooks_are_told(driver: Driver) -> None:
    def hook(metadata: Any) -> None:
        """The compiled launcher would call it."""

    launcher = Launcher(False)
    start = direct.starter(compiled_with(launcher), GRID, ["pointer", "pointer"], REST)
    assert start is not None
    knobs.runtime.launch_exit_hook.add(hook)
    try:
        start([16, 32])
    finally:
        knobs.runtime.launch_exit_hook.remove(hook)
    start([16, 32])
    seen, unseen = (arguments[10:13] for arguments in launcher.launched)
    assert seen == (
        ("metadata", GRID, 7),
        knobs.runtime.launch_enter_hook,
        knobs.runtime.launch_exit_hook,
    )
    assert unseen == (None, None, None)


@pytest.mark.parametrize(
    "launcher",
    [
        Launcher(False, global_scratch_size=128),
        Launcher(False, profile_scratch_size=128),
        SimpleNamespace(launch=print),  # another vendor's
    ],
)
def test_what_needs_more_is_left_to_triton(driver: Driver, launcher: Any) -> None:
    assert direct.starter(compiled_with(launcher), GRID, ["pointer", "pointer"], REST) is None


def test_descriptors_without_a_copy_engine_are_left_to_triton(driver: Driver) -> None:
    launcher = Launcher(True)
    launcher.launch = wrap_handle_tensordesc(print, SIGNATURES[True], [])
    view = TileView([2, 3, 100, 64], [19200, 6400, 64, 1], [1, 1, 64, 64])
    assert (
        direct.starter(compiled_with(launcher), GRID, ["pointer", view or "pointer"], REST) is None
    )


def test_other_versions_are_left_to_triton(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    compiled = compiled_with(Launcher(False))
    assert direct.starter(compiled, GRID, ["pointer", "pointer"], REST) is None
