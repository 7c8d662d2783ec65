"""scaled_dot_product_attention routed to flash_attention, and what is not."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from flashattn_triton.integrations import sdpa
from flashattn_triton.integrations.sdpa import route_sdpa


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of flash_attention, which still runs."""
    made = []
    original = sdpa.flash_attention

    def counted(*args, **keywords):
        made.append(keywords)
        return original(*args, **keywords)

    monkeypatch.setattr(sdpa, "flash_attention", counted)
    return made


def inputs(heads=2, kv_heads=2, n_queries=9, n_keys=9, leading=(2,)):
    query = torch.randn(*leading, heads, n_queries, 8, requires_grad=True)
    key = torch.randn(*leading, kv_heads, n_keys, 8, requires_grad=True)
    value = torch.randn(*leading, kv_heads, n_keys, 8, requires_grad=True)
    return query, key, value


@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"n_queries": 5}, {"is_causal": True, "scale": 0.7}),
        ({"heads": 4}, {"enable_gqa": True}),
        ({"leading": ()}, {"is_causal": True}),
        ({"n_queries": 1, "n_keys": 30}, {"attn_mask": None, "dropout_p": 0.0}),
        ({}, {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril(1)}),
    ],
)
def test_a_routed_call_equals_the_original(calls, shape, keywords):
    tensors = inputs(**shape)
    expected = F.scaled_dot_product_attention(*tensors, **keywords)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, grad)
    with route_sdpa(strict=True) as routing:
        out = F.scaled_dot_product_attention(*tensors, **keywords)
        gradients = torch.autograd.grad(out, tensors, grad)
    assert len(calls) == routing.routed == 1
    torch.testing.assert_close(out, expected)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("leading", "mask_shape"),
    [((2,), (9, 7)), ((2,), (2, 1, 1, 7)), ((2,), (1, 2, 9, 7)), ((), (2, 9, 7)), ((), (7,))],
    ids=str,
)
def test_a_mask_of_numbers_is_added_to_the_scores(calls, leading, mask_shape):
    tensors = inputs(n_keys=7, leading=leading)
    mask = torch.randn(mask_shape)
    mask[..., 3] = float("-inf")
    mask.requires_grad_()
    results = []
    for context in (contextlib.nullcontext(), route_sdpa(strict=True)):
        with context:
            out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), (*tensors, mask))))
    assert len(calls) == 1
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "keywords", "reason"),
    [
        (torch.zeros(9, 9, dtype=torch.float64), {}, "nor of the query's dtype"),
        (torch.zeros(9, 9), {"is_causal": True}, "beside is_causal"),
        (torch.zeros(3, 1, 9, 9), {}, "does not broadcast"),
        (torch.zeros(9, 9, device="meta"), {}, "on another device"),
    ],
)
def test_other_masks_are_named(mask, keywords, reason):
    with route_sdpa(strict=True), pytest.raises(ValueError, match=reason):
        F.scaled_dot_product_attention(*inputs(), attn_mask=mask, **keywords)


def test_positional_arguments_and_modules(calls):
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    tokens = torch.randn(2, 7, 16)
    query, key, value = inputs()
    plain = layer(tokens, tokens, tokens, need_weights=False)[0]
    with route_sdpa(strict=True) as routing:
        F.scaled_dot_product_attention(query, key, value, None, 0.0, True)
        routed = layer(tokens, tokens, tokens, need_weights=False)[0]
    assert routing.routed == len(calls) == 2
    assert calls[0]["causal"] == "top-left"
    torch.testing.assert_close(routed, plain)


UNSUPPORTED = [
    (lambda q, k, v: (q, k, v), {"dropout_p": 0.5}, "dropout_p is not 0"),
    (lambda q, k, v: (q.double(), k.double(), v.double()), {}, "a dtype other than"),
    (lambda q, k, v: (q[None], k[None], v[None]), {}, "other than 3 or 4 dimensions"),
    (lambda q, k, v: (q[:, :1], k, v), {}, "head dimensions that broadcast"),
    (lambda q, k, v: (q, k[:1], v[:1]), {}, "batch dimensions that broadcast"),
    (lambda q, k, v: (q[:, :, :0], k, v), {}, "empty tensors"),
    (lambda q, k, v: (x.repeat(1, 1, 1, 33) for x in (q, k, v)), {}, "head_dim above 256"),
    (lambda q, k, v: (q, k, v), {"scale": torch.tensor(0.3)}, "a scale that is no number"),
    (lambda q, k, v: (q, k, v), {"scale": True}, "a scale that is no number"),
]


@pytest.mark.parametrize(
    ("change", "keywords", "reason"), UNSUPPORTED, ids=[reason for *_, reason in UNSUPPORTED]
)
def test_unsupported_calls_are_passed_on_counted_and_reported(calls, change, keywords, reason):
    arguments = tuple(change(*(x.detach() for x in inputs())))
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*arguments, **keywords)
    torch.manual_seed(3)
    report = pytest.warns(RuntimeWarning, match=f"0 calls .* routed; 1 passed on: {reason}")
    with report, route_sdpa() as routing:
        out = F.scaled_dot_product_attention(*arguments, **keywords)
    assert torch.equal(out, expected)
    assert calls == []
    assert routing.routed == 0
    assert sum(routing.passed_on.values()) == 1


