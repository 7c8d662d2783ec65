"""``communication=``: everything that moves large tensors goes through what the user gives."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lite.peer import PeerCopies
from ddp_lite.ranks import Ranks
from process_memory import ProcessMemory
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer
from shard_optim.communication import GroupCollectives


class Counting(GroupCollectives):
    """The group's own collectives, counted by the elements of whole tensors."""

    def __init__(self, group):
        super().__init__(Ranks(group, torch.device("cpu"), "test"))
        self.reduced = self.gathered = 0

    def reduce_scatter(self, outputs, inputs, /):
        assert [self.group.size() * t.numel() for t in outputs] == [t.numel() for t in inputs]
        self.reduced += sum(t.numel() for t in inputs)
        return super().reduce_scatter(outputs, inputs)

    def all_gather(self, wholes, parts, /):
        assert [self.group.size() * t.numel() for t in parts] == [t.numel() for t in wholes]
        self.gathered += sum(t.numel() for t in wholes)
        return super().all_gather(wholes, parts)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def train(model, optimizer, rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def given_and_default(rank, world_size):
    numel = sum(p.numel() for p in stack().parameters())
    trained = []
    for communication in (None, Counting(dist.group.WORLD)):
        model = stack()
        optimizer = ShardedOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            bucket_size_mb=0.02,
            reduce_gradients=True,
            communication=communication,
        )
        train(model, optimizer, rank)
        trained.append(model)
    for p, q in zip(*(model.parameters() for model in trained), strict=True):
        assert torch.equal(p, q)
    assert communication.reduced == communication.gathered == 3 * numel

    wholes = []
    for communication in (None, Counting(dist.group.WORLD)):
        model = FullyShardedDataParallel(stack(), communication=communication)
        train(model, torch.optim.AdamW(model.parameters()), rank)
        wholes.append(model.full_parameters())
        in_units = sum(cut.numel for unit in model.units for cut in unit.cuts)
    assert all(torch.equal(wholes[0][name], wholes[1][name]) for name in wholes[0])
    assert communication.reduced == 3 * in_units > 0
    assert communication.gathered >= 3 * in_units

    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    with pytest.raises(
        ValueError, match=r"must be for the group of 2 ranks .* got one for 1 ranks"
    ):
        ShardedOptimizer(stack().parameters(), torch.optim.SGD, communication=Counting(alone))
    with pytest.raises(
        ValueError, match=r"must be for the group of 2 ranks .* got one for 1 ranks"
    ):
        FullyShardedDataParallel(stack(), communication=Counting(alone))


def test_stages_2_and_3_move_everything_through_it():
    run_ranks(given_and_default, 2)


class Late(GroupCollectives):
    """Gathers nothing before it is awaited, so that what is read too early is of before."""

    def __init__(self, group):
        super().__init__(Ranks(group, torch.device("cpu"), "test"))

    def all_gather(self, wholes, parts, /):
        gather = super().all_gather
        return SimpleNamespace(wait=lambda: gather(wholes, parts).wait())


def transformer_layers(rank, world_size):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, expected = nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(layer, 2)
    ours = ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        overlap="next-forward",
        communication=Late(dist.group.WORLD),
    )
    ours.attach(model)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        for each, optimizer in ((model, ours), (expected, plain)):
            optimizer.zero_grad()
            each.train()(x).square().mean().backward()
            optimizer.step()
            each.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected(x))


def test_layers_of_torch_that_read_parameters_of_modules_inside_them():
    run_ranks(transformer_layers, 2)


def averages(rank, world_size, folder):
    """Gradients of bf16, averaged by copies, are the float32 means of every rank's bf16 ones."""
    copies = PeerCopies(ProcessMemory(Path(folder), 4096))
    model = FullyShardedDataParallel(
        stack(), compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, communication=copies
    )
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    model(x).float().square().mean().backward()
    alone = stack().bfloat16()
    alone(x.bfloat16()).float().square().mean().backward()
    rounded = []
    for own, param in zip(model.parameters(), alone.parameters(), strict=True):
        if param.ndim < 2:
            continue
        grads = [torch.empty_like(param.grad) for _ in range(world_size)]
        dist.all_gather(grads, param.grad)
        mean = torch.stack(grads).float().mean(0).view(-1).chunk(world_size)[rank]
        torch.testing.assert_close(own.grad.detach(), mean, rtol=2.0**-22, atol=0.0)
        rounded.append(torch.equal(own.grad.detach(), own.grad.detach().bfloat16().float()))
    assert not any(rounded), "averages were rounded to 16 bits"


def test_averages_of_16_bits_by_copies_are_not_rounded(tmp_path):
    run_ranks(averages, 2, str(tmp_path / "memory"))


class Quantised(nn.Module):
    """A frozen matrix of bytes beside a trainable one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        codes = torch.randint(-9, 9, (17, 33), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.weight = nn.Parameter(torch.randn(33, 17))

    def forward(self, x):
        return x @ self.codes.to(x.dtype) @ self.weight


def bytes_by_copies(rank, world_size, folder):
    copies = PeerCopies(ProcessMemory(Path(folder), 256))
    alone, model = Quantised(), FullyShardedDataParallel(Quantised(), communication=copies)
    x = torch.randn(4, 17)
    torch.testing.assert_close(model(x), alone(x))
    model(x).sum().backward()


def test_frozen_bytes_travel_by_copies(tmp_path):
    run_ranks(bytes_by_copies, 3, str(tmp_path / "memory"))
