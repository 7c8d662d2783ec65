"""The Triton kernels against the definition; under the interpreter where there is no GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flashattn_triton import (
    Tiles,
    Tiling,
    flash_attention,
    flash_attention_varlen,
    primitives,
    triton_versions,
)
from flashattn_triton.launch import Launch, can_use_tma, tma_refusal
from flashattn_triton.portable import forward, key_pass, query_pass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 32, 4, 1)
FUSED = Tiling(forward=SMALL, key_pass=SMALL, query_pass=SMALL, fused=SMALL)
TWO_PASS = Tiling(forward=SMALL, key_pass=SMALL, query_pass=SMALL)
USING_TMA = Tiles(16, 32, 4, 2, use_tma=True)  # the statistics too, in a pipelined loop
BY_TMA = Tiling(forward=USING_TMA, key_pass=USING_TMA, query_pass=USING_TMA)
USING_TMA_ONE = replace(USING_TMA, stages=1)
BY_TMA_ONE = Tiling(forward=USING_TMA_ONE, key_pass=USING_TMA_ONE, query_pass=USING_TMA_ONE)


def attend(case: Any, **keywords: Any) -> Callable[..., Any]:
    """``flash_attention`` of a case's options, or its packed form, by the Triton kernels."""
    keywords = {**case.keywords, "implementation": "triton", "return_lse": True, **keywords}
    if not case.packed:
        return lambda q, k, v: flash_attention(q, k, v, **keywords)
    longest = [max(column) for column in zip(*case.seqlens, strict=True)]
    starts = case.cu_seqlens(DEVICE)
    return lambda q, k, v: flash_attention_varlen(q, k, v, *starts, *longest, **keywords)


