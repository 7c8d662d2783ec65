"""flash-attn's functions by its names and with its meaning, against masks written out here."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashattn_triton.integrations import flash_attn
from flashattn_triton.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, softcap: float
) -> tuple[Tensor, Tensor]:
    """(N, H, D) in fp64, as flash-attn's documentation defines it."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    diagonal = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])[None]
    left, right = window
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen &= (keys >= diagonal - left) | (left < 0)
    seen &= (keys <= diagonal + right) | (right < 0)
    seen &= (keys <= diagonal) | (not causal)
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(seen.to(scores.device), torch.exp(scores - lse[..., None]), 0.0)
    return (weights @ v).transpose(0, 1), lse


def close(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.dtype), rtol=1e-5, atol=1e-5)


def leaves(*rows: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    queries, keys = rows
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(n, h, 16, device=DEVICE, requires_grad=True) for n, h in shapes]


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 4)},
    {"window_size": (7, -1)},
    {"window_size": (-1, 2)},
    {"window_size": (5, 3), "causal": True},
    {"softcap": 2.0, "softmax_scale": 0.7, "causal": True, "deterministic": True},
]


@pytest.mark.parametrize("rows", [(9, 9), (5, 11), (11, 5)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(rows: tuple[int, int], options: dict[str, Any]) -> None:
    sequences = [leaves(*rows) for _ in range(2)]
    q, k, v = (torch.stack(parts) for parts in zip(*sequences, strict=True))
    out, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert nothing is None
    assert torch.equal(out, flash_attn_func(q, k, v, **options))
    check(sequences, out.unbind(), lse.unbind(), options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed(options: dict[str, Any]) -> None:
    lengths = [(9, 9), (5, 11), (11, 5), (1, 7)]
    sequences = [leaves(*rows) for rows in lengths]
    q, k, v = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    starts = [torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in zip(*lengths, strict=True)]
    out, lse, nothing = flash_attn_varlen_func(
        q, k, v, *starts, 11, 11, return_attn_probs=True, **options
    )
    assert nothing is None
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, *starts, **options))
    rows = [n for n, _ in lengths]
    check(sequences, out.split(rows), lse.split(rows, dim=1), options)


def check(sequences: list[list[Tensor]], outs: Any, lses: Any, options: dict[str, Any]) -> None:
    """Outputs, logsumexps and gradients of each sequence."""
    for tensors, out, lse in zip(sequences, outs, lses, strict=True):
        expected = definition(
            *tensors,
            scale=options.get("softmax_scale", 0.25),
            causal=options.get("causal", False),
            window=options.get("window_size", (-1, -1)),
            softcap=options.get("softcap", 0.0),
        )
        blind = expected[1] == float("-inf")  # rows that see no key
        close((out, lse), expected)
        weight = torch.randn_like(out) * ~blind.T[..., None]
        wanted = torch.autograd.grad(
            (expected[0] * weight).masked_fill(blind.T[..., None], 0.0).sum(),
            tensors,
            retain_graph=True,
        )
        close(torch.autograd.grad(out, tensors, weight, retain_graph=True), wanted)


def test_signatures() -> None:
    """Positional arguments in flash-attn 2's order."""
    dense = ["q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap"]
    rest = ["alibi_slopes", "deterministic", "return_attn_probs"]
    assert list(inspect.signature(flash_attn_func).parameters)[:-1] == dense + rest
    starts = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    packed = [*dense[:3], *starts, *dense[3:], *rest, "block_table"]
    assert list(inspect.signature(flash_attn_varlen_func).parameters)[:-1] == packed


UNSUPPORTED = [
    ({"dropout_p": 0.1}, "dropout_p must be 0.0, .* does not support dropout, but got 0.1"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be .* shape \(4,\) or \(1, 4\), but got"),
    ({"page_table": torch.ones(4)}, "page_table must be None, .* paged caches"),
    ({"qv": torch.ones(4)}, "qv must be None"),
    ({"k_descale": torch.ones(4)}, "k_descale must be None, .* fp8"),
    ({"attention_chunk": 64}, "attention_chunk must be 0"),
    ({"seqused_k": torch.ones(4)}, "seqused_k must be None"),
    ({"seqused_k": np.ones(4)}, "seqused_k must be None"),
    ({"return_attn_probs": "lse"}, "return_attn_probs must be True or False, but got 'lse'"),
    ({"causal": "top-left"}, "causal must be True or False, but got 'top-left'"),
    ({"window_size": 128}, r"window_size must be a pair \(left, right\) of integers, but got 128"),
    ({"window_size": (-2, 0)}, "window left must be an integer >= 0, or None, but got -2"),
    ({"softcap": -1.0}, "softcap must be a finite number > 0 .* got -1.0"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED, ids=[m for _, m in UNSUPPORTED])
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    q, k, v = leaves(5, 5)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*(x[None] for x in (q, k, v)), **change)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, **change)


def test_packed_tensors_are_sent_to_the_packed_function() -> None:
    with pytest.raises(ValueError, match=r"q must be \(batch, .* Use flash_attn_varlen_func"):
        flash_attn_func(*leaves(5, 5))


def test_unknown_and_harmless_arguments() -> None:
    q, k, v = (x[None] for x in leaves(5, 5))
    with pytest.raises(TypeError, match=r"flash_attn_func must be called .* but got scale\."):
        flash_attn_func(q, k, v, scale=1.0)
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor"):
        flash_attn_func(q.detach().numpy(), k, v)
    expected = flash_attn_func(q, k, v)
    plain = {"num_splits": 0, "pack_gqa": True, "sm_margin": 4, "qv": None, "attention_chunk": 0}
    assert torch.equal(flash_attn_func(q, k, v, **plain), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled() -> None:
    tensors = [x.detach()[None] for x in leaves(9, 12)]
    compiled = torch.compile(flash_attn_func, backend="eager", fullgraph=True)
    options = {"causal": True, "window_size": (4, 0)}
    assert torch.equal(compiled(*tensors, **options), flash_attn_func(*tensors, **options))


# A program that was written for flash-attn: dense attention in one layer, packed in the next.
TRAINING_LOOP = """
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func


class Model(torch.nn.Module):
    def __init__(self, vocabulary=31, width=32):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.embedding(tokens)
        q, k, v = self.qkv[0](x).view(batch, length, 3, 2, -1).unbind(2)
        x = x + flash_attn_func(q, k, v, 0.0, causal=True, window_size=(5, 0)).flatten(2)
        starts = torch.arange(0, tokens.numel() + 1, length, dtype=torch.int32, device=x.device)
        q, k, v = self.qkv[1](x).view(batch * length, 3, 2, -1).unbind(1)
        packed = (starts, starts, length, length)
        out = flash_attn_varlen_func(q, k, v, *packed, softmax_scale=0.3, causal=True)
        return self.head(x + out.view(batch, length, -1))


def train(device, steps=4):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    tokens, losses = torch.randint(31, (3, 18)).to(device), []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), list(model.parameters())
"""


def flash_attn_by_its_definition() -> ModuleType:
    """A module in flash-attn's place."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
        window = options.get("window_size", (-1, -1))
        return definition(q, k, v, scale, options["causal"], window, 0.0)[0].to(q.dtype)

    def dense(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
        return torch.stack([attend(*x, options) for x in zip(q, k, v, strict=True)])

    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: Any, **options: Any) -> Tensor:
        parts = (x.split(starts.diff().tolist()) for x in (q, k, v))
        return torch.cat([attend(*x, options) for x in zip(*parts, strict=True)])

    module: Any = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
    return module


def test_a_training_loop_switched_by_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the program changes; losses and trained parameters do not."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_by_its_definition())
    package = "flashattn_triton.integrations.flash_attn"
    switched = TRAINING_LOOP.replace("from flash_attn import", f"from {package} import")
    results = []
    for program in (TRAINING_LOOP, switched):
        namespace: dict[str, Any] = {}
        exec(program, namespace)  # a file of the user's
        results.append(namespace["train"](DEVICE))
    assert namespace["flash_attn_func"] is flash_attn_func
    (expected, theirs), (losses, ours) = results
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---- packed tensors and padding ------------------------------------------------------------------


def test_packed_tensors_are_views() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16, device=DEVICE, requires_grad=True)
    q, k, v = qkv.unbind(2)
    options: dict[str, Any] = {"window_size": (3, 0), "deterministic": True}
    expected = flash_attn_func(q, k, v, 0.0, None, True, **options)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, None, True, **options)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, (qkv,), weight)
    (wanted,) = torch.autograd.grad(expected, (qkv,), weight)
    assert torch.equal(gradient, wanted)
    queries = torch.randn(2, 5, 8, 16, device=DEVICE)
    grouped = flash_attn.flash_attn_kvpacked_func(queries, qkv[:, :, 1:], causal=True)
    assert torch.equal(grouped, flash_attn_func(queries, k, v, causal=True))


def test_packed_tensors_of_packed_sequences() -> None:
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(9, 3, 4, 16, device=DEVICE)
    q, k, v = qkv.unbind(1)
    expected = flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True)
    for length in (5, None):
        out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, length, causal=True)
        assert torch.equal(out, expected)
    out = flash_attn.flash_attn_varlen_kvpacked_func(
        q, qkv[:, 1:], starts, starts, 5, 5, causal=True
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("flash_attn_qkvpacked_func", (2, 9, 2, 4, 16), r"qkv must be .*, 3, heads, head_dim\)"),
        ("flash_attn_varlen_qkvpacked_func", (2, 9, 3, 4, 16), r"qkv must be a tensor \(tokens, 3"),
    ],
)
def test_packed_tensors_of_another_shape_are_named(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    rest = (torch.tensor([0, 2], dtype=torch.int32),) if "varlen" in name else ()
    with pytest.raises(ValueError, match=message):
        getattr(flash_attn, name)(torch.randn(shape), *rest)


def test_padding_is_taken_off_and_put_back() -> None:
    hidden = torch.randn(3, 5, 2, 4, device=DEVICE, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]], device=DEVICE)
    tokens, indices, starts, longest, used = flash_attn.unpad_input(hidden, mask)
    assert torch.equal(tokens, hidden[mask.bool()])
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 3, 3, 7]
    assert longest == 4
    assert used.tolist() == [3, 0, 4]
    back = flash_attn.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, hidden * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back.sum(), (hidden,))
    assert torch.equal(gradient, mask[..., None, None].expand_as(hidden).to(gradient.dtype))


def test_tokens_that_belong_to_no_sequence_are_kept_and_not_counted() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    tokens, _, starts, longest, used = flash_attn.unpad_input(torch.randn(2, 4, 8), mask, unused)
    assert tokens.shape == (4, 8)
    assert starts.tolist() == [0, 3, 4]
    assert (longest, used.tolist()) == (3, [2, 1])


def test_a_mask_counts_tokens_whatever_numbers_it_holds_and_must_fit() -> None:
    hidden, numbers = torch.randn(2, 4, 8), torch.tensor([[1, 1, 2, 0], [3, 0, 0, 0]])
    tokens, _, starts, longest, used = flash_attn.unpad_input(hidden, numbers)
    assert (len(tokens), starts.tolist()) == (4, [0, 3, 4])
    assert (longest, used.tolist()) == (3, [3, 1])
    with pytest.raises(ValueError, match=r"attention_mask must be of shape \(2, 4\), .* \(2, 3\)"):
        flash_attn.unpad_input(hidden, numbers[:, :3])
    unused = torch.tensor([[-1, 0, 0, 4], [0, 0, 0, 0]])
    _, _, starts, _, used = flash_attn.unpad_input(hidden, numbers, unused)
    assert (starts.tolist(), used.tolist()) == ([0, 4, 5], [3, 1])
    with pytest.raises(ValueError, match=r"unused_mask must be of shape \(2, 4\), .* \(1, 4\)"):
        flash_attn.unpad_input(hidden, numbers, unused[:1])


def test_other_names_of_flash_attn_say_what_to_write() -> None:
    with pytest.raises(ImportError, match=r"index the tensor: x\[indices\]"):
        from flashattn_triton.integrations.flash_attn import index_first_axis  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'flash_atn_func'"):
        _ = flash_attn.flash_atn_func
