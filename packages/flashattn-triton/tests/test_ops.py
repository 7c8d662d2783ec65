"""The operators under torch.compile, opcheck, autocast, vmap, checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention_inputs import operator_arguments
from flashattn_triton import FlashAttention2Triton, flash_attention, flash_attention_varlen
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import new_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["tiled", "triton"]
FORWARD = torch.ops.flashattn_triton.forward.default
BACKWARD = torch.ops.flashattn_triton.backward.default
# Importing torch's compiler warns about its own use of torch.jit.
compiler = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Leaves no compiled code behind: autograd functions share the code object of ``apply``."""
    yield
    torch.compiler.reset()


def leaves(length: int = 40, **keywords: Any) -> list[torch.Tensor]:
    keywords = {"device": DEVICE, "requires_grad": True, **keywords}
    return [torch.randn(2, heads, length, 16, **keywords) for heads in (2, 1, 1)]


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7)
    return torch.autograd.grad(out, inputs, torch.randn_like(out))


@compiler
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(implementation: str, transposed: bool) -> None:
    arguments = operator_arguments(
        new_problem(head_dim=16, causal=True, implementation=implementation)
    )
    inputs = leaves(33)
    if transposed:
        inputs = [
            x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs
        ]
    torch.library.opcheck(FORWARD, (*inputs, *arguments))


@compiler
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_opcheck_of_the_backward_operator(implementation: str) -> None:
    arguments = operator_arguments(
        new_problem(head_dim=16, window=(5, 3), implementation=implementation)
    )
    inputs = [x.detach() for x in leaves(33)]
    out, lse = FORWARD(*inputs, *arguments)
    results = (out, lse, torch.randn_like(out), torch.randn_like(lse))
    torch.library.opcheck(BACKWARD, (*inputs, *results, *arguments, [True, False, False]))