def test_dense_cases(case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    assert_close_to_oracle(attend(case), make_inputs(case, DEVICE))


def test_packed_cases(varlen_case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    assert_close_to_oracle(attend(varlen_case), make_inputs(varlen_case, DEVICE))


@pytest.mark.parametrize("layout", ["bshd", "padded", "strided", "expanded"])
def test_strides(
    strided_case: Any, layout: str, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    assert_close_to_oracle(attend(strided_case), make_inputs(strided_case, DEVICE, layout))


@pytest.mark.parametrize("tiling", [FUSED, TWO_PASS], ids=["fused", "two-pass"])
def test_both_backward_forms(
    strided_case: Any, tiling: Tiling, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    assert_close_to_oracle(attend(strided_case, tiling=tiling), make_inputs(strided_case, DEVICE))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "padded", "expanded"])
def test_reading_by_tma(
    strided_case: Any, layout: str, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    """Where strides don't allow it, the same tiling reads through pointers."""
    inputs = make_inputs(strided_case, DEVICE, layout)
    assert_close_to_oracle(attend(strided_case, tiling=BY_TMA), inputs)


def test_reading_by_tma_one_tile_at_a_time(
    dense_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    case = dense_case(2, (4, 2), 35, 70, 64, "bf16", causal="bottom-right", window=(40, None))
    assert_close_to_oracle(attend(case, tiling=BY_TMA_ONE), make_inputs(case, DEVICE))


@pytest.mark.parametrize("fused", [USING_TMA_ONE, None], ids=["fused", "two-pass"])
def test_wide_fp32_tiles_are_reloaded(
    fused: Tiles | None, dense_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    case = dense_case(1, (2, 1), 35, 70, 136, "fp32", causal="bottom-right")
    tiling = replace(BY_TMA_ONE, fused=fused)
    assert_close_to_oracle(attend(case, tiling=tiling), make_inputs(case, DEVICE))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("widths", [(300, 40), (512, 512), (576, 512)], ids=str)
def test_heads_wider_than_256(widths: tuple[int, int], packed: bool) -> None:
    """Gemma 4 has 512; MLA in its absorbed form 576 and 512 for values, here without a backward."""
    head_dim, value_dim = widths
    shapes = ((1, 4, 70, head_dim), (1, 2, 90, head_dim), (1, 2, 90, value_dim))
    leaves = [torch.randn(s, device=DEVICE).bfloat16().requires_grad_() for s in shapes]
    bias = torch.randn(1, 4, 70, 90, device=DEVICE, requires_grad=not packed)
    results = []
    for implementation in ("triton", "reference"):
        inputs = [x.detach().float() if implementation == "reference" else x for x in leaves]
        inputs = [x.requires_grad_() for x in inputs]
        keywords: dict[str, Any] = {"causal": "bottom-right", "implementation": implementation}
        if packed:
            rows = [x[0].transpose(0, 1) for x in inputs]
            starts = [torch.tensor(x, device=DEVICE) for x in ([0, 30, 70], [0, 50, 90])]
            out = flash_attention_varlen(*rows, *starts, **keywords)
            wanted: list[torch.Tensor] = inputs
        else:
            out, wanted = flash_attention(*inputs, bias=bias, **keywords), [*inputs, bias]
        gradients = torch.autograd.grad(out.float().square().sum(), wanted)
        results.append([out, *gradients])
    for x, exact in zip(*results, strict=True):
        assert (x.float() - exact).norm() <= 2e-2 * exact.norm()


def test_the_tma_does_not_read_packed_sequences(
    varlen_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    inputs = make_inputs(varlen_case, DEVICE)
    assert_close_to_oracle(attend(varlen_case, tiling=BY_TMA), inputs)


DECLARED = (
    *("Q_ptr", "K_ptr", "V_ptr", "O_ptr", "L_ptr"),
    *("stride_qb", "stride_qq", "stride_kb", "stride_kk", "stride_vb", "stride_vk"),
    *("stride_ob", "stride_oq", "stride_lb"),
    *("N_QUERIES", "N_KEYS", "scale", "D", "Q_TILE_SIZE", "K_TILE_SIZE", "is_causal"),
)


def test_the_kernel_has_the_declared_arguments_in_order() -> None:
    """The assignment's, but for strides of 1; others stand between them. No block pointers."""
    names = inspect.signature(forward.flash_forward_kernel.fn).parameters
    assert tuple(name for name in names if name in DECLARED) == DECLARED
    for module in (forward, key_pass, primitives, query_pass):
        assert "block_ptr" not in inspect.getsource(module)


def test_what_the_tma_can_read() -> None:
    x = torch.empty(2, 3, 8, 16, device=DEVICE, dtype=torch.bfloat16)
    assert can_use_tma(x)
    assert can_use_tma(x.transpose(1, 2))
    assert can_use_tma(x[:1])
    assert can_use_tma(x[..., :12])
    assert not can_use_tma(x[..., 1:])  # starts 2 bytes after a multiple of 16
    assert not can_use_tma(x[..., ::2])  # elements of a row are no neighbours
    assert not can_use_tma(x[:, :1].expand(2, 3, 8, 16))
    assert not can_use_tma(torch.empty(2, 3, 8, 12, device=DEVICE, dtype=torch.bfloat16))
    assert can_use_tma(torch.empty(2, 3, 8, 12, device=DEVICE))


def test_deterministic_takes_two_passes_and_agrees(
    strided_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    attention = attend(strided_case, tiling=FUSED, deterministic=True)
    assert_close_to_oracle(attention, make_inputs(strided_case, DEVICE))


def test_gradient_of_the_output_alone(
    strided_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    attention = attend(strided_case, return_lse=False)
    assert_close_to_oracle(attention, make_inputs(strided_case, DEVICE), lse_gradient=False)


@pytest.mark.parametrize(
    ("shape", "strides", "address", "reason"),
    [
        ((2, 3, 5, 64), (960, 320, 64, 1), 512, None),
        ((2, 3, 5, 64), (960, 64, 192, 1), 512, None),  # (batch, sequence, heads, head_dim)
        ((1, 1, 5, 64), (0, 3, 64, 1), 512, None),  # never used
        ((2, 3, 5, 64), (960, 320, 64, 1), 520, "aligned to 16 bytes"),
        ((2, 3, 5, 64), (960, 320, 64, 2), 512, "must be contiguous"),
        ((2, 3, 5, 64), (960, 320, 68, 1), 512, "multiples of 8 elements"),
        ((2, 3, 5, 64), (960, 0, 64, 1), 512, "strides must be positive"),
        ((2, 3, 5, 64), (2**39, 320, 64, 1), 512, "strides must be positive"),
    ],
)
def test_why_the_tma_cannot_read(
    shape: tuple[int, ...], strides: tuple[int, ...], address: int, reason: str | None
) -> None:
    actual = tma_refusal("key", torch.Size(shape), strides, address, 2)
    if reason is None:
        assert actual is None
    else:
        assert actual is not None
        assert "key's" in actual
        assert reason in actual


@triton.jit
def split_kernel(x_ptr, parts_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    first, second, third = primitives.split(tl.load(x_ptr + places))
    tl.store(parts_ptr + places, first.to(tl.float32))
    tl.store(parts_ptr + N + places, second.to(tl.float32))
    tl.store(parts_ptr + 2 * N + places, third.to(tl.float32))


def parts_of(x: torch.Tensor) -> torch.Tensor:
    parts = torch.empty(3, len(x), device=DEVICE)
    split_kernel[(1,)](x.to(DEVICE), parts, len(x))
    return parts.cpu().double()


def test_an_fp32_number_is_the_sum_of_its_three_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator)
    x *= 2.0 ** torch.randint(-60, 60, (4096,), generator=generator)
    x[:4] = torch.tensor([0.0, 1.0, -(2.0 - 2.0**-23), 3e38])
    parts = parts_of(x)
    assert torch.equal(parts.sum(0), x.double())
    assert torch.equal(parts, parts.bfloat16().double())
    # Products of rests are left out: they must be small, and of no fixed sign.
    rests = parts[1:, 1:] / x[1:].double()
    assert (rests.abs().amax(1) <= torch.tensor([2.0**-7, 2.0**-15])).all()
    assert (rests[0].sign().mean().abs() < 0.1).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_first_part_of_what_is_not_finite() -> None:
    first = parts_of(torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0]))[0]
    assert first[:2].tolist() == [float("inf"), -float("inf")]
    assert first[2].isnan()


class Kernel:
    """A kernel that is compiled to one that Triton must launch itself."""

    arg_names = ("x_ptr", "y_ptr", "z_ptr", "n", "WIDTH")
    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled_for: list[Any] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, **named: Any) -> Any:
        self.compiled_for.append((arguments, named))
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> None:
            self.launched.append((grid, arguments, named))

        return run


OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 99, **triton_versions.COMPILE_OPTIONS}


def test_launches_take_addresses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the remainders of the first ones; by Triton's launcher if there is no faster."""
    monkeypatch.setattr(triton_versions, "fast_launcher", lambda *given: None)
    kernel, cpu = Kernel(), torch.device("cpu")
    parameters = {"z_ptr": torch.float32, "x_ptr": torch.int32, "y_ptr": None}
    launch = Launch(kernel, cpu, 3, parameters, {"n": 7}, {"WIDTH": 64}, registers=99)
    x, z = torch.tensor([5], dtype=torch.int32), torch.ones(9)[1:]
    for _ in range(2):
        launch({"z_ptr": z.data_ptr(), "x_ptr": x.data_ptr()})
    ((arguments, named),) = kernel.compiled_for
    pointers = (x.data_ptr() % 16, z.data_ptr() % 16)
    assert (arguments[0].data_ptr(), arguments[2].data_ptr()) == pointers
    assert (arguments[0].dtype, arguments[1], arguments[3]) == (torch.int32, None, 7)
    assert named == {"WIDTH": 64, "grid": (3, 1, 1), **OPTIONS}
    for grid, (first, absent, third, *rest), options in kernel.launched:
        assert (grid, absent, rest, options) == ((3, 1, 1), None, [7, 64], OPTIONS)
        assert (first.data_ptr(), third.data_ptr()) == (x.data_ptr(), z.data_ptr())
        assert torch.equal(first, x)
        assert torch.equal(third, z[:1])
    assert len(kernel.launched) == 2
    with pytest.raises(TypeError, match=r"arguments of kernel must be .* but got .*w_ptr"):
        Launch(kernel, cpu, 3, {"w_ptr": None}, {"n": 7}, {"WIDTH": 64})


def test_memory_is_found_again_by_its_address() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        x = torch.arange(6).to(dtype)
        found = triton_versions.tensor_at(Kernel(), x[2:].data_ptr(), dtype)
        assert (found.data_ptr(), found.dtype, found.item()) == (x[2:].data_ptr(), dtype, 2)
    assert triton_versions.tensor_at(Kernel(), 0, torch.float32).numel() == 0
