"""Inputs chosen to break things, through the public functions, for every implementation."""

import pytest
import torch

from flashattn_triton import flash_attention, flash_attention_varlen
from flashattn_triton.problem import Problem
from flashattn_triton.reference import attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Whether sums have a fixed order makes a difference on a GPU only.
ORDERS = [False, True] if DEVICE == "cuda" else [True]

pytestmark = [
    pytest.mark.parametrize("implementation", ["tiled", "triton"]),
    # NumPy, which computes for Triton's interpreter, mentions what IEEE arithmetic does silently.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


def leaves(*shape, dtype=torch.float32):
    """Query, key, value of one shape, or of one shape each."""
    shapes = shape if isinstance(shape[0], tuple) else (shape,) * 3
    return [torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for s in shapes]


def attention(implementation, tensors, **keywords):
    """(out, lse, *gradients), starting from ones in the output and in the finite logsumexps."""
    out, lse = flash_attention(*tensors, implementation=implementation, return_lse=True, **keywords)
    loss = out.sum() + lse[torch.isfinite(lse)].sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)


def definition(tensors, options):
    out, lse = attention_reference(*tensors, options, dtype=torch.float64)
    loss = out.sum() + lse[torch.isfinite(lse)].sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)


def assert_close(results, expected, tolerance=2e-5):
    for name, actual, wanted in zip(
        ("out", "lse", "dq", "dk", "dv"), results, expected, strict=True
    ):
        torch.testing.assert_close(
            actual.double(),
            wanted.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


# ---- strides and storage -------------------------------------------------------------------------


def test_strides_of_zero(implementation):
    """Query shared by the batch, one key head for all, one value row for all."""
    q = torch.randn(1, 2, 70, 16, device=DEVICE).expand(2, 2, 70, 16).requires_grad_()
    k = torch.randn(2, 1, 75, 16, device=DEVICE).expand(2, 2, 75, 16).requires_grad_()
    v = torch.randn(2, 2, 1, 16, device=DEVICE).expand(2, 2, 75, 16).requires_grad_()
    options = Problem(scale=0.25, causal="bottom-right")
    assert_close(
        attention(implementation, (q, k, v), causal="bottom-right"), definition((q, k, v), options)
    )


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_unaligned_storage_in_a_sea_of_nan(implementation, offset):
    tensors = []
    for x in leaves(1, 2, 67, 24, dtype=torch.bfloat16):
        storage = torch.full((2 * 67 * 29 + 64,), float("nan"), device=DEVICE, dtype=x.dtype)
        view = (
            storage[offset : offset + 2 * 67 * 29].view(1, 67, 29, 2)[:, :, :24].permute(0, 3, 1, 2)
        )
        view.copy_(x.detach())
        assert view.stride(-1) == 2
        tensors.append(view.requires_grad_())
    options = Problem(scale=24**-0.5, causal="top-left")
    results = attention(implementation, tensors, causal=True)
    assert all(torch.isfinite(x).all() for x in results)
    assert_close(results, definition([x.double() for x in tensors], options), 5e-2)


def test_transposed_rows_and_columns(implementation):
    """The sequence is the fastest dimension."""
    tensors = [
        torch.randn(1, 2, 24, 66, device=DEVICE).transpose(2, 3).requires_grad_() for _ in range(3)
    ]
    options = Problem(scale=24**-0.5)
    assert_close(attention(implementation, tensors), definition(tensors, options))


@pytest.mark.parametrize("form", ["expanded", "transposed", "strided"])
def test_strides_of_the_incoming_gradient(implementation, form):
    tensors = leaves(1, 2, 65, 32)
    gradient = {
        "expanded": lambda: torch.ones(1, 1, 1, 1, device=DEVICE).expand(1, 2, 65, 32),
        "transposed": lambda: torch.randn(1, 65, 2, 32, device=DEVICE).transpose(1, 2),
        "strided": lambda: torch.randn(1, 2, 65, 64, device=DEVICE)[..., ::2],
    }[form]()
    out = flash_attention(*tensors, causal=True, implementation=implementation)
    expected, _ = attention_reference(*tensors, Problem(scale=32**-0.5, causal="top-left"))
    actual = torch.autograd.grad(out, tensors, gradient)
    for x, wanted in zip(actual, torch.autograd.grad(expected, tensors, gradient), strict=True):
        torch.testing.assert_close(x, wanted, rtol=2e-5, atol=2e-5)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_scores_of_ten_thousand(implementation, causal, scale):
    """Softmax is one-hot, so the output is a row of V, exactly."""
    q, k, v = leaves(1, 1, 80, 16)
    with torch.no_grad():
        q *= 3000
    options = Problem(scale=scale, causal="top-left" if causal else "none")
    out, lse, *gradients = attention(implementation, (q, k, v), causal=causal, scale=scale)
    expected, expected_lse, *_ = definition((q, k, v), options)
    assert lse.max() > 1e4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert all(torch.isfinite(x).all() for x in gradients)


def test_scores_far_below_any_sentinel(implementation):
    """Every visible score is near -10⁷: a mask of -10⁶ or -10⁴ would let hidden keys win."""
    q, k, v = leaves(1, 2, 70, 16)
    with torch.no_grad():
        q.abs_().add_(1).mul_(1e6)
        k.copy_(-1 - k.abs() * 1e-6)
    options = Problem(scale=1.0, causal="top-left")
    out, lse, *gradients = attention(implementation, (q, k, v), causal=True, scale=1.0)
    assert lse.max() < -1e7
    expected_lse = definition((q, k, v), options)[1]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)
    torch.testing.assert_close(out[:, :, 0], v.detach()[:, :, 0])  # sees only the first key
    assert (out.abs() <= v.detach().abs().max() * 1.001).all()
    assert all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("softcap", [0.05, 2.0, 50.0])
