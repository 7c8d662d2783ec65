"""AdamW with moments in bfloat16 on a GPU: its kernel, and a recorded step."""

import pytest
import torch
from torch import nn

from shard_optim import AdamW, adamw

pytestmark = pytest.mark.gpu
MOMENTS = ("exp_avg", "exp_avg_sq")


def parameters():
    """More than one launch, and tensors that cannot share one."""
    torch.manual_seed(0)
    sizes = [(33,), (5000,), (1,), (0,), *[(160,)] * 18, (1024, 1600)]
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    flat = torch.randn(4096, device="cuda")
    params += [nn.Parameter(flat[1:2049]), nn.Parameter(flat[2048:].view(32, 64).t())]
    return params


def give_gradients(params, step, dtype=torch.float32):
    torch.manual_seed(100 + step)
    for param in params:
        param.grad_dtype = dtype
        grad = torch.randn(param.shape, device="cuda").mul(0.01).to(dtype)
        param.grad = grad if param.grad is None else param.grad.copy_(grad)


def assert_equal(optimizer, expected):
    lists = (each.param_groups[0]["params"] for each in (optimizer, expected))
    for a, b in zip(*lists, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for key in (*MOMENTS, "step"):
            own, other = optimizer.state[a][key], expected.state[b][key]
            assert own.dtype == other.dtype
            assert torch.equal(own, other), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_computes_as_torchs_operations_do(dtype, monkeypatch):
    params, others = parameters(), parameters()
    optimizer = AdamW(params, lr=0.02, weight_decay=0.1)
    expected = AdamW(others, lr=0.02, weight_decay=0.1)
    for step in range(4):
        give_gradients(params, step, dtype)
        give_gradients(others, step, dtype)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "_has_kernel", lambda param: False)
            expected.step()
    assert_equal(optimizer, expected)


def test_a_recorded_step_follows_the_learning_rate():
    params, others = parameters(), parameters()
    rates = [0.1, 0.01, 0.05, 0.0]
    lr = torch.tensor(rates[0], device="cuda")
    optimizer, expected = AdamW(params, lr=lr), AdamW(others, lr=rates[0])
    graph = torch.cuda.CUDAGraph()
    for step, rate in enumerate(rates):
        give_gradients(params, step)
        give_gradients(others, step)
        expected.param_groups[0]["lr"] = rate
        expected.step()
        lr.fill_(rate)
        if step == 0:
            optimizer.step()
        if step == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
        if step:
            graph.replay()
    assert_equal(optimizer, expected)


def test_state_goes_to_the_gpu():
    params, others = parameters(), parameters()
    optimizer, resumed = AdamW(params), AdamW(others)
    give_gradients(params, 0)
    optimizer.step()
    state = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for number, values in optimizer.state_dict()["state"].items():
        state["state"][number] = {key: value.cpu() for key, value in values.items()}
    resumed.load_state_dict(state)
    for a, b in zip(params, others, strict=True):
        b.data.copy_(a)
    for each in (params, others):
        give_gradients(each, 1)
    optimizer.step()
    resumed.step()
    assert_equal(resumed, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
