"""Forward mode and second derivatives against autograd through the definition, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, vmap
from torch.utils.flop_counter import FlopCounterMode

from flashattn_triton import flash_attention, flash_attention_varlen, higher_derivatives

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
jvp: Any = torch.func.jvp
compiler = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(higher_derivatives, "TILE", 7)
    monkeypatch.setattr(higher_derivatives, "TILE_ON_GPU", 7)
    yield
    torch.compiler.reset()


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "top-left"},
    "window": {"window": (4, 3), "softcap": 2.0},
    "bottom-right": {"causal": "bottom-right", "scale": -0.3, "layout": "bshd"},
    "prefixes": {"causal": "top-left", "prefix_lengths": torch.tensor([3, 9])},
    "alibi": {"causal": "top-left", "alibi_slopes": torch.tensor([0.5, 0.1, 0.3])},
}


def tensors(dtype: torch.dtype = torch.float64, n_keys: int = 17) -> list[Tensor]:
    """Query, key, value, bias and sinks; one key head for three query heads."""
    shapes = ((2, 3, 13, 4), (2, 1, n_keys, 4), (2, 1, n_keys, 3), (2, 1, 13, n_keys), (3,))
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


def attend(name: str, implementation: Any) -> Callable[..., Any]:
    keywords = dict(CASES[name])
    for key, x in keywords.items():
        keywords[key] = x.to(DEVICE) if isinstance(x, Tensor) else x

    def function(*inputs: Tensor) -> Any:
        q, k, v, bias, sinks = inputs
        if keywords.get("layout") == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attention(
            q, k, v, bias=bias, sinks=sinks, return_lse=True, implementation=implementation,
            **keywords,
        )  # fmt: skip

    return function


def close(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def penalty(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of the size of the gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sin().sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in gradients]).sum(), leaves)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_and_gradient_penalties(name: str) -> None:
    inputs, directions = tensors(), tensors()
    ours, theirs = attend(name, "tiled"), attend(name, "reference")
    close(
        jvp(ours, tuple(inputs), tuple(directions)), jvp(theirs, tuple(inputs), tuple(directions))
    )
    close(penalty(ours, inputs), penalty(theirs, inputs))


@pytest.mark.parametrize("name", ["causal", "window"])
def test_gradients_through_tangents(name: str) -> None:
    """As losses on a jvp take them, of the inputs and of the direction; and of plain tensors."""

    def gradients(implementation: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        leaves = [x.requires_grad_() for x in (*tensors(), *tensors())]
        function = attend(name, implementation)
        (out, lse), (t_out, t_lse) = jvp(function, tuple(leaves[:5]), tuple(leaves[5:]))
        loss = (out - t_out).square().sum() + (lse * t_lse).sin().sum()
        return torch.autograd.grad(loss, leaves)

    close(gradients("tiled"), gradients("reference"))


def test_forward_mode_over_reverse_mode_and_more_levels() -> None:
    q, k, v, _, sinks = (x[..., :6, :6] if x.dim() > 1 else x for x in tensors())

    def loss(q: Tensor, k: Tensor, sinks: Tensor, implementation: Any) -> Tensor:
        out = flash_attention(
            q, k, v, sinks=sinks, causal="top-left", implementation=implementation
        )
        return out.square().sum()

    def results(implementation: Any) -> Any:
        def of(q: Tensor) -> Tensor:
            return loss(q, k, sinks, implementation)

        direction = torch.ones_like(q)
        return (
            hessian(loss, (0, 2))(q, k, sinks, implementation),
            grad(lambda x: grad(of)(x).sin().sum())(q),
            grad(lambda x: jvp(of, (x,), (direction,))[1])(q),
            jvp(lambda x: jvp(of, (x,), (direction,))[1], (q,), (direction,)),
            vmap(lambda t: jvp(grad(of), (q,), (t,))[1])(torch.stack([direction, q])),
        )

    q, k, v = q[:1], k[:1], v[:1]
    for ours, theirs in zip(results("tiled"), results("reference"), strict=True):
        close(ours, theirs)


def test_gradgradcheck_and_forward_mode_of_gradcheck() -> None:
    inputs = [x[:1, :, :3, :3] if x.dim() > 1 else x for x in tensors()]
    leaves = [x.clone().requires_grad_() for x in inputs]
    function = attend("causal", "tiled")
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_packed_sequences() -> None:
    starts = torch.tensor([0, 5, 5, 11], dtype=torch.int32, device=DEVICE)  # two tokens of no one
    shapes = ((13, 3, 4), (13, 1, 4), (13, 1, 3))
    inputs, directions = (
        [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in (*shapes, (3,))]
        for _ in range(2)
    )

    def attend(implementation: Any) -> Callable[..., Any]:
        return lambda q, k, v, sinks: flash_attention_varlen(
            q, k, v, starts, starts, sinks=sinks, causal=True, implementation=implementation,
            return_lse=True,
        )  # fmt: skip

    ours, theirs = attend("tiled"), attend("reference")
    found, wanted = (jvp(f, tuple(inputs), tuple(directions)) for f in (ours, theirs))
    close(found, wanted)
    close(penalty(ours, inputs), penalty(theirs, inputs))


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_empty_problems(shape: tuple[int, int, int]) -> None:
    batch, n_queries, n_keys = shape
    q = torch.randn(batch, 2, n_queries, 4, device=DEVICE)
    k = torch.randn(batch, 2, n_keys, 4, device=DEVICE)
    sinks = torch.randn(2, device=DEVICE)
    out, tangent = jvp(lambda q, s: flash_attention(q, k, k, sinks=s), (q, sinks), (q, sinks))
    assert out.shape == tangent.shape == q.shape
    assert not tangent.any()
    leaves = [x.clone().requires_grad_() for x in (q, k, sinks)]
    out = flash_attention(leaves[0], leaves[1], leaves[1], sinks=leaves[2])
    gradients = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(
        torch.stack([g.sum() for g in gradients]).sum(), leaves, materialize_grads=True
    )
    assert [x.shape for x in second] == [x.shape for x in leaves]


def test_hidden_rows_have_no_tangents() -> None:
    q, k = torch.randn(2, 1, 1, 6, 4, device=DEVICE)
    bias = torch.zeros(6, 6, device=DEVICE)
    bias[2] = float("-inf")
    function = lambda q, k: flash_attention(q, k, k, bias=bias, return_lse=True)  # noqa: E731
    _, (tangent, lse_tangent) = jvp(function, (q, k), (q, k))
    assert not tangent[0, 0, 2].any()
    assert lse_tangent[0, 0, 2] == 0
    assert tangent.isfinite().all()
    for gradient in penalty(function, [q, k]):
        assert gradient.isfinite().all()


def test_kernels_first_derivatives_and_half_types() -> None:
    inputs, directions = tensors(torch.float32), tensors(torch.float32)
    ours, theirs = attend("causal", "triton"), attend("causal", "reference")
    pairs = (
        jvp(ours, tuple(inputs), tuple(directions)),
        jvp(theirs, tuple(inputs), tuple(directions)),
    )
    close(*pairs, rtol=1e-4, atol=1e-5)
    close(penalty(ours, inputs), penalty(theirs, inputs), rtol=1e-3, atol=1e-4)
    half = [x.bfloat16() for x in inputs[:3]]
    function = lambda *x: flash_attention(*x)  # noqa: E731
    out, tangent = jvp(function, tuple(half), tuple(half))
    assert out.dtype == tangent.dtype == torch.bfloat16


def test_dual_tensors_outside_of_torch_func() -> None:
    q, k, v, *_ = tensors()
    direction = torch.randn_like(q)
    with forward_ad.dual_level():
        out = flash_attention(forward_ad.make_dual(q, direction), k, v)
        tangent = forward_ad.unpack_dual(out).tangent
    expected = jvp(lambda q: flash_attention(q, k, v), (q,), (direction,))[1]
    close(tangent, expected)
    slopes = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="alibi_slopes must be constants, but got a dual tensor"):
        jvp(
            lambda s: flash_attention(q.float(), k.float(), v.float(), alibi_slopes=s),
            (slopes,),
            (slopes,),
        )


@pytest.mark.parametrize("implementation", ["tiled", "reference"])
def test_tensors_without_data(implementation: Any) -> None:
    """Shapes of outputs and of two derivatives, on the "meta" device, which has no autocast."""
    x = torch.zeros(2, 4, 9, 16, device="meta", requires_grad=True)
    out = flash_attention(x, x, x, causal=True, implementation=implementation)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert out.shape == gradient.shape == second.shape == x.shape


@compiler
def test_compiled_code() -> None:
    q, k, v, *_ = tensors()
    weight = torch.eye(4, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def loss(q: Tensor, t: Tensor) -> Any:
        out, tangent = jvp(lambda x: flash_attention(x @ weight, k, v), (q,), (t,))
        return (out - tangent.detach()).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    direction = torch.randn_like(q)
    found, wanted = (torch.autograd.grad(f(q, direction), weight) for f in (compiled, loss))
    close(found, wanted)


def test_operations_are_counted() -> None:
    q, k, v, *_ = tensors()
    with FlopCounterMode(display=False) as counter:
        jvp(lambda q: flash_attention(q, k, v), (q,), (q,))
    pairs = 2 * 2 * 3 * 13 * 17
    assert counter.get_total_flops() == pairs * (4 + 3) + pairs * (3 * 4 + 2 * 3)
