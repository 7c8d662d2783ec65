"""Messages between ranks: JSON in tensors of bytes, without pickle and without NumPy."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import BucketedDDP, MissingGradientError, ModelMismatchError, ranks
from ddp_lite.ranks import all_gather_json
from ranks import run_ranks


def refuse(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("must not be called")


def gathered(rank: int, world_size: int) -> None:
    values = [["a", 1, {"ü": None}], "x" * 1000, []]
    assert all_gather_json(values[rank], dist.group.WORLD) == values
    ranks._MOST_MESSAGE_BYTES = 3 * 500
    with pytest.raises(ValueError, match=r"but got 1,002 bytes from rank 1 .* each of 3 ranks"):
        all_gather_json(values[rank], dist.group.WORLD)


def test_each_rank_gets_every_value_in_rank_order() -> None:
    run_ranks(gathered, 3)


def without_object_collectives(rank: int, world_size: int) -> None:
    dist.distributed_c10d._object_to_tensor = refuse
    dist.distributed_c10d._tensor_to_object = refuse
    torch.Tensor.numpy = refuse
    with pytest.raises(ModelMismatchError, match="1 entries differ"):
        BucketedDDP(nn.Linear(2, 2 + rank, bias=False))
    wrapped = BucketedDDP(nn.Linear(2, 2), missing_gradients="error")
    for _ in range(2):
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.finish_gradient_synchronization()
    with pytest.raises(MissingGradientError, match="bias on ranks 0, 1"):
        wrapped.module.weight.sum().backward()


def test_a_wrapper_never_calls_torchs_object_collectives() -> None:
    run_ranks(without_object_collectives, 2)