@pytest.mark.parametrize("scale", [-0.7, 3.0])
def test_softcap_from_saturated_to_linear(implementation, softcap, scale):
    tensors = leaves(1, 2, 66, 16)
    options = Problem(scale=scale, softcap=softcap, causal="top-left")
    results = attention(implementation, tensors, causal=True, scale=scale, softcap=softcap)
    assert_close(results, definition(tensors, options), 5e-5)


@pytest.mark.parametrize("deterministic", ORDERS)
def test_nan_stays_in_its_head(implementation, deterministic):
    """Ragged lengths: the tiles of one head end where the next head's memory begins."""
    clean = leaves(1, 3, 67, 16)
    poisoned = [x.detach().clone().requires_grad_() for x in clean]
    with torch.no_grad():
        for x in poisoned:
            x[0, 1] = float("nan")
    keywords = {"causal": True, "deterministic": deterministic}
    expected = attention(implementation, clean, **keywords)
    actual = attention(implementation, poisoned, **keywords)
    others = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
    others[0, 1] = False
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x[others], wanted[others], rtol=1e-5, atol=1e-5)
        assert torch.isnan(x[0, 1]).any()


def test_a_nan_query_spoils_only_its_own_row(implementation):
    q, k, v = (x.detach() for x in leaves(1, 1, 70, 16))
    clean = flash_attention(q, k, v, causal=True, implementation=implementation)
    q[0, 0, 41] = float("nan")
    out = flash_attention(q, k, v, causal=True, implementation=implementation)
    assert torch.isnan(out[0, 0, 41]).all()
    rest = torch.arange(70, device=DEVICE) != 41
    assert torch.equal(out[:, :, rest], clean[:, :, rest])


def test_infinite_values_and_hidden_keys(implementation):
    """A key at -inf is seen by nobody; an infinite value is what those see who see it."""
    q, k, v = (x.detach() for x in leaves(1, 1, 70, 16))
    q[..., 0].abs_()
    without = [q, k[:, :, :66].clone(), v[:, :, :66].clone()]
    k[:, :, 66:, 0] = -float("inf")
    out = flash_attention(q, k, v, implementation=implementation)
    expected = flash_attention(*without, implementation=implementation)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    v[0, 0, 3, 5] = float("inf")
    out = flash_attention(q, k, v, implementation=implementation)
    assert torch.isposinf(out[..., 5]).all()
    rest = [column for column in range(16) if column != 5]
    torch.testing.assert_close(out[..., rest], expected[..., rest], rtol=1e-6, atol=1e-6)


# ---- masks ---------------------------------------------------------------------------------------


WINDOWS = [
    (70, 70, False, (0, 0)),
    (70, 90, "bottom-right", (0, 0)),
    (90, 70, False, (0, 0)),  # the last 20 queries are past the keys
    (90, 70, "bottom-right", (3, None)),  # the first 20 are before them
    (70, 70, True, (10**9, 10**9)),
    (70, 70, False, (2**40, None)),
    (129, 130, "top-left", (64, None)),
    (130, 129, "bottom-right", (63, 5)),
    (200, 3, False, (5, 130)),
    (3, 200, False, (5, 130)),
]


@pytest.mark.parametrize(("n_queries", "n_keys", "causal", "window"), WINDOWS)
def test_windows(implementation, n_queries, n_keys, causal, window):
    shape = (1, 1, n_keys, 16)
    tensors = leaves((1, 1, n_queries, 16), shape, shape)
    name = {False: "none", True: "top-left"}.get(causal, causal)
    options = Problem(scale=0.25, causal=name, window=window)
    results = attention(implementation, tensors, causal=causal, window=window)
    assert_close(results, definition(tensors, options))


