"""How the Hopper tier's kernels are started: which arguments a compiled launcher gets, and when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import eager, flash_attention
from flashattn_triton.hopper import eligibility

ENCODING: dict[str, Any] = {"swizzle": 3, "elem_size": 2, "elem_type": 7, "block_size": [64, 64]}


class Kernel:
    """A kernel with a descriptor, two pointers, a number and a constant; calls are recorded."""

    arg_names = ("x_desc", "y_ptr", "z_ptr", "n", "WIDTH")

    def __init__(self, in_closure: bool) -> None:
        self.started: list[tuple[Any, ...]] = []
        record = self.started.append

        class Launcher:
            def __call__(self, *arguments: Any) -> None:
                record(arguments)

        launcher = Launcher()

        def inner(*arguments: Any) -> None:
            launcher(*arguments)
            raise AssertionError("descriptors are encoded again")

        self.launch = inner if in_closure else launcher
        self.compilations = 0

    def warmup(self, *arguments: Any, **keywords: Any) -> Any:
        self.compilations += 1
        self.compiled_for = (arguments, keywords)
        return SimpleNamespace(
            run=SimpleNamespace(
                launch=self.launch, launch_cooperative_grid=False, launch_pdl=False
            ),
            function="function",
            packed_metadata="packed",
            metadata=SimpleNamespace(tensordesc_meta=[ENCODING]),
            launch_metadata=lambda grid, stream: ("metadata", grid, stream),
        )


class Driver:
    """Encodes descriptors as what they are made of."""

    def __init__(self) -> None:
        self.encoded: list[int] = []
        self.utils = self
        self.stream = 5

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def fill_tma_descriptor(self, address: int, *settings: Any) -> Any:
        self.encoded.append(address)
        return ("descriptor", address, *settings)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    refusal = eligibility.triton_refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from flashattn_triton.hopper import launch

    absent = Driver()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=absent))
    return absent


def prepared(kernel: Kernel) -> Any:
    from flashattn_triton.hopper.launch import DirectLaunch, tile_map

    tiles = tile_map([100, 64], [64, 1], [64, 64], torch.bfloat16)
    return DirectLaunch(kernel, 3, [tiles, torch.float32, None], [7], {"WIDTH": 64})


@pytest.mark.parametrize("in_closure", [False, True])
def test_the_compiled_launcher_gets_everything(driver: Driver, in_closure: bool) -> None:
    kernel = Kernel(in_closure)
    launch = prepared(kernel)
    launch(4096, 8192, None)
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as HOST

    tiles = (HOST[7], [64, 64], [100, 64], [64, 1])
    descriptor = ("descriptor", 4096, 3, 2, *tiles, 0)
    unused = (None, None, None)  # launch metadata and hooks
    base = (3, 1, 1, 5, "function", False, False, None, None, "packed", *unused)
    assert kernel.started == [(*base, descriptor, 100, 64, 64, 1, 8192, None, 7, 64)]
    arguments, keywords = kernel.compiled_for
    assert arguments[0].block_shape == [64, 64]
    assert arguments[1:] == (torch.float32, None, 7)
    assert keywords == {"WIDTH": 64, "grid": (3, 1, 1), "num_warps": 4, "num_stages": 1}


def test_it_compiles_once_and_encodes_an_address_once(driver: Driver) -> None:
    kernel = Kernel(False)
    launch = prepared(kernel)
    for address in (4096, 8192, 4096):
        launch(address, 0, None)
    assert kernel.compilations == 1
    assert driver.encoded == [4096, 8192]
    assert [call[13][1] for call in kernel.started] == [4096, 8192, 4096]


def test_the_stream_is_the_one_of_each_call(driver: Driver) -> None:
    kernel = Kernel(False)
    launch = prepared(kernel)
    for stream in (5, 6):
        driver.stream = stream
        launch(4096, 0, None)
    assert [call[3] for call in kernel.started] == [5, 6]


def test_encoded_descriptors_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashattn_triton.hopper import launch as module

    monkeypatch.setattr(module, "_KEPT", 2)
    launch = prepared(Kernel(False))
    for address in (16, 32, 48, 16):
        launch(address, 0, None)
    assert driver.encoded == [16, 32, 48, 16]


def test_profilers_see_launches(driver: Driver) -> None:
    from triton import knobs

    def hook(metadata: Any) -> None:
        """Called by the compiled launcher, if at all."""

    kernel = Kernel(False)
    launch = prepared(kernel)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(16, 0, None)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    launch(16, 0, None)
    seen, unseen = (call[10:13] for call in kernel.started)
    assert seen[0] == ("metadata", (3, 1, 1), 5)
    assert seen[1] is knobs.runtime.launch_enter_hook
    assert unseen == (None, None, None)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_remembered() -> Iterator[None]:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    eager._calls.clear()
    yield
    eager._calls.clear()


def leaves(*shape: int) -> list[Tensor]:
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("_nothing_remembered")
def test_repeated_backward_passes_of_any_gradient() -> None:
    """Whatever strides and addresses the gradient has, found again or not."""
    inputs = leaves(2, 3, 200, 72)
    wide = torch.randn(2, 3, 200, 80, device="cuda", dtype=torch.bfloat16)
    rows_first = torch.randn(2, 200, 3, 72, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    gradients = [
        wide[..., :72].contiguous(),
        wide[..., 8:],
        wide[..., 1:73],
        rows_first,
        rows_first.mT.contiguous().mT,
        torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 3, 200, 72),
    ]
    for grad_out in gradients * 2:
        out = flash_attention(*inputs, causal=True, implementation="hopper")
        expected = flash_attention(*inputs, causal=True, implementation="reference")
        actual = torch.autograd.grad(out, inputs, grad_out)
        close(actual, torch.autograd.grad(expected, inputs, grad_out))
    assert len(eager._calls) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("_nothing_remembered")
def test_repeated_backward_passes_with_a_gradient_of_the_logsumexp() -> None:
    inputs = leaves(1, 2, 130, 128)
    spare = torch.randn(1, 2, 131, device="cuda")
    for grad_lse in (
        spare[..., 1:],
        spare[..., :130].contiguous(),
        spare[..., :1].expand(1, 2, 130),
    ):
        results = []
        for implementation in ("hopper", "reference"):
            out, lse = flash_attention(*inputs, return_lse=True, implementation=implementation)
            grads = (torch.ones_like(out), grad_lse)
            results.append(torch.autograd.grad((out, lse), inputs, grads))
        close(*results)


@pytest.mark.gpu
@pytest.mark.usefixtures("_nothing_remembered")
def test_saved_tensors_may_come_back_elsewhere() -> None:
    inputs = leaves(1, 2, 200, 64)
    grad_out = torch.randn_like(inputs[0])

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.flatten(), x.new_zeros(1)])[:-1].view(x.shape).clone()

    for returned in (lambda x: x.mT.contiguous().mT, lambda x: x.clone()):
        with torch.autograd.graph.saved_tensors_hooks(moved, returned):
            out = flash_attention(*inputs, causal=True, implementation="hopper")
        expected = flash_attention(*inputs, causal=True, implementation="reference")
        actual = torch.autograd.grad(out, inputs, grad_out)
        close(actual, torch.autograd.grad(expected, inputs, grad_out))


@pytest.mark.gpu
@pytest.mark.usefixtures("_nothing_remembered")
def test_many_addresses_and_streams() -> None:
    """Launches of several streams, in flight together, each with its own tensors."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    given = [leaves(2, 4, 500, 64) for _ in range(24)]
    grad_out = torch.randn_like(given[0][0])
    keywords: dict[str, Any] = {"causal": True, "implementation": "hopper"}

    def results(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = flash_attention(*inputs, **keywords)
        return out.detach(), *torch.autograd.grad(out, inputs, grad_out)

    expected = [results(inputs) for inputs in given]
    torch.cuda.synchronize()
    fresh = [[x.detach().requires_grad_() for x in inputs] for inputs in given]
    actual = []
    for i, inputs in enumerate(fresh):
        with torch.cuda.stream(streams[i % 4]):
            actual.append(results(inputs))
    torch.cuda.synchronize()
    for (out, dq, dk, dv), (e_out, e_dq, e_dk, e_dv) in zip(actual, expected, strict=True):
        assert torch.equal(out, e_out)
        assert torch.equal(dk, e_dk)
        assert torch.equal(dv, e_dv)
        torch.testing.assert_close(dq, e_dq, rtol=2**-7, atol=1e-4)
