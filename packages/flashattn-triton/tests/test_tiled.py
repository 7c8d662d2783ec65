"""Algorithm 1 and 2 in PyTorch against the oracle."""

from dataclasses import replace

import pytest
import torch

from attention_inputs import operator_arguments
from flashattn_triton import FlashAttention2PyTorch, tiled
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.op import BACKWARD, FORWARD
from flashattn_triton.problem import Problem
from flashattn_triton.reference import attention_reference, visibility_mask
from flashattn_triton.tiled import ScoreTiles, tiled_backward, tiled_forward


def results(inputs, lse_gradient=True, **sizes):
    q, k, v = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    out, lse = tiled_forward(q, k, v, inputs.options, **sizes)
    dlse = inputs.grad_lse if lse_gradient else None
    tensors = (q, k, v, out, lse, inputs.grad_out, dlse)
    dq, dk, dv = tiled_backward(tensors, inputs.options, **sizes)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def test_every_case(case, make_inputs, assert_results_close):
    inputs = make_inputs(case)
    assert_results_close(inputs, results(inputs))


def test_every_case_in_small_tiles(case, make_inputs, assert_results_close):
    inputs = make_inputs(case)
    tiles = results(inputs, lse_gradient=False, query_tile=32, key_tile=16)
    assert_results_close(inputs, tiles, lse_gradient=False)


@pytest.mark.parametrize("layout", ["bshd", "padded", "strided", "expanded"])
def test_strides(strided_case, layout, make_inputs, assert_results_close):
    inputs = make_inputs(strided_case, layout=layout)
    assert_results_close(inputs, results(inputs))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("out", lambda x: x.bfloat16().float()),  # a half-precision P or O in a fp32 computation
        ("out", lambda x: x * (1 + 2.0**-13)),
        ("lse", lambda x: x + 1e-3),
        ("dq", lambda x: x.half().float()),
        ("dk", lambda x: x * 1.001),
        ("dv", lambda x: torch.cat([x[:, :, :-1], 0 * x[:, :, -1:]], dim=2)),  # the last row
    ],
)
def test_the_tolerances_notice_damage(
    plain_causal_case, name, damage, make_inputs, assert_results_close
):
    inputs = make_inputs(plain_causal_case)
    assert inputs.case.dtype == torch.float32  # damage of this size is noise to half types
    good = results(inputs)
    assert_results_close(inputs, good)
    with pytest.raises(AssertionError, match=name):
        assert_results_close(inputs, good | {name: damage(good[name])})


def test_the_tolerances_notice_a_lost_logsumexp_gradient(
    strided_case, make_inputs, assert_results_close
):
    inputs = make_inputs(strided_case)
    without = results(inputs, lse_gradient=False)
    with pytest.raises(AssertionError, match="dq"):
        assert_results_close(inputs, without)


def test_every_packed_case(varlen_case, make_inputs, assert_results_close):
    inputs = make_inputs(varlen_case)
    q, k, v = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    starts = varlen_case.cu_seqlens("cpu")
    longest = tuple(max(lengths) for lengths in zip(*varlen_case.lengths, strict=True))
    problem = replace(inputs.options, layout="thd", longest=longest, implementation="tiled")
    arguments = operator_arguments(problem, Given(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1]))
    out, lse = FORWARD(q, k, v, *arguments)
    tensors = (q, k, v, out, lse, inputs.grad_out, inputs.grad_lse)
    dq, dk, dv = BACKWARD(*tensors, *arguments, [True, False, False])[:3]
    assert_results_close(inputs, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


def score_tiles(n_queries, n_keys, problem):
    query, key = torch.empty(1, 1, n_queries, 1), torch.empty(1, 1, n_keys, 1)
    return ScoreTiles(query, key, problem, Given())


@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("window", [(None, None), (0, 0), (5, None), (None, 3), (9, 4), (99, 99)])
@pytest.mark.parametrize("shape", [(40, 40), (13, 50), (50, 13)])
def test_tiles_cover_exactly_what_is_visible(causal, window, shape):
    options = Problem(scale=1.0, causal=causal, window=window)
    visible = visibility_mask(*shape, options)
    found = score_tiles(*shape, options)
    covered = torch.zeros(*shape, dtype=torch.bool)
    for queries in tiled.tiles(shape[0], 16):
        for keys in found.key_tiles(*queries, 16):
            tile = (slice(*queries), slice(*keys))
            assert visible[tile].any(), f"{queries} x {keys} was visited for nothing"
            hidden = found.hidden(queries, keys)
            covered[tile] = True if hidden is None else ~hidden[0, 0, :, 0]
    assert torch.equal(covered, visible)


def test_unmasked_tiles_build_no_mask():
    found = score_tiles(64, 64, Problem(scale=1.0, causal="top-left"))
    assert found.hidden((32, 48), (0, 32)) is None
    assert found.hidden((32, 48), (32, 48)) is not None
    assert found.hidden((32, 48), (31, 33)) is None


def test_the_score_matrix_never_exists(monkeypatch):
    largest = 0
    original = torch.bmm

    def watched(a, b):
        nonlocal largest
        product = original(a, b)
        largest = max(largest, product.shape[-2] * product.shape[-1])
        return product

    monkeypatch.setattr(torch, "bmm", watched)
    options = Problem(scale=0.2, causal="top-left")
    q, k, v, do = torch.randn(4, 1, 1, 700, 16)
    out, lse = tiled_forward(q, k, v, options, query_tile=64, key_tile=64)
    tiled_backward((q, k, v, out, lse, do, None), options, query_tile=64, key_tile=64)
    assert 0 < largest <= 64 * 64


def test_gradient_of_the_logsumexp_of_a_row_without_keys_is_ignored():
    options = Problem(scale=0.5, causal="bottom-right")
    q, do = torch.randn(2, 1, 1, 9, 4)
    k, v = torch.randn(2, 1, 1, 5, 4)
    out, lse = tiled_forward(q, k, v, options)
    dlse = torch.where(torch.isneginf(lse), float("nan"), 1.0)
    gradients = tiled_backward((q, k, v, out, lse, do, dlse), options)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, :, :4] == 0).all()


