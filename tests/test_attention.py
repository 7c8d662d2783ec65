"""FlashAttention-2 through the assignment's adapters, against attention written out."""

import math

import pytest
import torch

from tests.adapters import (
    get_flash_autograd_function_triton,
    get_flashattention_autograd_function_pytorch,
    get_flashattention_autograd_function_triton,
)

# Where there is no GPU the kernels run under Triton's interpreter (see the root conftest).
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 128, 128, 64), (1, 3, 96, 80, 32), (2, 113, 203, 16)]


def make_inputs(shape: tuple[int, ...], device: str) -> list[torch.Tensor]:
    """Q, K, V and dO in float32 for (..., queries, keys, head_dim)."""
    *leading, n_queries, n_keys, dim = shape
    lengths = (n_queries, n_keys, n_keys)
    qkv = [torch.randn(*leading, n, dim, device=device, requires_grad=True) for n in lengths]
    return [*qkv, torch.randn(*leading, n_queries, dim, device=device)]


def attention(
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp in float64 (Eq. 4-6 and 12)."""
    Q, K, V = Q.double(), K.double(), V.double()
    scores = Q @ K.mT / math.sqrt(Q.shape[-1])
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=Q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ V, scores.logsumexp(-1)


def check_forward(
    function: type[torch.autograd.Function], device: str, shape: tuple[int, ...], causal: bool
) -> None:
    Q, K, V, _ = make_inputs(shape, device)
    out = function.apply(Q, K, V, causal)
    expected, logsumexp = attention(Q, K, V, causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == Q.shape[:-1]]
    assert len(saved) == 1
    torch.testing.assert_close(saved[0].double(), logsumexp, rtol=1e-5, atol=1e-5)


def check_backward(
    function: type[torch.autograd.Function], device: str, shape: tuple[int, ...], causal: bool
) -> None:
    Q, K, V, dO = make_inputs(shape, device)
    function.apply(Q, K, V, causal).backward(dO)
    exact = [x.detach().clone().requires_grad_() for x in (Q, K, V)]
    attention(*exact, causal)[0].backward(dO.double())
    for ours, theirs in zip((Q, K, V), exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_forward_pass_pytorch(shape: tuple[int, ...], causal: bool) -> None:
    check_forward(get_flashattention_autograd_function_pytorch(), "cpu", shape, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_forward_pass_triton(shape: tuple[int, ...], causal: bool) -> None:
    check_forward(get_flashattention_autograd_function_triton(), TRITON_DEVICE, shape, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_backward_pytorch(shape: tuple[int, ...], causal: bool) -> None:
    check_backward(get_flashattention_autograd_function_pytorch(), "cpu", shape, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_backward_triton(shape: tuple[int, ...], causal: bool) -> None:
    check_backward(get_flash_autograd_function_triton(), TRITON_DEVICE, shape, causal)


def test_causal_is_off_by_default() -> None:
    Q, K, V, _ = make_inputs((1, 32, 32, 16), "cpu")
    out = get_flashattention_autograd_function_pytorch().apply(Q, K, V)
    torch.testing.assert_close(out.double(), attention(Q, K, V, False)[0], rtol=1e-5, atol=1e-5)
