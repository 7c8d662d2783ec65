"""Bucketed all-reduce equals single-process training, whatever the bucket size."""

import functools

import pytest

from ranks import run_ranks
from tests.adapters import (
    ddp_bucketed_on_after_backward,
    ddp_bucketed_on_train_batch_start,
    get_ddp_bucketed,
)
from tests.data_parallel import train_like_one_process
from tests.toy import MODELS


def train(rank: int, world_size: int, model_name: str, bucket_size_mb: float | None) -> None:
    train_like_one_process(
        rank,
        world_size,
        model_name,
        functools.partial(get_ddp_bucketed, bucket_size_mb=bucket_size_mb),
        ddp_bucketed_on_after_backward,
        ddp_bucketed_on_train_batch_start,
    )


@pytest.mark.parametrize("bucket_size_mb", [0.0001, 0.0016, 0.01, None])
@pytest.mark.parametrize("model_name", MODELS)
def test_bucketed(model_name: str, bucket_size_mb: float | None) -> None:
    run_ranks(train, 2, model_name, bucket_size_mb)