def test_fp64_gradients_numerically():
    options = Problem(scale=0.4, causal="top-left", softcap=2.0, window=(3, None))

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = tiled_forward(q, k, v, options, query_tile=4, key_tile=3)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, do, dlse):
            tensors = (*ctx.saved_tensors, do, dlse)
            return tiled_backward(tensors, options, query_tile=2, key_tile=3)

    q = torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 8, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, 8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Tiled.apply, (q, k, v), fast_mode=True)


def test_autocast_does_not_lower_the_precision():
    options = Problem(scale=0.125)
    q, k, v = torch.randn(3, 1, 1, 50, 64)
    plain, _ = tiled_forward(q, k, v, options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast, _ = tiled_forward(q, k, v, options)
    assert torch.equal(plain, autocast)


def test_scores_of_ten_thousand():
    options = Problem(scale=1.0, causal="top-left")
    q, k, v = torch.randn(3, 1, 2, 90, 16)
    q = q * 2500
    out, lse = tiled_forward(q, k, v, options, query_tile=32, key_tile=32)
    expected, expected_lse = attention_reference(q, k, v, options, dtype=torch.float64)
    assert lse.max() > 1e4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    # A score of 10⁴ has an absolute error of 10⁻³ in fp32, which is the weights' relative error.
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


# ---- the assignment's Function -------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(2,), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_function_equals_the_oracle_and_saves_one_logsumexp(leading, is_causal):
    Q, dO = torch.randn(2, *leading, 37, 16)
    K = torch.randn(*leading, 45, 16)
    V = torch.randn(*leading, 45, 16)
    for x in (Q, K, V):
        x.requires_grad_()
    out = FlashAttention2PyTorch.apply(Q, K, V, is_causal)
    options = Problem(scale=0.25, causal="top-left" if is_causal else "none")
    flat = [x.reshape(-1, 1, *x.shape[-2:]) for x in (Q, K, V)]
    expected, lse = attention_reference(*flat, options)
    torch.testing.assert_close(out, expected.reshape(out.shape), rtol=1e-5, atol=1e-6)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == Q.shape[:-1]]
    assert len(saved) == 1
    torch.testing.assert_close(saved[0], lse.reshape(Q.shape[:-1]), rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(out, (Q, K, V), dO)
    wanted = torch.autograd.grad(expected.reshape(out.shape), (Q, K, V), dO)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)


def test_function_default_is_not_causal():
    Q, K, V = torch.randn(3, 2, 20, 16)
    assert torch.equal(
        FlashAttention2PyTorch.apply(Q, K, V), FlashAttention2PyTorch.apply(Q, K, V, False)
    )


def test_function_refuses_a_second_derivative():
    Q, K, V = torch.randn(3, 1, 8, 4).requires_grad_()
    loss = FlashAttention2PyTorch.apply(Q, K, V).square().sum()
    (gradient,) = torch.autograd.grad(loss, Q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


GOOD = (2, 8, 4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((8, 4), (8, 4), (8, 4)), r"Q must have at least three dimensions .* got shape \(8, 4\)"),
        (
            (GOOD, (1, 8, 4), GOOD),
            r"K must have .* the same leading dimensions as Q, but got shape \(1, 8, 4\)",
        ),
        ((GOOD, (2, 8, 5), GOOD), r"key must have query's head_dim 4, but got 5"),
        ((GOOD, GOOD, (2, 9, 4)), r"value must have key's sequence length 8, but got 9"),
    ],
)
def test_function_names_the_wrong_shape(shapes, message):
    with pytest.raises(ValueError, match=message):
        FlashAttention2PyTorch.apply(*(torch.randn(shape) for shape in shapes), False)


@pytest.mark.parametrize("position", range(3))
def test_function_names_the_wrong_dtype_and_device(position):
    for change, message in [
        (lambda x: x.to(torch.int32), "query must be float16|must have query's dtype"),
        (lambda x: x.half(), "must have query's dtype"),
        (lambda x: x.to("meta"), "must be on query's device"),
    ]:
        tensors = list(torch.randn(3, *GOOD))
        tensors[position] = change(tensors[position])
        with pytest.raises(ValueError, match=message):
            FlashAttention2PyTorch.apply(*tensors)


def test_key_tiles_are_bounded_by_the_size():
    found = score_tiles(100, 130, Problem(scale=1.0))
    assert list(found.key_tiles(0, 16, 48)) == [(0, 48), (48, 96), (96, 130)]


@pytest.mark.slow  # starts the compiler
# PyTorch's own tracing of autograd functions instantiates them.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_function_compiles_without_graph_breaks():
    Q, K, V = torch.randn(3, 2, 33, 16).unbind()
    leaves = [x.requires_grad_() for x in (Q, K, V)]
    compiled = torch.compile(FlashAttention2PyTorch.apply, backend="eager", fullgraph=True)
    out, expected = compiled(*leaves, True), FlashAttention2PyTorch.apply(*leaves, True)
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(out.sum(), leaves)
    for gradient, want in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(gradient, want)
