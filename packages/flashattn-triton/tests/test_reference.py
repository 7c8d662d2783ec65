"""The oracle itself, against formulas written out by hand and against PyTorch's attention."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import Problem
from flashattn_triton.reference import (
    attend_by_definition,
    attention_reference,
    visibility_mask,
)


def options(**keywords):
    return Problem(**({"scale": 0.25} | keywords))


def drawn(mask):
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


@pytest.mark.parametrize(
    ("keywords", "shape", "expected"),
    [
        ({}, (2, 3), ["xxx", "xxx"]),
        ({"causal": "top-left"}, (3, 4), ["x...", "xx..", "xxx."]),
        ({"causal": "top-left"}, (4, 2), ["x.", "xx", "xx", "xx"]),
        ({"causal": "bottom-right"}, (2, 4), ["xxx.", "xxxx"]),
        ({"causal": "bottom-right"}, (4, 2), ["..", "..", "x.", "xx"]),
        ({"window": (1, 0)}, (4, 4), ["x...", "xx..", ".xx.", "..xx"]),
        ({"window": (0, 1)}, (3, 5), ["xx...", ".xx..", "..xx."]),
        ({"window": (None, 1)}, (3, 4), ["xx..", "xxx.", "xxxx"]),
        ({"window": (1, None)}, (4, 3), ["xxx", "xxx", ".xx", "..x"]),
        ({"window": (1, 7), "causal": "top-left"}, (3, 3), ["x..", "xx.", ".xx"]),
        ({"window": (1, 0), "causal": "bottom-right"}, (2, 5), ["..xx.", "...xx"]),
        ({"window": (0, 0)}, (4, 2), ["x.", ".x", "..", ".."]),
        ({"window": (1, 1), "causal": "bottom-right-window"}, (2, 4), [".xxx", "..xx"]),
        ({"window": (0, 1), "causal": "bottom-right-window"}, (4, 2), ["..", "x.", "xx", ".x"]),
    ],
)
def test_visibility_mask_draws_the_documented_picture(keywords, shape, expected):
    assert drawn(visibility_mask(*shape, options(**keywords))) == expected


@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_equals_scaled_dot_product_attention(causal):
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 7, 8, dtype=torch.float64)
    out, _ = attention_reference(
        query, key, value, options(causal=causal, scale=-0.3), dtype=torch.float64
    )
    # PyTorch's causal path returns NaN for a negative scale, so the sign goes to the query.
    expected = F.scaled_dot_product_attention(
        -query, key, value, is_causal=causal == "top-left", scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)


def test_one_query_by_hand():
    query = torch.tensor([[[[2.0]]]])
    key = torch.tensor([[[[1.0], [3.0]]]])
    value = torch.tensor([[[[10.0, 0.0], [20.0, 1.0]]]])
    out, lse = attention_reference(query, key, value, options(scale=0.5, softcap=2.0))
    scores = [2 * math.tanh(s / 2) for s in (1.0, 3.0)]
    total = sum(math.exp(s) for s in scores)
    second = math.exp(scores[1]) / total
    torch.testing.assert_close(out.flatten(), torch.tensor([10 + 10 * second, second]))
    torch.testing.assert_close(lse.item(), math.log(total), rtol=1e-6, atol=0)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_with_rows_that_see_nothing(softcap):
    query = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 1, 2, n, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    chosen = options(causal="bottom-right", softcap=softcap)

    def attend(q, k, v):
        out, lse = attention_reference(q, k, v, chosen, dtype=torch.float64)
        assert torch.isneginf(lse[:, :, :2]).all()
        assert (out[:, :, :2] == 0).all()
        return out, lse[:, :, 2:]

    assert torch.autograd.gradcheck(attend, (query, key, value))
    out, lse = attention_reference(query, key, value, chosen, dtype=torch.float64)
    (out.sum() + lse.sum()).backward()  # -inf rows included: their gradient is zero, not NaN
    assert (query.grad[:, :, :2] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))


def test_huge_scores_do_not_overflow():
    query, key, value = torch.randn(3, 1, 1, 6, 4)
    out, lse = attention_reference(1e4 * query, key, value, options(scale=1.0))
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_no_keys_at_all():
    query, empty = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 0, 4)
    out, lse = attention_reference(query, empty, empty, options())
    assert torch.equal(out, torch.zeros(1, 1, 3, 4))
    assert torch.isneginf(lse).all()


def test_packed_sequences_do_not_see_each_other():
    query, key, value = torch.randn(7, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 3)
    starts_q, starts_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 5, 6])
    problem = replace(options(), layout="thd")
    given = Given(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    out, lse = attend_by_definition(problem, query, key, value, given)
    assert out.shape == (7, 2, 3)
    assert lse.shape == (2, 7)
    alone, _ = attention_reference(
        query[:3].transpose(0, 1)[None],
        key[:2].transpose(0, 1)[None],
        value[:2].transpose(0, 1)[None],
        options(),
    )
    torch.testing.assert_close(out[:3], alone[0].transpose(0, 1))
    torch.testing.assert_close(out[3:], value[5:].expand(4, 2, 3))  # a single key
