"""Whatever the shapes, strides and options: every tier agrees with the definition."""

import pytest
import torch

import flashattn_triton
from flashattn_triton.problem import Problem
from flashattn_triton.tiled import tiled_backward, tiled_forward

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(deadline=None, max_examples=25, derandomize=True)

LAYOUTS = st.sampled_from(["bhsd", "bshd", "padded", "strided", "expanded"])
lengths = st.integers(1, 70)
dims = st.integers(1, 24)
side = st.none() | st.integers(0, 80)
heads = st.tuples(st.integers(1, 3), st.integers(1, 2)).map(lambda x: (x[0] * x[1], x[1]))
masks = {
    "causal": st.sampled_from(["none", "top-left", "bottom-right", "bottom-right-window"]),
    "window": st.tuples(side, side),
    "softcap": st.none() | st.floats(0.5, 20),
    "scale": st.none() | st.floats(-1, 1).filter(lambda x: x == 0 or abs(x) > 1e-3),
}
dense_problems = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "heads": heads,
        "n_queries": lengths,
        "n_keys": lengths,
        "head_dim": st.tuples(dims, dims),
        "dtype_name": st.sampled_from(["fp32", "fp16", "bf16"]),
    }
    | masks
)
packed_problems = st.fixed_dictionaries(
    {
        "heads": heads,
        "lengths": st.lists(
            st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4
        )
        .filter(lambda spans: all(sum(column) > 0 for column in zip(*spans, strict=True)))
        .map(tuple),
        "head_dims": st.tuples(dims, dims),
        "dtype_name": st.sampled_from(["fp32", "bf16"]),
    }
    | masks
)


@SETTINGS
@given(problem=dense_problems, layout=LAYOUTS, tiles=st.tuples(lengths, lengths))
def test_tiled_functions(problem, layout, tiles, dense_case, make_inputs, assert_results_close):
    inputs = make_inputs(dense_case(**problem), layout=layout)
    sizes = {"query_tile": tiles[0], "key_tile": tiles[1]}
    q, k, v = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    out, lse = tiled_forward(q, k, v, inputs.options, **sizes)
    tensors = (q, k, v, out, lse, inputs.grad_out, inputs.grad_lse)
    gradients = tiled_backward(tensors, inputs.options, **sizes)
    results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_results_close(inputs, {"out": out, "lse": lse} | results)


@SETTINGS
@given(problem=dense_problems, layout=LAYOUTS)
def test_flash_attention(problem, layout, dense_case, make_inputs, assert_close_to_oracle):
    inputs = make_inputs(dense_case(**problem), layout=layout)

    def attend(q, k, v):
        return flashattn_triton.flash_attention(
            q, k, v, layout="bhsd", return_lse=True, **inputs.case.keywords
        )

    assert_close_to_oracle(attend, inputs)


@SETTINGS
@given(problem=dense_problems)
def test_the_two_layouts_agree(problem, dense_case, make_inputs):
    inputs = make_inputs(dense_case(**problem))
    tensors = [x.detach() for x in (inputs.query, inputs.key, inputs.value)]
    keywords = inputs.case.keywords
    out = flashattn_triton.flash_attention(*tensors, layout="bhsd", **keywords)
    turned = (x.transpose(1, 2).contiguous() for x in tensors)
    other = flashattn_triton.flash_attention(*turned, layout="bshd", **keywords)
    assert torch.equal(out, other.transpose(1, 2))


@SETTINGS
@given(problem=packed_problems, layout=st.sampled_from(["bhsd", "bshd", "padded", "strided"]))
def test_flash_attention_varlen(problem, layout, packed_case, make_inputs, assert_close_to_oracle):
    case = packed_case(**problem)
    inputs = make_inputs(case, layout=layout)
    longest = (max(column) for column in zip(*case.seqlens, strict=True))
    places = (*case.cu_seqlens("cpu"), *longest)

    def attend(q, k, v):
        return flashattn_triton.flash_attention_varlen(
            q, k, v, *places, return_lse=True, **case.keywords
        )

    assert_close_to_oracle(attend, inputs)


@SETTINGS
@given(problem=dense_problems, extra=st.integers(1, 30))
def test_keys_out_of_sight_do_not_matter(problem, extra, dense_case, make_inputs):
    """More keys behind a top-left causal mask change nothing, whatever they hold."""
    n_queries, n_keys = sorted((problem["n_queries"], problem["n_keys"]))
    chosen = {"causal": "top-left", "n_queries": n_queries, "n_keys": n_keys}
    inputs = make_inputs(dense_case(**(problem | chosen)))
    q, k, v = (x.detach() for x in (inputs.query, inputs.key, inputs.value))
    far = k.new_full((*k.shape[:2], extra, 1), float("nan"))
    out, lse = tiled_forward(q, k, v, inputs.options)
    more_k, more_v = (torch.cat([x, far.expand(*far.shape[:3], x.shape[3])], 2) for x in (k, v))
    grown, grown_lse = tiled_forward(q, more_k, more_v, inputs.options)
    torch.testing.assert_close(grown, out)
    torch.testing.assert_close(grown_lse, lse)


@SETTINGS
@given(n=lengths, shift=st.floats(-5, 5))
def test_the_output_is_a_mean_of_the_values(n, shift):
    """Weights sum to one: constant values come back, and adding a constant shifts the output."""
    q, k, v = torch.randn(3, 1, 2, n, 8)
    options = Problem(scale=1.0, causal="top-left")
    constant, _ = tiled_forward(q, k, torch.full_like(v, shift), options)
    torch.testing.assert_close(constant, torch.full_like(v, shift))
    out, _ = tiled_forward(q, k, v, options)
    shifted, _ = tiled_forward(q, k, v + shift, options)
    torch.testing.assert_close(shifted, out + shift, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["tiled", "reference"])
def test_implementations_by_name(implementation, strided_case, make_inputs, assert_close_to_oracle):
    inputs = make_inputs(strided_case)

    def attend(q, k, v):
        return flashattn_triton.flash_attention(
            q, k, v, return_lse=True, implementation=implementation, **strided_case.keywords
        )

    assert_close_to_oracle(attend, inputs)
