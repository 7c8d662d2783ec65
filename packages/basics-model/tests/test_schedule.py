"""The learning-rate schedule against its formula."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from basics_model import CosineSchedule
from basics_model.schedule import cosine_learning_rate


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(4)]


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


def test_a_group_that_came_later_is_refused_by_name() -> None:
    params = parameters()
    optimizer = AdamW(params[:2], lr=1.0)
    schedule = CosineSchedule(optimizer, warmup_steps=4, total_steps=12)
    optimizer.add_param_group({"params": params[2:]})
    rates = schedule.get_last_lr()
    with pytest.raises(ValueError, match=r"got 1 for 2 groups\. Make the schedule after add_"):
        schedule.step()
    assert schedule.updates == 0
    assert schedule.get_last_lr() == rates


def test_schedule_checks_its_ratio() -> None:
    with pytest.raises(ValueError, match=r"min_ratio must be between 0 and 1, but got 1\.5"):
        CosineSchedule(AdamW(parameters()), warmup_steps=1, total_steps=2, min_ratio=1.5)
