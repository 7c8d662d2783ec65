"""AdamW with moments in bfloat16: its arithmetic, its rounding, and its state in shards."""

import copy
import inspect
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from fully_sharded_models import loss_of, net
from ranks import run_ranks
from shard_optim import (
    AdamW,
    FullyShardedDataParallel,
    ShardedOptimizer,
    adamw,
    full_state,
    load,
    load_full_state,
    optimizer_class,
    save,
)

BF16, FP32 = torch.bfloat16, torch.float32
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def kernel(monkeypatch):
    """Has the kernel update tensors on the CPU, too; holds how many tensors each launch got."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter must be chosen before any kernel is imported")
    module = pytest.importorskip("shard_optim.adamw_kernel", reason="needs Triton")
    launched, launches = [], module.launches

    def counted(entries):
        for several, aligned in launches(entries):
            launched.append(len(several))
            yield several, aligned

    monkeypatch.setattr(module, "launches", counted)
    monkeypatch.setattr(adamw, "_has_kernel", lambda param: param.numel() > 0)
    return launched


def parameters(seed=0, numels=(33, 5000, 1, 0, *[160] * 18)):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(numel)) for numel in numels]
    return [*params, nn.Parameter(torch.randn(64, 48).t())]


def train(params, optimizer, steps, dtype=FP32):
    for step in steps:
        torch.manual_seed(100 + step)
        for param in params:
            param.grad_dtype = dtype
            param.grad = torch.randn(param.shape).mul(0.01).to(dtype)
        optimizer.step()


def assert_same(optimizer, expected):
    lists = (each.param_groups[0]["params"] for each in (optimizer, expected))
    for ours, theirs in zip(*lists, strict=True):
        assert torch.equal(ours, theirs)
        for key, value in expected.state[theirs].items():
            own = optimizer.state[ours][key]
            assert own.dtype == value.dtype
            assert own.stride() == value.stride()
            assert torch.equal(own, value), key


# --- arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"betas": (0.0, 0.0)}, {"weight_decay": 0.5, "eps": 1e-3}, {"lr": torch.tensor(0.02)}],
    ids=str,
)
def test_the_first_step_is_torchs(settings):
    """Moments are rounded after they are used."""
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.02} | settings
    train(ours, AdamW(ours, **settings), range(1))
    train(theirs, torch.optim.AdamW(theirs, **{"weight_decay": 0.01} | settings), range(1))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def reference(param, grad, state, step, *, lr, betas, eps, weight_decay):
    """One step in fp64: the parameter and both moments before they are rounded."""
    m, v, p, g = (x.double() for x in (*(state[key] for key in MOMENTS), param, grad))
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    root = (v / (1 - betas[1] ** step)).sqrt() + eps
    return p - lr * weight_decay * p - lr / (1 - betas[0] ** step) * m / root, m, v


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_each_step_follows_the_definition(by_kernel, dtype, request):
    launched = request.getfixturevalue("kernel") if by_kernel else []
    params = parameters()
    settings = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = AdamW(params, **settings)
    train(params, optimizer, range(1), dtype)
    for step in range(1, 4):
        before = [(p.detach().clone(), copy.deepcopy(optimizer.state[p])) for p in params]
        train(params, optimizer, [step], dtype)
        for param, (value, state) in zip(params, before, strict=True):
            exact = reference(value, param.grad, state, step + 1, **settings)
            torch.testing.assert_close(param.double(), exact[0], rtol=1e-6, atol=1e-6)
            for key, moment in zip(MOMENTS, exact[1:], strict=True):
                own = optimizer.state[param][key]
                assert own.dtype == BF16
                # It is rounded to one of two neighbours.
                torch.testing.assert_close(own.double(), moment, rtol=2**-7, atol=1e-9)
    # Three tensors in launches of their own, 16 in one, three and an empty entry in another.
    assert launched == ([1, 1, 1, 16, 4] * 4 if by_kernel else [])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_kernel_rounds_as_torchs_operations_do(dtype, request):
    params, others = parameters(), parameters()
    optimizer, expected = AdamW(params, lr=torch.tensor(0.02)), AdamW(others, lr=0.02)
    train(others, expected, range(3), dtype)
    request.getfixturevalue("kernel")
    train(params, optimizer, range(3), dtype)
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for key in MOMENTS:
            assert torch.equal(optimizer.state[a][key], expected.state[b][key]), key
    assert optimizer.state[a]["step"] == 3


def test_a_parameter_in_parts_is_rounded_alike():
    whole = nn.Parameter(torch.randn(5000))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([1000, 4000])]
    expected, optimizer = AdamW([whole], lr=0.1), AdamW(parts, lr=0.1)
    for _ in range(3):
        whole.grad = torch.randn(5000)
        for part, grad in zip(parts, whole.grad.split([1000, 4000]), strict=True):
            part.grad = grad
        for each in (expected, optimizer):
            each.step()
    for key in MOMENTS:
        joined = torch.cat([optimizer.state[part][key] for part in parts])
        assert torch.equal(joined, expected.state[whole][key])
    assert torch.equal(torch.cat(parts), whole)


# --- rounding --------------------------------------------------------------------------------


def test_moments_follow_a_gradient_that_rounding_to_nearest_would_lose():
    param = nn.Parameter(torch.zeros(512))
    # Beginning at 1.04 of the limit, a step is less than half of a last place.
    optimizer = AdamW([param], lr=0.0, betas=(0.99, 0.999))
    param.grad = 0.3 + 1e-3 * torch.rand(512)
    optimizer.step()
    state = optimizer.state[param]
    state["exp_avg"].copy_(1.04 * param.grad)
    state["exp_avg_sq"].copy_(1.04 * param.grad.square())
    nearest = state["exp_avg_sq"].clone()
    for _ in range(2000):
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001 * param.grad.square()).to(BF16)
    first, second = (state[key].double().mean().item() for key in MOMENTS)
    assert abs(first / param.grad.double().mean().item() - 1) < 0.003
    assert abs(second / param.grad.double().square().mean().item() - 1) < 0.01
    assert nearest.double().mean().item() / param.grad.double().square().mean().item() > 1.03


def test_moments_without_gradients_decay():
    param = nn.Parameter(torch.zeros(2048))
    optimizer = AdamW([param])
    param.grad = 1 + torch.rand(2048)
    optimizer.step()
    begin = optimizer.state[param]["exp_avg_sq"].double()
    param.grad = torch.zeros(2048)
    for _ in range(1000):
        optimizer.step()
    ratio = optimizer.state[param]["exp_avg_sq"].double() / begin
    assert abs(ratio.mean().item() / 0.999**1000 - 1) < 0.03


def test_rounding_is_to_neighbours_and_unbiased():
    torch.manual_seed(0)
    value = torch.cat([torch.randn(300), torch.tensor([1.0, -2.0, 0.0, -0.0, 3e-40])])
    noise = torch.arange(0, 2**16, 7, dtype=torch.int32)[:, None]
    found = adamw.rounded(value.expand(len(noise), -1), noise.expand(-1, len(value)))
    toward_zero = (value.view(torch.int32) & -0x10000).view(FP32)
    away = ((value.view(torch.int32) & -0x10000) + 0x10000).view(FP32)
    assert ((found == toward_zero) | (found == away)).all()
    torch.testing.assert_close(found.double().mean(0), value.double(), rtol=1e-6, atol=1e-42)
    exact = value.to(BF16).float() == value
    assert torch.equal(found[:, exact], value[exact].to(BF16).expand(len(noise), -1))


def test_infinities_and_nan_stay():
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF, -1]).int().view(FP32)])
    found = adamw.rounded(special, torch.full((5,), 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(found.float(), special, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter
@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_gradient_that_is_not_finite_shows(by_kernel, request):
    if by_kernel:
        request.getfixturevalue("kernel")
    param = nn.Parameter(torch.ones(32))
    optimizer = AdamW([param])
    param.grad = torch.ones(32)
    param.grad[3], param.grad[5] = float("nan"), float("inf")
    optimizer.step()
    state = optimizer.state[param]
    for tensor in (param, state["exp_avg"], state["exp_avg_sq"]):
        assert tensor.isnan().nonzero().flatten().tolist()[0] == 3
    assert state["exp_avg_sq"][5] == float("inf")
    assert param.isfinite().sum() == 30


def test_random_bits_are_uniform():
    """Of gradients in bfloat16 too, whose low bits are zeros, and of steps of one gradient."""
    torch.manual_seed(0)
    grads = torch.randn(10**6).mul(1e-3)
    many = torch.arange(1, 10**5, dtype=FP32)
    for bits in (
        adamw.random_bits(grads, torch.tensor(1.0)),
        adamw.random_bits(grads.to(BF16).float().unique(), torch.tensor(7.0)),
        *(adamw.random_bits(torch.full_like(many, g), many) for g in (0.0, 1.0, -3e-5)),
    ):
        for half in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
            counts = torch.bincount(half // 2**12, minlength=16).double()
            expected = len(bits) / 16
            assert (counts - expected).square().sum() / expected < 60  # 15 degrees of freedom
            assert abs(half.double().mean() / 2**16 - 0.5) < 1.5 / len(bits) ** 0.5


# --- state and refusals ----------------------------------------------------------------------


def test_a_loaded_state_goes_on_bit_for_bit():
    params, others = parameters(), parameters(seed=1)
    optimizer = AdamW(params, lr=0.1)
    train(params, optimizer, range(3))
    resumed = AdamW(others)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param)
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, resumed, copied):
        train(each.param_groups[0]["params"], each, range(3, 5))
    for each in (resumed, copied):
        assert_same(each, optimizer)


def test_moments_of_torchs_class_are_taken():
    params, others = parameters(), parameters()
    theirs, ours = torch.optim.AdamW(params), AdamW(others)
    train(params, theirs, range(2))
    ours.load_state_dict(theirs.state_dict())
    for param, other in zip(params, others, strict=True):
        for key in MOMENTS:
            assert torch.equal(ours.state[other][key], theirs.state[param][key].to(BF16))
    train(others, ours, range(2, 3))


def test_a_closure_has_gradients():
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (param < 1).all()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, r"lr must be at least 0, but got -1\.0"),
        ({"eps": float("nan")}, "eps must be at least 0, but got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas must be from 0 to below 1, but got \(0\.9, 1\.0\)"),
    ],
    ids=str,
)
def test_wrong_hyperparameters_are_named(settings, text):
    with pytest.raises(ValueError, match=text):
        AdamW(parameters(), **settings)


def test_parameters_in_16_bits_and_sparse_gradients_are_named():
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    param.grad = torch.ones_like(param)
    with pytest.raises(TypeError, match=r"must have fp32 parameters .* but got torch\.bfloat16"):
        AdamW([param]).step()
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"dense gradients, but got .* torch\.sparse_coo"):
        AdamW(embedding.parameters()).step()


def test_no_parameter_of_the_kernel_has_a_name_of_the_launcher():
    """Triton's generated launchers have local variables, which would take an argument's place."""
    kernel = pytest.importorskip("shard_optim.adamw_kernel", reason="needs Triton").adamw_kernel
    assert not {"params", "specialization", "options"} & set(
        inspect.signature(kernel.fn).parameters
    )


COMPILE = """
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddp_lite.peer.kernel import DTYPES
from shard_optim.adamw_kernel import _BLOCK, _NUM_WARPS, adamw_kernel