@compiler
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_opcheck_packed(implementation: str) -> None:
    starts = torch.tensor([0, 10, 10, 30], dtype=torch.int32, device=DEVICE)
    problem = new_problem("thd", 16, (20, 20), implementation=implementation)
    arguments = operator_arguments(problem, Given(cu_seqlens_q=starts, cu_seqlens_k=starts))
    inputs = [torch.randn(30, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(FORWARD, (*inputs, *arguments))


@compiler
@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_the_hopper_tier(head_dims: tuple[int, int], packed: bool) -> None:
    """Both operators. In a fixed order of additions: opcheck compares the results of two calls."""
    if DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    starts = torch.tensor([0, 10, 10, 130], dtype=torch.int32, device=DEVICE) if packed else None
    head_dim, value_dim = head_dims
    problem = new_problem(
        "thd" if packed else "bhsd",
        head_dim,
        (120, 120) if packed else (0, 0),
        causal=True,
        deterministic=True,
        implementation="hopper",
    )
    arguments = operator_arguments(problem, Given(cu_seqlens_q=starts, cu_seqlens_k=starts))
    inputs = [
        torch.randn(
            (130, heads, width) if packed else (1, heads, 130, width),
            device=DEVICE,
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        for heads, width in ((4, head_dim), (2, head_dim), (2, value_dim))
    ]
    torch.library.opcheck(FORWARD, (*inputs, *arguments))
    detached = [x.detach() for x in inputs]
    out, lse = FORWARD(*detached, *arguments)
    results = (out, lse, torch.randn_like(out), torch.randn_like(lse))
    torch.library.opcheck(BACKWARD, (*detached, *results, *arguments, [True, False, False]))


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_without_breaks_for_any_length(implementation: str) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention(q, k, v, causal=True, return_lse=True, implementation=implementation)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (40, 33, 57):
        inputs = leaves(length)
        out, lse = compiled(*inputs)
        expected, expected_lse = attend(*inputs)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        actual = gradients(out.sum() + lse.sum(), inputs)
        wanted = gradients(expected.sum() + expected_lse.sum(), inputs)
        for a, w in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, w)


@compiler
@pytest.mark.slow
def test_compiled_packed() -> None:
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, dynamic=True)
    for lengths in ((5, 0, 20), (9, 30, 2)):
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        inputs = [
            torch.randn(sum(lengths), 2, 16, device=DEVICE, requires_grad=True) for _ in range(3)
        ]
        arguments = (*inputs, starts, starts, max(lengths), max(lengths))
        out, expected = compiled(*arguments), flash_attention_varlen(*arguments)
        torch.testing.assert_close(out, expected)
        for a, w in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(a, w)


@compiler
@pytest.mark.slow
def test_compiled_assignment_function() -> None:
    inputs = [x.flatten(0, 1)[:2].detach().requires_grad_() for x in leaves()]
    compiled = torch.compile(FlashAttention2Triton.apply, fullgraph=True)
    out, expected = compiled(*inputs, True), FlashAttention2Triton.apply(*inputs, True)
    torch.testing.assert_close(out, expected)
    for a, w in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_operator_itself_is_differentiable(implementation: str) -> None:
    arguments = operator_arguments(
        new_problem(head_dim=16, causal=True, implementation=implementation)
    )
    inputs = leaves()
    out, lse = FORWARD(*inputs, *arguments)
    expected, expected_lse = flash_attention(
        *inputs, causal=True, return_lse=True, implementation="reference"
    )
    for ours, theirs in ((out, expected), (lse, expected_lse)):
        actual = torch.autograd.grad(ours.sum(), inputs, retain_graph=True, materialize_grads=True)
        wanted = torch.autograd.grad(
            theirs.sum(), inputs, retain_graph=True, materialize_grads=True
        )
        for a, w in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("key_dim", [None, 0, 2])
def test_vmap(implementation: str, key_dim: int | None) -> None:
    queries = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    keys = torch.randn(3, 2, 1, 20, 16, device=DEVICE)
    shared = keys[0] if key_dim is None else keys.movedim(0, key_dim)

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, k, k, causal=True, implementation=implementation)

    out = torch.func.vmap(attend, in_dims=(0, key_dim))(queries, shared)
    for i in range(3):
        expected = attend(queries[i], keys[0] if key_dim is None else keys[i])
        torch.testing.assert_close(out[i], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_func_grad_and_its_vmap(implementation: str) -> None:
    queries = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    keys = torch.randn(2, 1, 20, 16, device=DEVICE)

    def loss(q: torch.Tensor, k: torch.Tensor, implementation: str) -> torch.Tensor:
        out, lse = flash_attention(
            q, k, k, causal=True, return_lse=True, implementation=implementation
        )
        return out.square().sum() + lse.sum()

    differentiate = torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, None, None))
    actual = differentiate(queries, keys, implementation)
    for a, e in zip(actual, differentiate(queries, keys, "reference"), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    alone = torch.func.grad(loss, (0, 1))(queries[1], keys, implementation)
    for a, e in zip(alone, actual, strict=True):
        torch.testing.assert_close(a, e[1])


@compiler
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_transforms(implementation: str) -> None:
    queries = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    keys = torch.randn(2, 1, 20, 16, device=DEVICE)

    def loss(q: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(
            q, keys, keys, causal=True, return_lse=True, implementation=implementation
        )
        return out.square().sum() + lse.sum()

    for transform, x in (
        (torch.func.grad(loss), queries[0]),
        (torch.func.vmap(torch.func.grad(loss)), queries),
    ):
        compiled = torch.compile(transform, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), transform(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_several_gradients_of_the_output_at_once(implementation: str, with_sinks: bool) -> None:
    inputs = leaves()
    sinks = torch.randn(2, device=DEVICE, requires_grad=True) if with_sinks else None
    out = flash_attention(*inputs, causal=True, sinks=sinks, implementation=implementation)
    grads = torch.randn(3, *out.shape, device=DEVICE)
    wanted = inputs if sinks is None else [*inputs, sinks]
    batched = torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        alone = torch.autograd.grad(out, wanted, grad, retain_graph=True)
        for a, e in zip(batched, alone, strict=True):
            torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derivatives_of_mapped_and_shared_sinks(implementation: str) -> None:
    queries = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    key, value = torch.randn(2, 2, 1, 20, 16, device=DEVICE)
    sinks = torch.randn(3, 2, device=DEVICE)

    def loss(q: torch.Tensor, s: torch.Tensor, implementation: str) -> torch.Tensor:
        out = flash_attention(q, key, value, sinks=s, implementation=implementation)
        return out.square().sum()

    for dim, given in ((0, sinks), (None, sinks[0])):
        actual, expected = (
            torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, dim, None))(
                queries, given, name
            )
            for name in (implementation, "reference")
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_floating_point_operations_are_counted_as_pytorch_counts_its_own() -> None:
    query = torch.randn(2, 4, 20, 16, device=DEVICE, requires_grad=True)
    key = torch.randn(2, 4, 30, 16, device=DEVICE, requires_grad=True)
    value = torch.randn(2, 4, 30, 24, device=DEVICE, requires_grad=True)
    products = (2 * 8 * 20 * 30 * 16, 2 * 8 * 20 * 30 * 24)
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(query, key, value)
    assert counter.get_total_flops() == sum(products)
    bias = torch.zeros(20, 30, device=DEVICE, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 3 * products[0] + 2 * products[1]
    out = flash_attention(query, key, value, bias=bias)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 4 * products[0] + 3 * products[1]
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    with FlopCounterMode(display=False) as counter:
        flash_attention(*rows, layout="bshd")
    assert counter.get_total_flops() == sum(products)
    x = torch.randn(20, 2, 16, device=DEVICE)
    starts = torch.tensor([0, 5, 20], dtype=torch.int32, device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        flash_attention_varlen(x, x, x, starts, starts)
    assert counter.get_total_flops() == 4 * 2 * 16 * (5**2 + 15**2)


def test_the_assignment_function_refuses_func_grad() -> None:
    x = torch.randn(2, 20, 16, device=DEVICE)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda q: FlashAttention2Triton.apply(q, x, x, True).sum())(x)


def test_vmap_over_packed_batches() -> None:
    starts = torch.tensor([0, 4, 10], dtype=torch.int32, device=DEVICE)
    x = torch.randn(3, 10, 2, 16, device=DEVICE)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return flash_attention_varlen(q, q, q, starts, starts, causal=True).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(actual, torch.stack([torch.func.grad(loss)(own) for own in x]))


@compiler
@pytest.mark.skipif(DEVICE != "cpu", reason="values of starts are checked on the CPU alone")
def test_starts_are_checked_each_time_where_operators_run() -> None:
    """Also of a call that is found, and of each element that is mapped over."""
    starts = torch.tensor([[0, 4, 10], [0, 12, 10]], dtype=torch.int32)
    x = torch.randn(10, 2, 16)

    def attend(starts: torch.Tensor) -> torch.Tensor:
        return flash_attention_varlen(x, x, x, starts, starts)

    expected = attend(starts[0])
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (compiled, torch.func.functionalize(attend)):
        torch.testing.assert_close(function(starts[0]), expected)
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0"):
            function(starts[1])
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0"):
        torch.vmap(attend)(starts)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_traced_module_reads_its_own_starts(implementation: Any) -> None:
    """``torch.jit.trace`` records the operator, not what one call computed."""
    x = torch.randn(10, 2, 16, device=DEVICE)

    def attend(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return flash_attention_varlen(x, x, x, starts, starts, implementation=implementation)

    starts = torch.tensor([[0, 4, 10], [0, 1, 7]], dtype=torch.int32, device=DEVICE)
    traced = torch.jit.trace(attend, (x, starts[0]))
    torch.testing.assert_close(traced(x + 1, starts[1]), attend(x + 1, starts[1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_negative_views_have_their_sign(implementation: Any) -> None:
    """The imaginary part of a conjugate is a view of memory that holds the other sign."""
    q, k, v = leaves()
    numbers = torch.randn(2, 2, 40, 40, dtype=torch.complex64, device=DEVICE).conj().imag
    assert numbers.is_neg()
    for bias in (numbers, numbers.resolve_neg()):  # in this order: the second call is found
        out, lse = flash_attention(
            q, k, v, bias=bias, return_lse=True, implementation=implementation
        )
        results = [out, *torch.autograd.grad(lse, (q, k), numbers[..., 0], retain_graph=True)]
        wanted = torch.autograd.grad(lse, (q, k), numbers[..., 0].resolve_neg())
        torch.testing.assert_close(results[1:], list(wanted))
        if bias is numbers:
            expected = out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "reference"])
def test_autocast(implementation: str) -> None:
    inputs = leaves()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = flash_attention(*inputs, implementation=implementation)
    assert out.dtype == torch.bfloat16
    half = [x.detach().bfloat16() for x in inputs]
    assert torch.equal(out, flash_attention(*half, implementation=implementation))
    for gradient, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert gradient.dtype == x.dtype


def test_checkpointing() -> None:
    inputs = leaves()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention(q, k, v, causal=True)

    out = checkpoint(attend, *inputs, use_reentrant=False)
    for a, w in zip(gradients(out, inputs), gradients(attend(*inputs), inputs), strict=True):
        assert torch.equal(a, w)


def test_fake_tensors_have_the_real_strides() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 30, 4, 16).transpose(1, 2)
        out, lse = flash_attention(q, q, q, return_lse=True)
        assert out.stride() == q.stride()
        assert lse.shape == (2, 4, 30)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_is_saved_without_gradients(implementation: str) -> None:
    inputs = leaves()
    with torch.no_grad():
        assert not flash_attention(*inputs, implementation=implementation).requires_grad
    detached = [x.detach() for x in inputs]
    assert flash_attention(*detached, implementation=implementation).grad_fn is None
