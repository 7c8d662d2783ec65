"""Overlapped all-reduce of individual parameters equals single-process training."""

import pytest

from ranks import run_ranks
from tests.adapters import ddp_on_after_backward, get_ddp
from tests.data_parallel import train_like_one_process
from tests.toy import MODELS


def train(rank: int, world_size: int, model_name: str) -> None:
    train_like_one_process(rank, world_size, model_name, get_ddp, ddp_on_after_backward)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model_name", MODELS)
def test_individual_parameters(model_name: str, world_size: int) -> None:
    run_ranks(train, world_size, model_name)