def accesses(capability, gradients):
    dtypes = {str(d): t for d, t in DTYPES.items()}
    chosen = {"lr_in_memory": True, "aligned": True, "block": _BLOCK}
    chosen |= {"gradients": dtypes["torch." + gradients]}
    signature, attributes, constants = {}, {}, {}
    for place, name in enumerate(adamw_kernel.arg_names):
        if name in chosen:
            signature[name], constants[place,] = "constexpr", chosen[name]
        elif place < 6:
            signature[name] = ("i32" if name == "numels" else "i64",) * 4
            attributes |= {(place, index): [["tt.divisibility", 16]] for index in range(4)}
        else:
            signature[name] = "i64" if name == "lr" else "fp32"
    compiled = triton.compile(
        ASTSource(adamw_kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": _NUM_WARPS, "enable_fp_fusion": False},
    )
    ptx = compiled.asm["ptx"]
    return re.findall(r"(?:ld|st)\\.(?:global|local)\\.(v\\d\\.b\\d+|[a-z]?\\d+)", ptx)


print(json.dumps([accesses(*case) for case in json.loads(sys.argv[1])]))
"""


def test_16_bytes_at_a_time(monkeypatch):
    """Compiled for GPUs that need not be there; step and lr are read apart."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wide = {(80, "float32"): 10, (90, "float32"): 10, (90, "bfloat16"): 9}
    command = [sys.executable, "-c", COMPILE, json.dumps(list(wide))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for (case, expected), found in zip(wide.items(), json.loads(done.stdout), strict=True):
        assert len([x for x in found if x in ("v4.b32", "v2.b64")]) == expected, case
        assert len(found) == expected + 2, (case, found)


# --- in shards -------------------------------------------------------------------------------


def test_the_trial_of_classes_lets_it_through(monkeypatch):
    compared = []
    record = lambda a, b: compared.append(torch.equal(a, b)) or True  # noqa: E731
    monkeypatch.setattr(optimizer_class, "_alike", record)
    settings = AdamW(parameters()).defaults
    optimizer_class.check_update(AdamW, settings, {}, where="a test", remedy="")
    assert compared == [True, True]


def made(stage, *, early=False, seed=0, **settings):
    """A model and its optimizer at a stage; 0 is without shards."""
    model, optimizer = net(seed, depth=2), AdamW
    if stage == 3:
        model = FullyShardedDataParallel(model)
    elif stage:
        settings |= {"bucket_size_mb": 0.001, "reduce_gradients": stage == 2}
    if settings:
        optimizer, settings = ShardedOptimizer, {"optimizer_cls": AdamW} | settings
    optimizer = optimizer(model.parameters(), lr=0.05, weight_decay=0.1, **settings)
    if early:
        model.update_in_backward(optimizer)
    return model, optimizer


def take_steps(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()  # on all ranks the same gradients
        optimizer.step()


def assert_whole(pair, expected):
    """On rank 0 the model and the moments are those of training without shards."""
    if (found := full_state(*pair)) is None:
        return
    for name, value in expected[0].state_dict().items():
        assert torch.equal(found["model"][name], value), name
    ours, theirs = found["optimizer"], expected[1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            assert ours["state"][number][key].dtype == (FP32 if key == "step" else BF16)
            assert torch.equal(ours["state"][number][key], value), key


def check_same(rank, world_size, stage, settings):
    """The update does not depend on the number of ranks, nor on the stage."""
    expected, pair = made(0), made(stage, **settings)
    for each in (expected, pair):
        take_steps(*each, range(4))
    assert_whole(pair, expected)


def check_masters(rank, world_size):
    """Of bf16 parameters; a rank may have none in a group."""
    model = net().bfloat16()
    groups = [{"params": [param]} for param in model.parameters()]
    optimizer = ShardedOptimizer(groups, AdamW, lr=0.05, master_dtype=FP32, partition="whole")
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    kept = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert kept
    assert all(moment.dtype == BF16 and moment.any() for moment in kept)


SETTINGS = {
    "stage 1": (1, {}),
    "stage 1, whole": (1, {"partition": "whole"}),
    "stage 1, offloaded": (1, {"offload_state": True}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 3, in backward": (3, {"early": True}),
    "stage 3, offloaded": (3, {"offload_state": True}),
}
SAVED = ("stage 1, whole", "stage 1, offloaded", "stage 2", "stage 3, in backward")
CHECKS = [
    *((name, check_same, how) for name, how in SETTINGS.items()),
    ("masters", check_masters, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def check_saved(rank, world_size, folder):
    """Also resumed from whole state, and from each rank's own part."""
    expected = made(0)
    take_steps(*expected, range(4))
    for name in SAVED:
        stage, settings = SETTINGS[name]
        pair = made(stage, **settings)
        take_steps(*pair, range(2))
        save(f"{folder}/{name}", *pair)
        whole, part = full_state(*pair), copy.deepcopy(pair[1].state_dict())
        for by_part in (False, True):
            other = made(stage, seed=1, **settings)
            if by_part:
                other[0].load_state_dict(pair[0].state_dict())
                other[1].load_state_dict(part)
            else:
                load_full_state(whole, *other)
            take_steps(*other, range(2, 4))
            assert_whole(other, expected)


def check_loaded(rank, world_size, folder):
    """What another stage has saved, on 4 ranks, whose averages of equal gradients are exact."""
    expected = made(0)
    take_steps(*expected, range(4))
    for name, other_name in zip(SAVED, reversed(SAVED), strict=True):
        stage, settings = SETTINGS[other_name]
        other = made(stage, seed=1, **settings)
        load(f"{folder}/{name}", *other)
        take_steps(*other, range(2, 4))
        assert_whole(other, expected)


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    run_ranks(check_saved, 2, str(tmp_path))
    run_ranks(check_loaded, 4, str(tmp_path))
