"""The Hopper tier on heads wider than 128."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashattn_triton import explain, flash_attention, flash_attention_varlen, triton_versions

pytestmark = pytest.mark.gpu

#: Of query and key, and of value: tiles that are full, and such that the TMA fills up.
HEAD_DIMS = [(256, 256), (192, 128), (136, 136), (136, 72), (184, 40), (72, 200), (248, 128)]
SHIPPED = [(256, 256), (192, 128)]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where there is no such GPU; outputs are full of NaN beforehand."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    empty = torch.Tensor.new_empty_strided

    def poisoned(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return empty(self, *arguments, **keywords).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned)


def attend(case: Any) -> Any:
    """Output and logsumexp by the Hopper tier."""
    return lambda *tensors: flash_attention(
        *tensors, **case.keywords, return_lse=True, implementation="hopper"
    )


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_head_dims(
    head_dims: tuple[int, int],
    causal: str,
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    """What lies past the last column, in the inputs' memory, is NaN."""
    case = dense_case(2, (4, 2), 300, 411, head_dims, "fp16", causal=causal)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda", "padded"))


@pytest.mark.parametrize("head_dims", SHIPPED, ids=str)
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize(
    ("heads", "n_queries", "n_keys"),
    [
        ((5, 5), 1, 4096),
        ((2, 1), 4096, 1),
        ((3, 3), 1000, 300),  # bottom-right: whole tiles of queries see no key
        ((2, 2), 129, 128),
        ((70, 10), 1100, 700),  # many tiles for each program, which reuse the place of Q
    ],
    ids=str,
)
def test_heads_and_lengths(
    heads: tuple[int, int],
    n_queries: int,
    n_keys: int,
    head_dims: tuple[int, int],
    causal: str,
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    case = dense_case(2, heads, n_queries, n_keys, head_dims, "bf16", causal=causal)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


@pytest.mark.parametrize("head_dims", SHIPPED, ids=str)
@pytest.mark.parametrize("lengths", [(700, 700), (1000, 300), (129, 64), (1, 500)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, None)},
        {"window": (200, 130)},
        {"window": (0, 0)},
        {"window": (63, None), "causal": "bottom-right"},
        {"scale": -0.2, "causal": "top-left"},
    ],
    ids=str,
)
def test_windows_and_scales(
    options: dict[str, Any],
    lengths: tuple[int, int],
    head_dims: tuple[int, int],
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    case = dense_case(2, (4, 2), *lengths, head_dims, "bf16", **options)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


@pytest.mark.parametrize("head_dims", [*SHIPPED, (168, 96)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom-right"}, {"window": (60, 30)}], ids=str)
def test_packed_sequences(
    options: dict[str, Any],
    head_dims: tuple[int, int],
    packed_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    sequences = ((1, 1), (300, 411), (0, 70), (129, 128), (65, 0), (700, 500))
    case = packed_case((4, 2), sequences, head_dims, "bf16", **options)
    cu_q, cu_k = case.cu_seqlens("cuda")

    longest = [max(lengths) for lengths in zip(*sequences, strict=True)]

    def attend_packed(*tensors: Any) -> Any:
        return flash_attention_varlen(
            *tensors, cu_q, cu_k, *longest,
            **case.keywords, return_lse=True, implementation="hopper",
        )  # fmt: skip

    assert_close_to_oracle(attend_packed, make_inputs(case, "cuda"))


@pytest.mark.parametrize("head_dims", SHIPPED, ids=str)
def test_repetitions_are_bit_identical(head_dims: tuple[int, int]) -> None:
    d, e = head_dims
    q, k, v = (torch.randn(2, 16, 2000, x, device="cuda").bfloat16() for x in (d, d, e))
    first = flash_attention(q, k, v, causal=True, implementation="hopper")
    for _ in range(20):
        again = flash_attention(q, k, v, causal=True, implementation="hopper")
        assert torch.equal(again, first)


BACKWARD = [(192, 128), (160, 128), (144, 96), (136, 40), (256, 256), (200, 72), (72, 248)]


@pytest.mark.parametrize("head_dims", BACKWARD, ids=str)
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize(
    ("heads", "n_queries", "n_keys"),
    [
        ((2, 2), 64, 128),
        ((2, 2), 256, 256),
        ((4, 2), 300, 411),
        ((6, 1), 333, 1000),  # top-left: whole tiles of keys that no query sees
        ((5, 5), 1, 4096),
        ((2, 1), 4096, 1),
        ((3, 3), 1000, 300),  # bottom-right: whole tiles of queries see no key
        ((32, 8), 500, 500),
    ],
    ids=str,
)
def test_gradients(
    heads: tuple[int, int],
    n_queries: int,
    n_keys: int,
    causal: str,
    head_dims: tuple[int, int],
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    dtype, layout = ("fp16", "padded") if n_queries == 300 else ("bf16", "bhsd")
    case = dense_case(2, heads, n_queries, n_keys, head_dims, dtype, causal=causal)
    inputs = make_inputs(case, "cuda", layout)
    text = explain(
        *(x.detach() for x in (inputs.query, inputs.key, inputs.value)),
        **case.keywords,
        implementation="hopper",
    )
    if head_dims[0] <= 192 and head_dims[1] <= 128:
        assert "backward, fused (dQ by fp32 addition): 64 queries x 128 keys, 2 consumers" in text
    else:
        assert "backward, keys (dK, dV): 64 queries x 64 keys, 2 consumers" in text
        assert "backward, queries (dQ): 128 queries x 64 keys, 2 consumers" in text
    assert_close_to_oracle(attend(case), inputs)


@pytest.mark.timeout(120, method="thread")  # ends the process even if a kernel never does
@pytest.mark.parametrize("head_dims", SHIPPED, ids=str)
@pytest.mark.parametrize("lengths", [(2000, 2000), (500, 1300), (1300, 500)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": "top-left"}, {"causal": "top-left", "window": (300, None)}],
    ids=str,
)
def test_deterministic_gradients(
    options: dict[str, Any], lengths: tuple[int, int], head_dims: tuple[int, int]
) -> None:
    """Bit-identical when repeated; more programs than run at a time, grouped heads."""
    (n_queries, n_keys), (d, e) = lengths, head_dims
    shapes = [(4, 8, n_queries, d), (4, 4, n_keys, d), (4, 4, n_keys, e)]
    leaves = [torch.randn(x, device="cuda").bfloat16().requires_grad_() for x in shapes]
    do = torch.randn(4, 8, n_queries, e, device="cuda").bfloat16()

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        out = flash_attention(
            *leaves, **options, deterministic=deterministic, implementation="hopper"
        )
        return torch.autograd.grad(out, leaves, do)

    first = gradients(deterministic=True)
    for _ in range(100):
        again = gradients(deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    for a, b in zip(gradients(deterministic=False), first, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, None)},
        {"deterministic": True},
        {"window": (20, None), "deterministic": True},
        {"softcap": 10.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_auto_takes_its_gradients(head_dim: int, options: dict[str, Any]) -> None:
    q = torch.empty(1, 2, 64, head_dim, device="cuda", dtype=torch.bfloat16)
    v = q[..., :128].contiguous() if head_dim == 192 else q
    kind = "fused" if head_dim == 192 else "keys"
    assert "2 consumers" in explain(q, q, v, **options).partition(f"backward, {kind}")[2]
