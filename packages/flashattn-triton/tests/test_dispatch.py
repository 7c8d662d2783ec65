"""Which implementation and which tiles run, and what is said about it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from flashattn_triton import Plan, Tiles, Tiling, choose, explain, flash_attention
from flashattn_triton.configs import FORWARD_WITH_BIAS, SMALLEST, TABLE, tiling_for
from flashattn_triton.dispatch import GPU, check_tiling
from flashattn_triton.problem import new_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILING = Tiling(
    forward=Tiles(16, 32, 4, 2),
    key_pass=Tiles(32, 16, 4, 1),
    query_pass=Tiles(32, 32, 4, 1),
    fused=Tiles(16, 64, 8, 2),
    tma_reduce=True,
)


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 40, 16, device=device, dtype=dtype) for _ in range(3)]


def plan(device: str = "cpu", **keywords: object) -> Plan:
    return choose(*inputs(device), new_problem(head_dim=16, **keywords))


def test_cpu_tensors_take_the_tiled_tier() -> None:
    assert plan().tier == "tiled"
    assert plan().tiling is None
    assert "cpu" in plan().reason


@pytest.mark.parametrize("name", ["tiled", "reference"])
def test_a_name_insists(name: str) -> None:
    assert plan(implementation=name).tier == name


def test_triton_on_request() -> None:
    chosen = plan(DEVICE, implementation="triton")
    assert chosen.tier == "triton"
    assert chosen.tiling is not None


@pytest.mark.gpu
def test_cuda_tensors_take_triton() -> None:
    assert plan("cuda").tier == "triton"


def test_unknown_implementation_lists_the_known() -> None:
    q, k, v = inputs()
    for call in (flash_attention, explain):
        with pytest.raises(ValueError, match="hopper, reference, but got 'cutlass'"):
            call(q, k, v, implementation="cutlass")


def test_triton_needs_cuda_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashattn_triton import dispatch

    monkeypatch.setattr(dispatch, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="'triton' must have CUDA tensors, but got cpu"):
        plan(implementation="triton")


def test_explicit_tiling_is_used_and_explained() -> None:
    assert plan(DEVICE, implementation="triton", tiling=TILING).tiling == TILING
    text = explain(*inputs(DEVICE), implementation="triton", tiling=TILING)
    assert "16 queries x 32 keys, 4 warps, 2 stages" in text
    assert "TMA reduction" in text
    assert "16 queries x 64 keys, 8 warps" in text


def test_deterministic_means_two_passes() -> None:
    text = explain(*inputs(DEVICE), implementation="triton", tiling=TILING, deterministic=True)
    assert "fused" not in text
    assert "backward, keys (dK, dV): 32 queries x 16 keys" in text
    assert "backward, queries (dQ): 32 queries x 32 keys" in text


def test_explain_takes_every_argument_of_attention() -> None:
    every = {"causal": True, "window": (3, 2), "softcap": 2.0, "scale": 0.1, "deterministic": True}
    assert explain(*inputs(), **every, tiling=None, implementation="tiled", layout="bhsd")
    ids = torch.zeros(1, 40, dtype=torch.int64)
    text = explain(*inputs(), causal=True)
    assert explain(*inputs(), causal=True, document_ids=ids, return_lse=True) == text
    with pytest.raises(ValueError, match="bias must be None where document_ids are given"):
        explain(*inputs(), document_ids=ids, bias=torch.zeros(40, 40))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 4, 8, 16), (2, 2, 8, 8), (2, 2, 8, 16)), {}, "key must have query's head_dim 16"),
        (((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 9, 16)), {}, "key's sequence length 8, but got 9"),
        (((2, 4, 8, 16), (3, 2, 8, 16), (3, 2, 8, 16)), {}, "key must have query's batch size 2"),
        (((2, 8, 4, 16), (2, 8, 3, 16), (2, 8, 3, 16)), {"layout": "bshd"}, "but got 4 and 3"),
        (((2, 4, 8, 16),) * 3, {"return_lse": 1}, "return_lse must be True or False, but got 1"),
        (
            ((2, 4, 8, 16),) * 3,
            {"key_lengths": torch.tensor([1, 2]), "bias": torch.zeros(8, 8)},
            "bias must be None where key_lengths are given",
        ),
    ],
)
def test_explain_refuses_as_attention_does(shapes: Any, options: Any, message: str) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    for call in (flash_attention, explain):
        with pytest.raises(ValueError, match=message):
            call(*tensors, **options)


def test_explain_knows_autocast() -> None:
    wide = [torch.zeros(1, 2, 8, 300, device=DEVICE)] * 3  # in fp32 wider than the kernels
    with pytest.raises(ValueError, match="at most 256 for Triton's kernels"):
        explain(*wide, implementation="triton")
    with torch.autocast(DEVICE, torch.bfloat16):
        assert "tier: triton" in explain(*wide, implementation="triton")


def test_explain_names_the_tier() -> None:
    assert explain(*inputs(), causal=True).startswith("tier: tiled")


def test_a_problem_is_the_same_in_another_process() -> None:
    """Strings have other hashes there, so that a copied hash would make it another key."""
    problem = new_problem(head_dim=16, causal=True, tiling=TILING)
    hash(problem)
    for x in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        assert x == problem
        assert vars(x).keys() == {x.name for x in fields(problem)}
        assert hash(x) == hash(problem)


def test_packing_a_tiling_loses_nothing() -> None:
    assert Tiling.unpack(TILING.pack()) == TILING
    for tiling in TABLE.values():
        assert Tiling.unpack(tiling.pack()) == tiling


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("kilobytes", [48, 64, 99, 163, 227, 512])
def test_the_table_covers_everything(kilobytes: int, head_dim: int, dtype: torch.dtype) -> None:
    tiling = tiling_for(kilobytes * 1024, head_dim, dtype)
    assert (tiling == SMALLEST) == (kilobytes < 96)
    if dtype is not torch.float32:
        wide = [tiling_for(kilobytes * 1024, width, dtype) for width in (257, 512, 513, 576)]
        assert wide[0] == wide[1]
        assert wide[2] == wide[3]


def test_half_types_share_their_tiles() -> None:
    bf16 = tiling_for(232448, 64, torch.bfloat16)
    assert bf16 == tiling_for(232448, 64, torch.float16)


def test_a_bias_changes_tiles_of_the_forward_pass_where_they_were_measured() -> None:
    for kilobytes, width, itemsize in TABLE:
        dtype = torch.bfloat16 if itemsize == 2 else torch.float32
        plain, biased = (tiling_for(kilobytes * 1024, width, dtype, bias=b) for b in (False, True))
        assert replace(biased, forward=plain.forward) == plain
        assert (biased != plain) == ((kilobytes, width, itemsize) in FORWARD_WITH_BIAS)


def test_explicit_tiling_gives_the_same_result() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(DEVICE))
    expected = flash_attention(q, k, v, implementation="reference")
    small = Tiling(
        forward=Tiles(16, 16, 4, 1), key_pass=Tiles(16, 16, 4, 1), query_pass=Tiles(16, 16, 4, 1)
    )
    actual = flash_attention(q, k, v, implementation="triton", tiling=small)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(
        torch.autograd.grad(actual.sum(), (q, k, v)),
        torch.autograd.grad(expected.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def gpu(capability: tuple[int, int], kilobytes: int) -> GPU:
    return GPU(name=f"sm_{capability[0]}0", capability=capability, shared_memory=kilobytes * 1024)


@pytest.mark.parametrize(("key", "tiling"), TABLE.items(), ids=str)
def test_shipped_tiles_respect_warp_groups(key: tuple[int, int, int], tiling: Tiling) -> None:
    kilobytes, _, itemsize = key
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    if kilobytes >= 220:
        check_tiling(tiling, gpu((9, 0), kilobytes), dtype)
    check_tiling(tiling, gpu((8, 0), kilobytes), dtype)


def test_wrongly_compiled_tilings_are_refused() -> None:
    small = Tiles(64, 64, 4, 2)
    repeated = Tiling(forward=Tiles(64, 64, 8, 2), key_pass=small, query_pass=small)
    with pytest.raises(ValueError, match=r"tiling\.forward must have at least 16 rows per warp"):
        check_tiling(repeated, gpu((9, 0), 227), torch.bfloat16)
    split = Tiling(forward=Tiles(32, 64, 4, 2), key_pass=small, query_pass=small)
    with pytest.raises(
        ValueError, match=r"tiling\.key_pass must have fewer than 64 rows for float32"
    ):
        check_tiling(split, gpu((9, 0), 227), torch.float32)
    check_tiling(split, gpu((9, 0), 227), torch.bfloat16)
