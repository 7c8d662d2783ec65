"""AdamW against torch.optim.AdamW; schedule and clipping against their formulas."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from basics_model import AdamW, CosineSchedule, clip_gradients
from basics_model.optimizer import cosine_learning_rate

# Both compute the same formula; they may round the last of 24 bits differently in each update.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-7}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(3)
    shapes = [(5, 7), (11,), (), (2, 3, 4)]
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def assert_same(first: list[nn.Parameter], second: list[nn.Parameter]) -> None:
    for mine, reference in zip(first, second, strict=True):
        torch.testing.assert_close(mine, reference, **TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.1},
        {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3},
        {"betas": (0.0, 0.0), "weight_decay": 0.0},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_equals_torch(settings: dict[str, Any]) -> None:
    mine, reference = parameters(), parameters()
    ours, theirs = AdamW(mine, **settings), torch.optim.AdamW(reference, **settings)
    for step in range(25):
        give_gradients(mine, step)
        give_gradients(reference, step)
        if step == 9:  # a parameter may miss a gradient now and then
            mine[1].grad = reference[1].grad = None
        ours.step()
        theirs.step()
    assert_same(mine, reference)
    if settings.get("lr") != 0.0:
        assert not torch.allclose(mine[0], parameters()[0])


def test_groups_keep_their_own_settings() -> None:
    def build(kind: type[torch.optim.Optimizer], params: list[nn.Parameter]) -> Any:
        optimizer = kind([{"params": params[:1], "lr": 0.2}, {"params": params[1:3]}], lr=0.01)
        optimizer.add_param_group({"params": params[3:], "weight_decay": 0.5, "betas": (0.5, 0.6)})
        return optimizer

    mine, reference = parameters(), parameters()
    ours, theirs = build(AdamW, mine), build(torch.optim.AdamW, reference)
    for step in range(10):
        give_gradients(mine, step)
        give_gradients(reference, step)
        ours.step()
        theirs.step()
    assert_same(mine, reference)


@pytest.mark.parametrize(
    ("predecessor", "successor"),
    [(AdamW, AdamW), (AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)],
    ids=["ours-to-ours", "ours-to-torch", "torch-to-ours"],
)
def test_state_dict_continues_where_it_stopped(predecessor: Any, successor: Any) -> None:
    straight, resumed = parameters(), parameters()
    one, two = predecessor(straight, lr=0.05), predecessor(resumed, lr=0.05)
    for step in range(5):
        for params, optimizer in ((straight, one), (resumed, two)):
            give_gradients(params, step)
            optimizer.step()
    loaded = successor(resumed, lr=123.0)
    loaded.load_state_dict(copy.deepcopy(two.state_dict()))
    assert loaded.param_groups[0]["lr"] == 0.05
    for step in range(5, 10):
        give_gradients(straight, step)
        one.step()
        give_gradients(resumed, step)
        loaded.step()
    assert_same(resumed, straight)
    assert float(loaded.state[resumed[0]]["step"]) == 10


def test_state_survives_a_weights_only_file(tmp_path: Any) -> None:
    params = parameters()
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["state"][0]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


def test_moments_have_the_parameters_dtype() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


def test_closure_is_called_with_gradients() -> None:
    parameter = nn.Parameter(torch.tensor(2.0))
    optimizer = AdamW([parameter], lr=0.5, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter**2
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert parameter.item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1e-3}, "lr must be finite and at least 0, but got -0.001"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"eps": -1.0}, "eps must be finite and at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be finite"),
        ({"betas": (1.0, 0.9)}, "betas must be two numbers of at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ],
)
def test_hyperparameters_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **settings)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": parameters(), **settings}])


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"dense gradients, but got a sparse one of shape \(4, 2\)"
    ):
        AdamW(embedding.parameters()).step()


def cosine(step: int, **changes: Any) -> float:
    settings = {
        "max_learning_rate": 1.0,
        "min_learning_rate": 0.2,
        "warmup_steps": 4,
        "total_steps": 12,
    }
    return cosine_learning_rate(step, **(settings | changes))


def test_cosine_passes_through_its_corners() -> None:
    assert [cosine(step) for step in (0, 1, 2, 3, 4)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert cosine(8) == pytest.approx(0.6)
    assert cosine(6) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert cosine(12) == cosine(13) == cosine(10**9) == 0.2


def test_cosine_without_warm_up_or_decay() -> None:
    assert cosine(0, warmup_steps=0) == 1.0
    assert cosine(11, warmup_steps=12) == pytest.approx(11 / 12)
    assert cosine(12, warmup_steps=12) == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 13}, "warmup_steps must be between 0 and total_steps"),
        ({"warmup_steps": -1}, "warmup_steps must be between"),
        ({"min_learning_rate": 2.0}, "0 <= minimum <= maximum"),
        ({"min_learning_rate": -0.1}, "0 <= minimum <= maximum"),
    ],
)
def test_cosine_checks_its_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine(1, **changes)
    with pytest.raises(ValueError, match="step must be at least 0, but got -1"):
        cosine(-1)


def test_schedule_sets_the_rate_of_each_update() -> None:
    params = parameters()
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=1.0)
    schedule = CosineSchedule(optimizer, warmup_steps=4, total_steps=12, min_ratio=0.2)
    rates = []
    for _ in range(14):
        rates.append(schedule.get_last_lr())
        schedule.step()
    expected = [cosine(update) for update in range(1, 15)]
    assert [first for first, _ in rates] == expected
    assert [second for _, second in rates] == pytest.approx([rate / 2 for rate in expected])


def test_schedule_resumes() -> None:
    optimizer = AdamW(parameters(), lr=1.0)
    schedule = CosineSchedule(optimizer, warmup_steps=4, total_steps=12)
    for _ in range(6):
        schedule.step()
    other = AdamW(parameters(), lr=7.0)
    resumed = CosineSchedule(other, warmup_steps=4, total_steps=12)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == schedule.get_last_lr()
    resumed.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()
    with pytest.raises(ValueError, match="one rate per parameter group, but got 2 for 1"):
        resumed.load_state_dict({"updates": 1, "max_learning_rates": [1.0, 2.0]})


def test_schedule_checks_its_ratio() -> None:
    with pytest.raises(ValueError, match=r"min_ratio must be between 0 and 1, but got 1\.5"):
        CosineSchedule(AdamW(parameters()), warmup_steps=1, total_steps=2, min_ratio=1.5)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clipping_equals_torch(max_norm: float) -> None:
    mine, reference = parameters(), parameters()
    give_gradients(mine, 0)
    give_gradients(reference, 0)
    mine[1].grad = reference[1].grad = None
    norm = clip_gradients(iter(mine), max_norm)
    expected = nn.utils.clip_grad_norm_(reference, max_norm)
    torch.testing.assert_close(norm, expected)
    for one, two in zip(mine, reference, strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)


def test_clipping_accumulates_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 300.0)  # the sum of squares overflows fp16
    norm = clip_gradients([parameter], 1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(300 * math.sqrt(100_000), rel=1e-3)
    assert torch.isfinite(parameter.grad).all()


def test_clipping_without_gradients_or_norm() -> None:
    assert float(clip_gradients(parameters(), 1.0)) == 0.0
    unclipped: list[Tensor] = []
    with pytest.raises(ValueError, match="max_norm must be above 0, but got 0"):
        clip_gradients(unclipped, 0.0)


@pytest.mark.gpu
def test_gpu_equals_torch() -> None:
    mine = [nn.Parameter(parameter.detach().cuda()) for parameter in parameters()]
    reference = [nn.Parameter(parameter.detach().cuda()) for parameter in parameters()]
    ours, theirs = AdamW(mine), torch.optim.AdamW(reference)
    for _ in range(5):
        for one, two in zip(mine, reference, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        clip_gradients(mine, 1.0)
        nn.utils.clip_grad_norm_(reference, 1.0)
        ours.step()
        theirs.step()
    assert_same(mine, reference)
