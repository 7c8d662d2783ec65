"""Every stage where ``torch.set_default_device`` sends new tensors elsewhere, as scripts do."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ranks import run_case
from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)

STAGES = (1, 2, 3)


class AdamW(torch.optim.AdamW):
    """torch 2.11 counts steps on the default device, and cannot read counts on the meta device."""

    def step(self, *args, **kwargs):
        with torch.device("cpu"):
            return super().step(*args, **kwargs)


def train_save_and_load(rank: int, world_size: int, stage: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    inputs = torch.ones(2, 4)  # the same on every rank: stage 1 wants averaged gradients
    with torch.device("meta"):  # a tensor that lands there has no values
        if stage == 3:
            model = FullyShardedDataParallel(model)  # type: ignore[assignment]
            optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = ShardedOptimizer(
                model.parameters(), AdamW, lr=0.1, reduce_gradients=stage == 2
            )
        for _ in range(2):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = full_state(model, optimizer)
        save(f"{folder}/{stage}", model, optimizer)
        load(f"{folder}/{stage}", model, optimizer)
        load_full_state(trained, model, optimizer)
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.isfinite().all()


@pytest.mark.parametrize("stage", STAGES)
def test_a_default_device_changes_nothing(
    stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(Path(tmp_path_factory.getbasetemp()) / "default-device")
    run_case(train_save_and_load, 2, [(each, folder) for each in STAGES], stage, folder)
