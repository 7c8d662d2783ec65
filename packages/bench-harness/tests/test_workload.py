import subprocess
import sys

import pytest
import torch
from torch import nn

from basics_model import ModelConfig
from bench_harness.core import CaseSkipped
from bench_harness.training.adapters import Parameters, make_optimizer
from bench_harness.training.constructors import Call
from bench_harness.user_code import imported_module, parse_inputs, scalar_loss
from bench_harness.workload import (
    Workload,
    attention_by_name,
    device_of,
    language_model,
    language_model_config,
    precision_context,
    shape_row,
)

CPU = torch.device("cpu")
TINY = {
    "size": "custom",
    "d_model": 16,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 40,
    "batch": 2,
    "sequence": 8,
}


def test_named_sizes_and_overrides():
    xl = language_model_config({"size": "xl", "sequence": 128})
    assert shape_row(xl)["parameters"] == 1_998_235_200
    shallow = language_model_config({"size": "xl", "sequence": 128, "num_layers": 2})
    assert (shallow.num_layers, shallow.d_model) == (2, 1600)


def test_dimensions_are_known_without_torch():
    """Of named and of custom sizes: for what a case takes, and whether its dimensions fit."""
    program = (
        "import sys\n"
        "from bench_harness.workload import billions, blocks\n"
        "sizes = ('xl', 'small')\n"
        "print([billions({'size': size, 'sequence': 1}) for size in sizes])\n"
        f"print(1e9 * billions({TINY}), blocks({TINY}), billions({{'model': 'a:b'}}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    own = language_model_config(TINY)
    assert isinstance(own, ModelConfig)
    assert done.stdout == f"[1.9982352, 0.128625408]\n{float(own.num_parameters)} 1 0.0\n"


def test_the_batch_depends_on_its_seed_and_the_parameters_on_theirs():
    first = language_model(TINY, CPU, precision="fp32")
    other = language_model(TINY, CPU, precision="fp32", batch_seed=1)
    assert not torch.equal(first.args[0], other.args[0])
    for a, b in zip(first.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.parameters() == first.model_config.num_parameters


@pytest.mark.parametrize("name", ["naive", "sdpa", "flash"])
def test_attentions_agree(name):
    workload = language_model(TINY, CPU, precision="fp32", attention=attention_by_name(name))
    reference = language_model(TINY, CPU, precision="fp32")
    torch.testing.assert_close(workload.loss(), reference.loss())


def test_bf16_runs_products_in_bf16_and_keeps_gradients_in_fp32():
    workload = language_model(TINY, CPU, precision="bf16")
    with precision_context("bf16", CPU):
        assert workload.module(*workload.args).dtype == torch.bfloat16
    workload.loss().backward()
    assert all(p.grad.dtype == torch.float32 for p in workload.module.parameters())


def test_precision_is_restored():
    before = torch.get_float32_matmul_precision()
    with precision_context("fp32", CPU):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "high"), ("fp32", "highest")])
def test_backward_runs_in_the_workload_s_precision_too(precision, expected):
    seen = []
    before = torch.get_float32_matmul_precision()
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(torch.get_float32_matmul_precision()))
    workload = Workload(nn.Identity(), precision, CPU, loss_of=torch.sum, args=(leaf,))
    workload.backward((leaf * 2).sum())
    assert seen == [expected]
    assert torch.get_float32_matmul_precision() == before


def test_precisions_that_cannot_be():
    with (
        pytest.raises(CaseSkipped, match="other than tf32"),
        precision_context("tf32", CPU),
    ):
        pass
    unknown = pytest.raises(ValueError, match="fp32, tf32, bf16, but got 'fp8'")
    with unknown, precision_context("fp8", CPU):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of a missing GPU")
def test_a_missing_gpu_skips_the_case():
    with pytest.raises(CaseSkipped, match="CUDA"):
        device_of("cuda")


def test_inputs_are_made_from_their_specification():
    args, kwargs = parse_inputs("float32[4x3], ids=int64[2x5]<7", CPU)
    assert args[0].shape == (4, 3)
    assert kwargs["ids"].dtype == torch.int64
    assert kwargs["ids"].max() < 7


@pytest.mark.parametrize("spec", ["", "float32", "float99[4]", "int64[4x]", "ids=int64[3]<"])
def test_inputs_that_do_not_parse_are_quoted(spec):
    with pytest.raises(ValueError, match="an input must look like"):
        parse_inputs(spec, CPU)


def test_a_module_s_length_does_not_decide_what_is_called():
    """A compiled module has a length that raises where the module itself has none."""

    class Wrapper(torch.nn.Module):
        def __len__(self):
            raise TypeError("no length")

        def forward(self, x):
            return 2 * x

    def loss_of(output):
        return output.sum()

    own = torch.nn.Identity()
    workload = Workload(own, "fp32", torch.device("cpu"), loss_of, args=(torch.ones(3),))
    assert workload.loss().item() == 3
    assert workload.loss(Wrapper()).item() == 6


def test_any_module_is_a_workload():
    workload = imported_module({"model": "torch.nn:Identity", "input": "float32[4x3]"}, CPU, "fp32")
    assert workload.loss().shape == ()
    assert workload.model_config is None


@pytest.mark.parametrize("factory", ["no.such:Model", "torch.nn:NoSuch", "torch.nn", ":x"])
def test_a_factory_that_does_not_exist_is_quoted(factory):
    with pytest.raises(ValueError, match=r"package\.module:name"):
        imported_module({"model": factory, "input": "float32[1]"}, CPU, "fp32")


def test_a_factory_must_make_a_module():
    with pytest.raises(ValueError, match=r"returns a torch\.nn\.Module"):
        imported_module({"model": "collections:OrderedDict", "input": "float32[1]"}, CPU, "fp32")


def test_a_loss_is_found_in_every_usual_output():
    class Output:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    tensor = torch.tensor([1.0, 3.0])
    assert scalar_loss(Output(loss=torch.tensor(5.0))) == 5
    assert scalar_loss(Output(loss=None, logits=tensor)) == 2
    assert scalar_loss((tensor, "cache")) == 2
    with pytest.raises(ValueError, match="loss must be computed from a tensor"):
        scalar_loss("text")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_step(name):
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    optimizer = make_optimizer(Call(name), Parameters(module=layer, device=CPU))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