@pytest.mark.parametrize(
    ("change", "keywords", "reason"), UNSUPPORTED, ids=[reason for *_, reason in UNSUPPORTED]
)
def test_strict_refuses_unsupported_calls(change, keywords, reason):
    arguments = tuple(change(*inputs()))
    with pytest.raises(ValueError, match=f"cannot be routed .* {reason}"), route_sdpa(strict=True):
        F.scaled_dot_product_attention(*arguments, **keywords)


def test_unknown_arguments_are_pytorchs_to_judge(calls):
    """A later PyTorch may have more of them; this one names them in its error."""
    q, k, v = inputs()
    with route_sdpa() as routing:
        with pytest.raises(TypeError, match="unknown_argument"):
            F.scaled_dot_product_attention(q, k, v, unknown_argument=1)
        assert routing.passed_on.pop("arguments that are not known") == 1
    with pytest.raises(ValueError, match="arguments that are not known"), route_sdpa(strict=True):
        F.scaled_dot_product_attention(q, k, v, unknown_argument=1)
    assert calls == []


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"attn_mask": torch.zeros(9)}, IndexError),
        ({"attn_mask": torch.ones(9, dtype=torch.bool)}, IndexError),
        ({"attn_mask": torch.zeros(())}, IndexError),
        ({"is_causal": 1}, TypeError),
    ],
)
def test_what_pytorch_refuses_is_refused(calls, keywords, error):
    tensors = [x.detach() for x in inputs()]
    with pytest.raises(error):
        F.scaled_dot_product_attention(*tensors, **keywords)
    with pytest.raises(error), route_sdpa():
        F.scaled_dot_product_attention(*tensors, **keywords)
    assert calls == []


def test_the_original_comes_back_after_an_exception(calls):
    tensors = inputs()
    with pytest.raises(KeyError, match="stop"), route_sdpa():
        raise KeyError("stop")
    F.scaled_dot_product_attention(*tensors)
    assert calls == []


def test_an_exception_is_not_replaced_by_the_report():
    def interrupted(tensors):
        with route_sdpa():
            F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        interrupted(inputs())


def test_other_threads_are_routed_too(calls):
    tensors = inputs()
    with route_sdpa() as routing:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(*tensors))
        thread.start()
        thread.join()
    assert routing.routed == len(calls) == 1


def test_overlapping_contexts_of_several_threads(calls):
    original = F.scaled_dot_product_attention
    tensors = inputs()
    inside, leave = threading.Event(), threading.Event()
    others = []

    def other():
        with route_sdpa() as routing:
            inside.set()
            leave.wait(100)
        others.append(routing)

    thread = threading.Thread(target=other)
    try:
        with route_sdpa() as first:
            thread.start()
            assert inside.wait(100)
            F.scaled_dot_product_attention(*tensors)
        assert F.scaled_dot_product_attention is not original  # the other context is still open
        F.scaled_dot_product_attention(*tensors)
    finally:
        leave.set()
        thread.join()
    assert F.scaled_dot_product_attention is original
    assert (first.routed, others[0].routed) == (0, 2)


def test_a_wrapper_installed_meanwhile_survives(calls, monkeypatch):
    tensors = inputs()
    with route_sdpa() as routing:
        replacement = F.scaled_dot_product_attention
        wrapper = lambda *args, **keywords: replacement(*args, **keywords)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
    assert F.scaled_dot_product_attention is wrapper
    F.scaled_dot_product_attention(*tensors)
    assert routing.routed == len(calls) == 0
    # monkeypatch would put back the replacement, which by now only passes calls on.
    monkeypatch.undo()
    F.scaled_dot_product_attention = sdpa._SWITCH.original


def test_nested_contexts_count_once(calls):
    tensors = inputs()
    with route_sdpa() as outer, route_sdpa() as inner:
        F.scaled_dot_product_attention(*tensors)
    assert (outer.routed, inner.routed, len(calls)) == (0, 1, 1)


def test_activation_checkpointing_recomputes_through_the_route(calls):
    tensors = inputs()
    with route_sdpa(strict=True) as routing:
        out = checkpoint(F.scaled_dot_product_attention, *tensors, use_reentrant=False)
        out.sum().backward()
    assert routing.routed == len(calls) == 2
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*tensors).sum(), tensors)
    for x, want in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-5)


def test_the_report_reads_well():
    routing = sdpa.Routing(routed=3)
    routing.passed_on.update(["attn_mask is given"] * 2)
    assert str(routing) == (
        "3 calls of scaled_dot_product_attention routed; 2 passed on: attn_mask is given"
    )
