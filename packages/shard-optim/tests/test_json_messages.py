"""Messages between ranks: values as JSON in tensors of bytes, without pickle and without NumPy."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_lite.ranks
from shard_optim import ShardedOptimizer
from shard_optim.json_messages import decode, encode
from shard_optim.mesh import on_every_rank, resolve_mesh
from whole_state import load_whole_optimizer, whole_optimizer

VALUES = [
    None,
    True,
    -3,
    math.pi,
    math.inf,
    "ü",
    (0.9, 0.999),
    [1, (2, [3])],
    torch.Size([2, 3]),
    {1: "one", "two": 2, (3,): None},
    torch.bfloat16,
    torch.strided,
    torch.contiguous_format,
]
TENSORS = [
    torch.tensor(7.5),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([[True, False]]),
    torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    torch.tensor([1 + 2j]),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_survive(value: object) -> None:
    again = decode(encode(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_tensors_survive_bit_by_bit(value: torch.Tensor) -> None:
    again = decode(encode(value))
    assert again.dtype == value.dtype
    assert torch.equal(again, value)


def test_nan_survives() -> None:
    assert math.isnan(decode(encode(math.nan)))


def test_other_values_are_refused_by_name() -> None:
    for value in (object(), {1, 2}, lambda: 0):
        with pytest.raises(TypeError, match=f"but got {type(value).__name__}"):
            encode([value])
    with pytest.raises(TypeError, match=r"torch\.load must be a dtype"):
        decode({"torch": "load"})


def check_collectives(rank: int, world_size: int) -> None:
    values = [torch.arange(3), {"x" * 100: (1, 2)}]
    mesh = resolve_mesh(None, device=torch.device("cpu"), owner="Test")
    first, second = on_every_rank("test", lambda: values[rank], mesh.gather)
    assert torch.equal(first, values[0])
    assert second == values[1]
    assert mesh.broadcast_json("test", ["x"] if rank == 0 else object()) == ["x"]
    with pytest.raises(TypeError, match=r"but got object\. .* \(on rank 0\)"):
        on_every_rank("test", lambda: object() if rank == 0 else 1, mesh.gather)
    ddp_lite.ranks._MOST_MESSAGE_BYTES = 150
    with pytest.raises(ValueError, match="bytes from rank 1"):
        mesh.gather("test", "x" * (100 if rank else 1))


def refuse(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("must not be called")


def check_no_object_collectives(rank: int, world_size: int) -> None:
    c10d, numpy = dist.distributed_c10d, torch.Tensor.numpy
    before = c10d._object_to_tensor, c10d._tensor_to_object
    c10d._object_to_tensor = c10d._tensor_to_object = torch.Tensor.numpy = refuse
    try:
        with pytest.raises(RuntimeError, match="every rank must construct"):
            ShardedOptimizer(nn.Linear(2, 2 + rank).parameters(), torch.optim.AdamW)
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        load_whole_optimizer(optimizer, whole_optimizer(optimizer))
    finally:
        c10d._object_to_tensor, c10d._tensor_to_object = before
        torch.Tensor.numpy = numpy


CHECKS = [
    ("no object collectives", check_no_object_collectives, ()),
    ("collectives", check_collectives, ()),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check: str, errors_on_two_ranks: dict[str, str]) -> None:
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
