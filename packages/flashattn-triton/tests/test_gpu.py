"""What only a GPU can show: the full matrix with the shipped tiles, addresses, graphs, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashattn_triton import (
    FlashAttention2Triton,
    explain,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    largest_scores,
    merge,
)
from flashattn_triton.configs import TABLE, Tiling, tiling_for
from flashattn_triton.dispatch import describe_gpu
from flashattn_triton.problem import MAX_HEAD_DIMS

pytestmark = pytest.mark.gpu


def attend(case: Any, **keywords: Any) -> Callable[..., Any]:
    keywords = {**case.keywords, "implementation": "triton", "return_lse": True, **keywords}
    if not case.packed:
        return lambda q, k, v: flash_attention(q, k, v, layout="bhsd", **keywords)
    longest = [max(column) for column in zip(*case.seqlens, strict=True)]
    starts = case.cu_seqlens("cuda")
    return lambda q, k, v: flash_attention_varlen(q, k, v, *starts, *longest, **keywords)


@pytest.fixture(params=["triton", "hopper"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each tier for CUDA tensors that this GPU has."""
    if request.param == "hopper" and describe_gpu(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return request.param


def test_full_matrix(gpu_case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    assert_close_to_oracle(attend(gpu_case), make_inputs(gpu_case, "cuda"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_full_hopper_matrix(
    hopper_case: Any, deterministic: bool, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    if describe_gpu(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    attention = attend(hopper_case, implementation="hopper", deterministic=deterministic)
    assert_close_to_oracle(attention, make_inputs(hopper_case, "cuda"))


def test_full_packed_matrix(
    gpu_varlen_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    assert_close_to_oracle(attend(gpu_varlen_case), make_inputs(gpu_varlen_case, "cuda"))


@pytest.mark.timeout(120, method="thread")  # ends the process even if a kernel never does
@pytest.mark.parametrize("seed", range(20))
def test_random_hopper_problems(
    seed: int, dense_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    """Ten problems each, both directions: none may be wrong, and none may hang."""
    if describe_gpu(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    pick = Random(seed)
    for _ in range(10):
        kv_heads = pick.choice([1, 1, 2, 3])
        case = dense_case(
            pick.choice([1, 2, 3]),
            (kv_heads * pick.choice([1, 1, 2, 4]), kv_heads),
            pick.randint(1, 700),
            pick.randint(1, 700),
            pick.choice([64, 128, 8 * pick.randint(5, 16)]),
            pick.choice(["bf16", "fp16"]),
            causal=pick.choice(["none", "top-left", "bottom-right"]),
            scale=pick.choice([None, None, 0.3, -0.1]),
        )
        if pick.random() < 0.3:  # one kind of number and scale: each would be compiled again
            least = 0 if case.head_dims[0] > 64 else 1023
            window = (least + pick.randint(0, 300), pick.choice([None, pick.randint(0, 300)]))
            case = replace(case, dtype_name="bf16", scale=None, window=window)
        inputs = make_inputs(case, "cuda", pick.choice(["bhsd", "bshd", "padded"]))
        assert_close_to_oracle(attend(case, implementation="hopper"), inputs)


@pytest.mark.timeout(240, method="thread")  # ends the process even if a kernel never does
@pytest.mark.parametrize("seed", range(20))
def test_random_hopper_problems_of_wide_heads(
    seed: int, dense_case: Any, packed_case: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    """Three problems each, both directions: windows, soft-caps, packed, in order of additions."""
    if describe_gpu(0).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    pick = Random(seed)
    for _ in range(3):
        wide = 8 * pick.randint(17, 32)
        head_dims = pick.choice(
            [(192, 128), (256, 256), (wide, wide), (wide, 8 * pick.randint(5, 32))]
        )
        kv_heads = pick.choice([1, 1, 2, 3])
        heads = (kv_heads * pick.choice([1, 1, 2, 4]), kv_heads)
        chosen: dict[str, Any] = {
            "causal": pick.choice(["none", "top-left", "bottom-right"]),
            "softcap": pick.choice([None, None, 5.0]),
        }
        if pick.random() < 0.3:
            chosen["window"] = (pick.randint(0, 300), pick.choice([None, pick.randint(0, 300)]))
        if pick.random() < 0.4:
            sequences = tuple(
                (pick.choice([0, pick.randint(1, 500)]), pick.choice([0, pick.randint(1, 500)]))
                for _ in range(pick.randint(1, 6))
            )
            sequences = (*sequences, (pick.randint(1, 500), pick.randint(1, 500)))
            case = packed_case(heads, sequences, head_dims, "bf16", **chosen)
            inputs = make_inputs(case, "cuda")
        else:
            lengths = pick.randint(1, 700), pick.randint(1, 700)
            case = dense_case(pick.choice([1, 2, 3]), heads, *lengths, head_dims, "bf16", **chosen)
            inputs = make_inputs(case, "cuda", pick.choice(["bhsd", "bshd", "padded"]))
        deterministic = pick.random() < 0.5
        attention = attend(case, implementation="hopper", deterministic=deterministic)
        assert_close_to_oracle(attention, inputs)


@pytest.mark.parametrize("layout", ["bshd", "padded", "strided", "expanded"])
def test_strides(
    strided_case: Any, layout: str, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    assert_close_to_oracle(attend(strided_case), make_inputs(strided_case, "cuda", layout))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def gradients(
    leaves: list[torch.Tensor], grad_out: torch.Tensor, **keywords: Any
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(flash_attention(*leaves, **keywords), leaves, grad_out)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_gradients_are_bit_identical(head_dim: int, implementation: str) -> None:
    leaves = random(2, 8, 2048, head_dim)
    grad_out = torch.randn_like(leaves[0])
    keywords = {"causal": True, "deterministic": True, "implementation": implementation}
    first = gradients(leaves, grad_out, **keywords)
    for _ in range(3):
        again = gradients(leaves, grad_out, **keywords)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_addresses_past_two_billion_elements(implementation: str) -> None:
    rows, gap = 4096, 2**31 // 4096 + 64  # the last row starts past 2^31 elements
    storage = torch.empty(rows * gap, device="cuda", dtype=torch.bfloat16)
    view = storage.as_strided((1, 1, rows, 64), (0, 0, gap, 1))
    near = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.bfloat16)
    view.copy_(near)
    far = [view.detach().requires_grad_() for _ in range(3)]
    close = [near.detach().clone().requires_grad_() for _ in range(3)]
    keywords: dict[str, Any] = {"causal": True, "implementation": implementation}
    out, expected = flash_attention(*far, **keywords), flash_attention(*close, **keywords)
    assert torch.equal(out, expected)
    grad_out = torch.randn_like(expected)
    a = gradients(far, grad_out, **keywords, deterministic=True)
    b = gradients(close, grad_out, **keywords, deterministic=True)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_many_heads_past_two_billion_elements(implementation: str) -> None:
    heads = 2**31 // (512 * 64) + 2
    q = torch.randn(1, heads, 512, 64, device="cuda", dtype=torch.bfloat16)
    last = q[:, -2:]
    keywords: dict[str, Any] = {"causal": True, "implementation": implementation, "layout": "bhsd"}
    out = flash_attention(q, q, q, **keywords)
    expected = flash_attention(last, last, last, **keywords)
    assert torch.equal(out[:, -2:], expected)


def test_cuda_graph(implementation: str) -> None:
    leaves = random(1, 4, 777, 64)
    static_grad = torch.randn_like(leaves[0])

    def step(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = flash_attention(
            *leaves, causal=True, deterministic=True, implementation=implementation
        )
        return (out, *torch.autograd.grad(out, leaves, static_grad))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step(leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    # Leaves of their own: autograd ties a leaf to the stream that first used it.
    fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for replayed, eager in zip(results, step(fresh), strict=True):
        assert torch.equal(replayed, eager)


def test_another_stream(implementation: str) -> None:
    leaves = random(2, 4, 1024, 64)
    grad_out = torch.randn_like(leaves[0])
    keywords = {"deterministic": True, "implementation": implementation}
    expected = gradients(leaves, grad_out, **keywords)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        actual = gradients(leaves, grad_out, **keywords)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_the_host_never_waits_for_the_device(packed: bool, implementation: str) -> None:
    keywords: dict[str, Any] = {"causal": True, "implementation": implementation}
    if packed:
        leaves = [
            torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        starts = torch.arange(4, device="cuda", dtype=torch.int32) * 100
        out = flash_attention_varlen(*leaves, starts, starts, 100, 100, **keywords)
    else:
        leaves = random(1, 4, 300, 64)
        out = flash_attention(*leaves, **keywords)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("spare", [(0, 0), (300, 500), (0, 7), (129, 0)], ids=str)
def test_tokens_that_no_sequence_owns_and_a_limit_that_is_too_small(
    spare: tuple[int, int], head_dim: int, implementation: str
) -> None:
    """They may hold NaN, and so may new memory: their results are 0, also with sinks."""
    ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 200, 200, 333), (0, 100, 240, 300))]
    lengths = [int(x[-1]) for x in ends]
    starts = [x.cuda() for x in ends]
    shapes = zip((4, 2, 2), (0, 1, 1), strict=True)
    inputs = [torch.randn(lengths[i], heads, head_dim).bfloat16() for heads, i in shapes]
    sinks = torch.randn(4, device="cuda")
    results = []
    for behind in ((0, 0), spare):
        rows = [behind[i] for i in (0, 1, 1)]
        leaves = [
            F.pad(x, (0, 0, 0, 0, 0, n), value=float("nan")).cuda().requires_grad_()
            for x, n in zip(inputs, rows, strict=True)
        ]
        torch.use_deterministic_algorithms(True)  # new memory is NaN
        try:
            out, lse = flash_attention_varlen(
                *leaves, *starts, *((100, 100) if any(behind) else (200, 140)), sinks=sinks,
                causal="bottom-right", return_lse=True, implementation=implementation,
            )  # fmt: skip
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        finally:
            torch.use_deterministic_algorithms(False)
        results.append((out, lse.T, *gradients))
    for i, (owned, whole) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(whole[: len(owned)], owned, rtol=2**-6, atol=2**-9)
        rest = whole[len(owned) :]
        assert torch.isneginf(rest).all() if i == 1 else not rest.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_error_does_not_grow_with_the_parts(head_dim: int, packed: bool) -> None:
    """32 parts of the keys, joined in fp32, and gradients added, beside one call."""
    n, parts, heads = 2048, 32, (4, 2, 2)
    inputs = [torch.randn(n, h, head_dim, device="cuda").bfloat16() for h in heads]
    grad_out = torch.randn_like(inputs[0])
    starts = [torch.tensor((0, x), dtype=torch.int32, device="cuda") for x in (n, n // parts)]
    given: dict[str, Any] = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    if not packed:
        given, inputs = {}, [x.transpose(0, 1).unsqueeze(0) for x in inputs]
        grad_out = grad_out.transpose(0, 1).unsqueeze(0)
    attend: Any = flash_attention_varlen if packed else flash_attention
    rows = 0 if packed else 2
    exact = [x.double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(0, 1) if packed else x for x in exact)
    k, v = (x.repeat_interleave(2, -3) for x in (k, v))
    out = (q @ k.mT * head_dim**-0.5).softmax(-1) @ v
    out = out.transpose(0, 1) if packed else out
    wanted = torch.autograd.grad(out, exact, grad_out.double())
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    whole = attend(*leaves, **(given | {"cu_seqlens_k": starts[0]} if packed else {}))
    of_one_call = torch.autograd.grad(whole, leaves, grad_out)

    of_keys = list(zip(*(x.chunk(parts, rows) for x in inputs[1:]), strict=True))
    results = [
        attend(inputs[0], *part, **given, return_lse=True, out_dtype=torch.float32)
        for part in of_keys
    ]
    out, lse = merge(*zip(*results, strict=True), layout="bshd" if packed else "bhsd")
    sums = [torch.zeros(x.shape, device="cuda") for x in inputs]
    add: Any = flash_attention_backward
    of_sums = zip(*(x.chunk(parts, rows) for x in sums[1:]), strict=True)
    for part, into in zip(of_keys, of_sums, strict=True):
        add(inputs[0], *part, out, lse, grad_out, into=(sums[0], *into), **given)
    for total, one, exactly in zip(sums, of_one_call, wanted, strict=True):
        errors = [(x.double() - exactly).square().mean() for x in (total.bfloat16(), one)]
        assert errors[0].sqrt() <= 1.1 * errors[1].sqrt()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_largest_scores(head_dim: int) -> None:
    q, k = (torch.randn(2, 4, 500, head_dim, device="cuda").bfloat16() for _ in range(2))
    scores = q.float() @ k.float().mT * head_dim**-0.5
    seen = torch.ones(500, 500, device="cuda", dtype=torch.bool).tril()
    expected = scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(largest_scores(q, k, causal=True), expected, rtol=1e-3, atol=1e-3)


def test_documents_in_a_graph(implementation: Any) -> None:
    """Their numbers change between replays; the starts have a fixed size."""
    ids = torch.zeros(2, 300, dtype=torch.int64, device="cuda")
    leaves = random(2, 4, 300, 128)  # up to 64 the Hopper tier takes long windows only
    grad_out = torch.randn_like(leaves[0])

    def work(most: int | None = 40) -> list[torch.Tensor]:
        out = flash_attention(
            *leaves, document_ids=ids, max_documents=most, causal=True, window=(70, 0),
            implementation=implementation, deterministic=True,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = work()
    for length in (7, 100, 300):
        ids.copy_((torch.arange(300, device="cuda") // max(length, 15)).expand(2, -1))
        graph.replay()
        for a, b in zip(found, work(None), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


@pytest.mark.multi_gpu
def test_a_device_that_is_not_current(implementation: str) -> None:
    leaves = [x.detach().to("cuda:1").requires_grad_() for x in random(1, 2, 300, 64)]
    grad_out = torch.randn_like(leaves[0])
    keywords = {"deterministic": True, "implementation": implementation}
    actual = gradients(leaves, grad_out, **keywords)
    with torch.cuda.device(1):
        expected = gradients(leaves, grad_out, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_every_element_is_written(implementation: str) -> None:
    """Outputs come from uninitialised memory; filling the allocator's cache with NaN shows gaps."""
    shape = (2, 4, 517, 72)
    leaves = random(*shape)
    grad_out = torch.randn_like(leaves[0])
    keywords = {"implementation": implementation}
    for _ in range(2):
        poison = [torch.full(shape, float("nan"), device="cuda") for _ in range(16)]
        del poison
        results = (flash_attention(*leaves, **keywords), *gradients(leaves, grad_out, **keywords))
        assert all(torch.isfinite(x).all() for x in results)


def test_memory(implementation: str) -> None:
    """Forward keeps the output and the logsumexp; backward adds three gradients and fp32 dQ.

    Delta counts too: on sm_90 in parts for the tensor cores, with L 32 bytes of a query.
    """
    leaves = random(1, 16, 8192, 64)
    size = leaves[0].numel() * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attention(*leaves, causal=True, implementation=implementation)
    rows = 16 * 8192 * 4
    assert torch.cuda.max_memory_allocated() - before <= size + rows + 2**20
    grad_out = torch.randn_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, grad_out)
    statistics = 8 * rows if implementation == "hopper" else rows
    assert torch.cuda.max_memory_allocated() - before <= 5 * size + statistics + 2**20


def test_fp32_is_true_fp32_unless_tf32_is_asked_for() -> None:
    q, k, v = (x.detach() for x in random(1, 2, 512, 64, dtype=torch.float32))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    error = (flash_attention(q, k, v) - exact).abs().max().item()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        coarse = (flash_attention(q, k, v) - exact).abs().max().item()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert error < 3e-6
    assert 1e-5 < coarse < 5e-3


def test_compiled_assignment_function() -> None:
    leaves = [x.squeeze(0).detach().requires_grad_() for x in random(1, 4, 500, 64)]
    compiled = torch.compile(FlashAttention2Triton.apply, fullgraph=True)
    out = compiled(*leaves, True)
    expected = FlashAttention2Triton.apply(*leaves, True)
    assert torch.equal(out, expected)
    out.sum().backward()
    reference = torch.autograd.grad(expected.sum(), leaves)
    for leaf, gradient in zip(leaves, reference, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_the_assignment_function_takes_the_chosen_tier() -> None:
    leaves = [x.detach() for x in random(2, 4, 500, 64)]
    actual = FlashAttention2Triton.apply(*leaves, True)
    assert torch.equal(actual, flash_attention(*leaves, causal=True))


def test_explain_names_gpu_and_tiles() -> None:
    q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    text = explain(q, q, q, causal=True)
    assert "tier: triton" in text or "tier: hopper" in text
    assert torch.cuda.get_device_name() in text
    assert "queries x" in text


def test_a_kernel_that_could_not_be_loaded_is_loaded_by_the_next_call(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a lack of memory: Triton keeps a compiled kernel without its function then."""
    from triton.runtime.driver import driver

    def fails(*arguments: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    # A problem of no other test, so that no test has loaded its kernel in this process.
    leaves = random(1, 2, 1300, 40, dtype=torch.float16)
    window = (1033, 35)
    keywords: dict[str, Any] = {"implementation": implementation, "window": window, "softcap": 7.0}
    monkeypatch.setattr(driver.active.utils, "load_binary", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        flash_attention(*leaves, **keywords)
    monkeypatch.undo()
    actual = flash_attention(*leaves, **keywords)
    expected = flash_attention(*leaves, **{**keywords, "implementation": "reference"})
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("key", "tiling"), TABLE.items(), ids=str)
def test_every_shipped_tiling_for_this_gpu(
    key: tuple[int, int, int], tiling: Tiling, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    kilobytes, width, itemsize = key
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    if tiling_for(describe_gpu(0).shared_memory, width, dtype) != tiling:
        pytest.skip(f"for GPUs with {kilobytes} KB of shared memory per block")
    query, key_, value = random(1, 2, 333, width, dtype=dtype)
    narrow = value.detach()[..., : MAX_HEAD_DIMS[itemsize][1]]  # 576 columns are those of Q and K
    leaves = [query, key_, narrow.requires_grad_()]
    for deterministic in (False, True):
        out, lse = flash_attention(
            *leaves, causal=True, tiling=tiling, deterministic=deterministic, return_lse=True
        )
        expected, expected_lse = flash_attention(
            *leaves, causal=True, implementation="reference", return_lse=True
        )
        tolerance = 2e-2 if itemsize == 2 else 1e-5
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        grad_out = torch.randn_like(out)
        actual = torch.autograd.grad(out, leaves, grad_out)
        wanted = torch.autograd.grad(expected, leaves, grad_out)
        for a, w in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, w, rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dims", [(32, 16), (64, 32), (128, 64), (32, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_unequal_head_dims(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    deterministic: bool,
    plain_causal_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    case = replace(
        plain_causal_case,
        heads=(4, 2),
        lengths=((270, 333),),
        head_dims=head_dims,
        dtype_name=name,
    )
    assert_close_to_oracle(attend(case, deterministic=deterministic), make_inputs(case, "cuda"))


@pytest.mark.parametrize("head_dims", [(16, 16), (32, 16), (64, 64), (128, 24)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_tf32(head_dims: tuple[int, int], causal: bool) -> None:
    dim, value_dim = head_dims
    leaves = [
        torch.randn(2, 3, 203, width, device="cuda", requires_grad=True)
        for width in (dim, dim, value_dim)
    ]
    expected = flash_attention(*leaves, causal=causal, implementation="reference")
    grad_out = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad_out)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        out = flash_attention(*leaves, causal=causal)
        actual = torch.autograd.grad(out, leaves, grad_out)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    for a, w in zip((out, *actual), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, w, rtol=1e-2, atol=1e-2)
