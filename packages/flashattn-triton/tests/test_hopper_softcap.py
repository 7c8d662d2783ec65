"""The Hopper tier with a soft-cap, for which it has no backward kernel up to head_dim 64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashattn_triton import explain, flash_attention, flash_attention_varlen, triton_versions

pytestmark = pytest.mark.gpu


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
    """Output and logsumexp by the Hopper tier, and gradients where it has them."""
    return lambda *tensors: flash_attention(
        *tensors, **case.keywords, return_lse=True, implementation="hopper"
    )


@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"softcap": 15.0, "causal": "top-left"},
        {"softcap": 1e6, "causal": "top-left"},  # close to none: tanh by its series
        {"softcap": 3.0, "causal": "bottom-right", "scale": -0.5},
        {"softcap": 0.2, "window": (1100, 130)},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(300, 411), (1300, 1200), (129, 64)], ids=str)
def test_options(
    lengths: tuple[int, int],
    options: dict[str, Any],
    head_dims: tuple[int, int],
    dense_case: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    case = dense_case(2, (4, 2), *lengths, head_dims, "bf16", **options)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


def test_packed_sequences(packed_case: Any, make_inputs: Any, assert_close_to_oracle: Any) -> None:
    sequences = ((1, 1), (300, 411), (0, 70), (129, 128), (65, 0))
    case = packed_case((4, 2), sequences, (64, 64), "bf16", causal="bottom-right", softcap=5.0)
    cu_q, cu_k = case.cu_seqlens("cuda")

    def attend_packed(*tensors: Any) -> Any:
        return flash_attention_varlen(
            *tensors, cu_q, cu_k, 300, 411,
            **case.keywords, return_lse=True, implementation="hopper",
        )  # fmt: skip

    assert_close_to_oracle(attend_packed, make_inputs(case, "cuda"))


def test_auto_takes_it_above_head_dim_64() -> None:
    q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    assert explain(q, q, q, softcap=10.0).startswith("tier: triton")
    text = explain(q, q, q, softcap=10.0, implementation="hopper")
    assert text.startswith("tier: hopper")
    assert "fused" not in text
    q = torch.empty(1, 2, 64, 96, device="cuda", dtype=torch.bfloat16)
    text = explain(q, q, q, softcap=10.0)
    assert text.startswith("tier: hopper")
    assert "fused" in text
