"""A library's kernels for the elementwise layers of the language model, beside torch's."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from basics_model import TransformerLM, model_config
from bench_harness.core import CaseSkipped
from bench_harness.training import elementwise
from bench_harness.training import settings as of
from bench_harness.training.build import training

CONFIG = {"size": "custom", "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 2}
CONFIG |= {"vocab_size": 64, "batch": 2, "sequence": 13}


def norm(x, weight, eps):
    """What Liger's norm computes, with its arguments."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu_times(gate, up):
    """What Liger's SwiGLU computes of both products."""
    return F.silu(gate) * up


def rotate(query, key, table):
    """What Liger's rotary positions compute: (batch, seq, heads, head_dim) times e^(i·angle)."""
    turn = torch.view_as_complex(table.unflatten(-1, (-1, 2)))[:, None]
    return tuple(
        torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        for each in (query, key)
    )


@pytest.fixture
def library(monkeypatch):
    """The package as its documentation describes it, in torch, so that a CPU can run it."""
    classes = {
        "llama4_rope": ("LigerLlama4RopeFunction", rotate),
        "rms_norm": ("LigerRMSNormFunction", norm),
        "swiglu": ("LigerSiLUMulFunction", silu_times),
    }
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ModuleType("liger_kernel.ops"))
    for name, (function, apply) in classes.items():
        module = ModuleType(f"liger_kernel.ops.{name}")
        setattr(module, function, type(function, (), {"apply": staticmethod(apply)}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    elementwise._functions.cache_clear()
    yield
    elementwise._functions.cache_clear()


def trained(device: str, precision: str, **setting: str) -> tuple[torch.Tensor, dict]:
    variant = of.read({"wrapper": "none", **setting}, {"precision": precision})
    with training(variant, CONFIG, torch.device(device)) as made:
        loss = made.forward()
        made.backward(loss)
        named = made.workload.module.named_parameters()
        return loss.detach(), {name: param.grad.clone() for name, param in named}


@pytest.mark.usefixtures("library")
def test_the_layers_call_the_library_with_what_it_wants() -> None:
    loss, gradients = trained("cpu", "fp32", elementwise="liger")
    expected_loss, expected = trained("cpu", "fp32")
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.gpu
def test_the_library_trains_like_torch() -> None:
    pytest.importorskip("liger_kernel", reason="needs bench-harness[liger]")
    loss, gradients = trained("cuda", "fp32", elementwise="liger")
    expected_loss, expected = trained("cuda", "fp32")
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)


def test_without_a_gpu_the_variant_is_skipped() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(CaseSkipped, match="elementwise must be torch without a CUDA device"):
        trained("cpu", "fp32", elementwise="liger")


@pytest.mark.usefixtures("library")
def test_without_the_package_the_variant_is_skipped(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.swiglu", None)
    with pytest.raises(CaseSkipped, match=r"Install bench-harness\[liger\]"):
        trained("cpu", "fp32", elementwise="liger")


@pytest.mark.usefixtures("library")
def test_other_models_have_no_such_layers() -> None:
    with pytest.raises(ValueError, match="but got liger for Linear"):
        elementwise.use_liger(torch.nn.Linear(2, 2))
    model = TransformerLM(model_config("small"), device="meta")
    elementwise.use_liger(model)
    norms = [each for each in model.modules() if isinstance(each, torch.nn.Module)]
    assert {type(each).__name__ for each in norms} >= {"_LigerNorm", "_LigerSwiGLU"}


@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_layers_are_refused(compiled: str) -> None:
    with pytest.raises(ValueError, match=f"but got liger beside compile={compiled}"):
        of.read({"elementwise": "liger", "compile": compiled}, {})


def test_the_label_names_the_library() -> None:
    variants = [of.read({"elementwise": each}, {}) for each in ("torch", "liger")]
    assert of.labels(variants) == ["no communication", "no communication, elementwise=liger"]
