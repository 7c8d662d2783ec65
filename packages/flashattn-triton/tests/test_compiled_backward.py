"""Eq. 13-19, plain and compiled, against autograd of the definition."""

from functools import partial

import pytest
import torch

from flashattn_triton import assignment
from flashattn_triton.assignment import compiled_flash_backward, flash_backward
from flashattn_triton.problem import Problem
from flashattn_triton.tiled import tiled_forward


def gradients(backward, inputs):
    q, k, v = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    options = inputs.options
    out, lse = tiled_forward(q, k, v, options)
    is_causal = options.causal == "top-left"
    found = backward(q, k, v, out, inputs.grad_out, lse, is_causal, options.scale)
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


def test_equals_autograd_of_the_definition(plain_case, make_inputs, assert_results_close):
    inputs = make_inputs(plain_case)
    assert_results_close(inputs, gradients(flash_backward, inputs), lse_gradient=False)


def test_leading_dimensions_are_free():
    Q, K, V, dO = torch.randn(4, 2, 3, 4, 9, 8)
    out, lse = tiled_forward_any(Q, K, V)
    whole = flash_backward(Q, K, V, out, dO, lse, True, 0.5)
    single = [x[1, 2, 3] for x in (Q, K, V, out, dO, lse)]
    for gradient, want in zip(whole, flash_backward(*single, True, 0.5), strict=True):
        torch.testing.assert_close(gradient[1, 2, 3], want)


def tiled_forward_any(Q, K, V):
    options = Problem(causal="top-left", scale=0.5)
    out, lse = tiled_forward(*(x.flatten(0, 1) for x in (Q, K, V)), options)
    return out.unflatten(0, Q.shape[:2]), lse.unflatten(0, Q.shape[:2])


@pytest.fixture
def fresh_compilation():
    assignment._compiled.cache_clear()
    torch.compiler.reset()
    yield
    assignment._compiled.cache_clear()
    torch.compiler.reset()


def check_compiled(inputs, assert_results_close):
    plain = gradients(flash_backward, inputs)
    compiled = gradients(compiled_flash_backward, inputs)
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-5)
    assert_results_close(inputs, compiled, lse_gradient=False)


@pytest.mark.usefixtures("fresh_compilation")
def test_the_traced_graph_equals_the_function(
    monkeypatch, make_inputs, assert_results_close, plain_causal_case
):
    # Tracing and decomposition are what can go wrong here; generating C++ would take a minute.
    original = torch.compile
    monkeypatch.setattr(torch, "compile", partial(original, backend="aot_eager"))
    check_compiled(make_inputs(plain_causal_case), assert_results_close)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compilation")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # Inductor's own import
def test_compiled_by_inductor(make_inputs, assert_results_close, plain_causal_case):
    check_compiled(make_inputs(plain_causal_case, device="cuda"), assert_results_close)


@pytest.mark.usefixtures("fresh_compilation")
def test_compiles_once_and_on_first_use(monkeypatch):
    compiled = []

    def record(function, **_):
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", record)
    Q, K, V, dO = torch.randn(4, 1, 5, 4)
    L = torch.logsumexp(Q @ K.mT, dim=-1)
    for _ in range(2):
        compiled_flash_backward(Q, K, V, V, dO, L, False, 1.0)
    assert compiled == [flash_backward]