def test_every_row_is_hidden(implementation):
    """Keys that lie far before every query's window."""
    tensors = leaves((1, 1, 200, 16), (1, 1, 66, 16), (1, 1, 66, 16))
    q, k, v = tensors
    hidden = [q, k[:, :, :1], v[:, :, :1]]
    out, lse = flash_attention(
        *hidden, window=(0, 0), return_lse=True, implementation=implementation
    )
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    assert (out[:, :, 1:] == 0).all()
    assert torch.isneginf(lse[:, :, 1:]).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("deterministic", ORDERS)
def test_gradient_of_minus_infinity_is_ignored(implementation, poison, deterministic):
    """A constant has no derivative, though what is made of it may claim otherwise: the gradient of
    logaddexp(-inf, -inf), which merges partial results, is NaN."""
    tensors = leaves((1, 1, 90, 16), (1, 1, 70, 16), (1, 1, 70, 16))
    out, lse = flash_attention(
        *tensors,
        causal="bottom-right",
        return_lse=True,
        deterministic=deterministic,
        implementation=implementation,
    )
    grad_lse = torch.where(torch.isneginf(lse), poison, 1.0)
    gradients = torch.autograd.grad((out, lse), tensors, (torch.ones_like(out), grad_lse))
    options = Problem(scale=0.25, causal="bottom-right")
    assert_close((out.detach(), lse.detach(), *gradients), definition(tensors, options))


def test_the_gradient_of_a_hidden_row_is_ignored(implementation):
    tensors = leaves((1, 1, 90, 16), (1, 1, 70, 16), (1, 1, 70, 16))
    out = flash_attention(*tensors, causal="bottom-right", implementation=implementation)
    big = torch.ones_like(out)
    big[:, :, :20] = 1e30
    actual = torch.autograd.grad(out, tensors, big, retain_graph=True)
    for x, wanted in zip(actual, torch.autograd.grad(out.sum(), tensors), strict=True):
        torch.testing.assert_close(x, wanted)
    assert (actual[0][:, :, :20] == 0).all()


# ---- which gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(0,), (1, 2)])
def test_some_inputs_need_no_gradient(implementation, wanted):
    tensors = leaves(1, 2, 66, 16)
    every = torch.autograd.grad(
        flash_attention(*tensors, implementation=implementation).sum(), tensors
    )
    chosen = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    flash_attention(*chosen, implementation=implementation).sum().backward()
    for i, x in enumerate(chosen):
        assert (x.grad is not None) == (i in wanted)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, every[i])


def test_the_logsumexp_alone(implementation):
    q, k, v = leaves(1, 2, 66, 16)
    _, lse = flash_attention(q, k, v, causal=True, return_lse=True, implementation=implementation)
    options = Problem(scale=0.25, causal="top-left")
    _, expected = attention_reference(q, k, v, options)
    actual = torch.autograd.grad(lse.sum(), (q, k))
    for x, want in zip(actual, torch.autograd.grad(expected.sum(), (q, k)), strict=True):
        torch.testing.assert_close(x, want, rtol=2e-5, atol=2e-5)


def test_one_tensor_in_three_roles(implementation):
    (x, *_) = leaves(1, 2, 66, 16)
    flash_attention(x, x, x, causal=True, implementation=implementation).sum().backward()
    options = Problem(scale=0.25, causal="top-left")
    (expected,) = torch.autograd.grad(attention_reference(x, x, x, options)[0].sum(), x)
    torch.testing.assert_close(x.grad, expected, rtol=5e-5, atol=5e-5)


# ---- packed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", ORDERS)
def test_nan_stays_in_its_sequence(implementation, deterministic):
    starts = torch.tensor([0, 5, 5, 72, 90], dtype=torch.int32, device=DEVICE)
    tensors = leaves(90, 2, 16)
    with torch.no_grad():
        for x in tensors:
            x[5:72] = float("nan")
    keywords = {"deterministic": deterministic, "implementation": implementation}
    out = flash_attention_varlen(*tensors, starts, starts, 67, 67, causal=True, **keywords)
    gradients = torch.autograd.grad(out.sum(), tensors)
    good = torch.ones(90, dtype=torch.bool, device=DEVICE)
    good[5:72] = False
    assert all(torch.isfinite(x[good]).all() for x in (out, *gradients))
    alone = flash_attention(
        *(x[72:].transpose(0, 1)[None] for x in tensors), causal=True, implementation=implementation
    )
    torch.testing.assert_close(out[72:], alone[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_only_empty_sequences(implementation):
    starts = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    some = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE)
    q, k, v = leaves((8, 2, 16), (0, 1, 16), (0, 1, 16))
    out, lse = flash_attention_varlen(
        q, k, v, some, starts, 5, 0, return_lse=True, implementation=implementation
    )
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(gradient, torch.zeros_like(q))
