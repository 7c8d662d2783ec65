"""How the Hopper tier's kernels are started: which arguments a compiled launcher gets, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import flash_attention, op, triton_versions


class Kernel:
    """A kernel with a descriptor, two pointers, a number and a constant."""

    arg_names = ("x_desc", "y_ptr", "z_ptr", "n", "WIDTH")

    def __init__(self, scratch: int = 0) -> None:
        self.scratch = scratch
        self.compilations = 0

    def warmup(self, *arguments: Any, **keywords: Any) -> Any:
        self.compilations += 1
        self.compiled_for = (arguments, keywords)
        return SimpleNamespace(scratch=self.scratch)

    __name__ = "kernel"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched: (compiled kernel, grid, parameters, rest, addresses)."""
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    record: list[Any] = []

    def fast_launcher(compiled: Any, *fixed: Any) -> Any:
        if compiled.scratch:
            return None
        return lambda addresses: record.append((compiled, *fixed, addresses))

    monkeypatch.setattr(triton_versions, "fast_launcher", fast_launcher)
    return record


def test_it_compiles_once_and_passes_addresses_on(launched: list[Any]) -> None:
    from flashattn_triton.hopper.launch import hopper_launch, tile_map

    kernel = Kernel()
    tiles = tile_map([100, 64], [64, 1], [64, 64], torch.bfloat16)
    given = {"z_ptr": None, "y_ptr": torch.float32, "x_desc": tiles}
    launch = hopper_launch(kernel, 3, given, {"n": 7}, {"WIDTH": 64})
    for address in (4096, 8192):
        launch({"y_ptr": 16, "x_desc": address})
    assert kernel.compilations == 1
    arguments, keywords = kernel.compiled_for
    assert arguments[0].block_shape == [64, 64]
    assert arguments[1:] == (triton_versions.Pointer(torch.float32, 0), None, 7)
    options = {"grid": (3, 1, 1), "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    assert keywords == {"WIDTH": 64} | options | triton_versions.hopper_options()
    compiled = launched[0][0]
    parameters = {"x_desc": tiles, "y_ptr": torch.float32, "z_ptr": None}
    assert launched == [
        (compiled, (3, 1, 1), parameters, (7, 64), {"y_ptr": 16, "x_desc": address})
        for address in (4096, 8192)
    ]
    assert list(launched[0][2]) == ["x_desc", "y_ptr", "z_ptr"]


def test_scratch_memory_is_refused_with_a_remedy(launched: list[Any]) -> None:
    from flashattn_triton.hopper.launch import hopper_launch

    parameters = {"x_desc": torch.float32, "y_ptr": None, "z_ptr": None}
    launch = hopper_launch(Kernel(scratch=128), 3, parameters, {"n": 7}, {"WIDTH": 64})
    with pytest.raises(RuntimeError, match="kernel must be compiled without scratch memory, but "):
        launch({"x_desc": 16})
    assert launched == []


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("leading", "numbers"),
    [
        (["x_desc", "y_ptr"], ["n"]),  # one is missing, in the middle or at the beginning
        (["y_ptr", "z_ptr"], ["n"]),
        (["x_desc", "y_ptr", "w_ptr"], ["n"]),
        (["x_desc", "y_ptr", "n"], ["z_ptr"]),
        (["w_ptr", "x_desc", "y_ptr", "z_ptr"], ["n"]),
    ],
)
def test_every_parameter_must_be_named_in_its_group(leading: list[str], numbers: list[str]) -> None:
    from flashattn_triton.hopper.launch import hopper_launch

    parameters = dict.fromkeys(leading)
    with pytest.raises(TypeError, match="Name each parameter of"):
        hopper_launch(Kernel(), 3, parameters, dict.fromkeys(numbers, 1), {"WIDTH": 64})


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_what_heads_share_of_a_gradient_is_copied_once(
    viewed: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashattn_triton.hopper import backward

    monkeypatch.setattr(backward, "_SMALL_COPY", 2**20 if small else 0)
    row, flat = torch.randn(5, 1, 7, 8), torch.randn(5 * 3 * 7 * 8 + 1)
    whole, one_head = (5, 3, 7, 8), (1, 1, 7, 8)
    for gradient, shape in (
        (torch.ones(()).expand(whole), one_head),
        (row[..., :1].expand(whole), (5, 1, 7, 8)),
        (row[:1].mT.contiguous().mT.expand(5, 1, 7, 8), one_head),
        (flat[1:].view(whole), whole),
        (torch.randn(5, 3, 8, 7).mT, whole),
    ):
        part, strides = backward.copied_part(gradient, may_repeat=True, viewed=viewed)
        assert part is not None
        copy = backward.copy_of(gradient, part)
        assert copy.is_contiguous()
        assert copy.shape == (gradient.shape if small and not viewed else shape)
        assert torch.equal(copy.as_strided(gradient.shape, strides), gradient)
    for gradient in (torch.randn(whole), row.expand(whole), torch.randn(5, 7, 3, 8).mT.mT):
        assert backward.copied_part(gradient, may_repeat=True, viewed=viewed) == (
            None,
            gradient.stride(),
        )
    part, _ = backward.copied_part(row.expand(whole), may_repeat=False, viewed=viewed)
    assert part is not None


@pytest.mark.parametrize(
    ("heads", "head_dim", "lengths", "options", "group"),
    [
        (16, 64, (16384, 16384), {"causal": True}, 6),
        (64, 128, (8192, 8192), {"causal": True}, 4),
        (64, 128, (512, 8192), {"causal": "bottom-right"}, 2),
        (1, 128, (2048, 2048), {"causal": True}, 1),
        (64, 128, (8192, 8192), {}, 1),
        (64, 128, (8192, 8192), {"causal": True, "window": (1023, 0)}, 5),
    ],
)
def test_heads_are_worked_on_in_groups(
    heads: int,
    head_dim: int,
    lengths: tuple[int, int],
    options: dict[str, Any],
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from flashattn_triton.hopper import forward
    from flashattn_triton.problem import new_problem

    monkeypatch.setattr(forward, "multiprocessors", lambda device: 132)
    q, k = (
        torch.empty(1, heads, length, head_dim, dtype=torch.bfloat16, device="meta")
        for length in lengths
    )
    launch = forward.HopperForwardCall(q, k, k, new_problem(head_dim=head_dim, **options)).launch
    assert launch.numbers["GROUP"] == group
    tiles = heads * -(-lengths[0] // (192 if head_dim == 64 else 128))
    assert launch.grid == (min(tiles, 132), 1, 1)


@pytest.mark.parametrize(
    ("starts", "group"),
    [
        (range(0, 32 * 1024 + 1, 1024), 8),  # one head at a time, of eight tiles
        (range(0, 8 * 4096 + 1, 4096), 8 * 32),
        ([0, 16384, 24576, 28672, 32768], 4 * 132),  # of different lengths: so many tiles
    ],
)
def test_heads_of_packed_sequences_are_worked_on_in_groups(
    starts: Sequence[int], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from flashattn_triton.hopper import forward
    from flashattn_triton.mask_and_bias import Given
    from flashattn_triton.problem import new_problem

    monkeypatch.setattr(forward, "multiprocessors", lambda device: 132)
    q = torch.empty(1, 16, starts[-1], 128, dtype=torch.bfloat16, device="meta")
    at = torch.tensor(list(starts), dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(starts))
    problem = new_problem(head_dim=128, longest=(longest, longest), causal=True)
    call = forward.HopperForwardCall(q, q, q, problem, Given(cu_seqlens_q=at, cu_seqlens_k=at))
    assert call.tiles is not None
    assert call.tiles.launch.numbers["GROUP"] == group


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_remembered() -> Iterator[None]:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    op._cache.clear()
    yield
    op._cache.clear()


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
    assert sum(isinstance(x, op.CachedCall) for x in op._cache.values()) == 1


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
