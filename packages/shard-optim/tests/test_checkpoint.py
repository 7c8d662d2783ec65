"""torch.distributed.checkpoint: any world size to any other, bit-exactly, and never half."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shard_optim import CollectiveError, ShardedOptimizer, load, save
from whole_state import whole_optimizer


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.append(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    return model


def sharded(model, **kwargs):
    settings = {"lr": 0.1, "bucket_size_mb": 0.0002} | kwargs
    return ShardedOptimizer(model.parameters(), torch.optim.AdamW, **settings)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


def check_leg(rank, world_size, folder, leg, partition):
    """Loads the previous leg, checks it against plain training, trains on and saves."""
    model, reference = build(), build()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    train(reference, plain, range(2 * leg))
    optimizer = sharded(model, partition=partition, lr=0.7)
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.copy_(q)
    if leg:
        load(f"{folder}/{leg - 1}", optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
    else:
        optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, range(2 * leg, 2 * leg + 2))
    train(reference, plain, range(2 * leg, 2 * leg + 2))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    full = whole_optimizer(optimizer)
    if rank == 0:
        for index, state in plain.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(full["state"][index][key], value)
    save(f"{folder}/{leg}", optimizer=optimizer)


@pytest.mark.slow
def test_resharding_2_3_1_4_is_bit_exact(tmp_path):
    legs = [(2, "flat"), (3, "whole"), (1, "flat"), (4, "flat")]
    for leg, (world_size, partition) in enumerate(legs):
        run_ranks(check_leg, world_size, str(tmp_path), leg, partition)


def check_refusals(rank, world_size, folder):
    model = build()
    optimizer = sharded(model)
    train(model, optimizer, range(2))
    save(f"{folder}/good", optimizer=optimizer)
    with pytest.raises(FileExistsError, match="Save to a new folder"):
        save(f"{folder}/good", optimizer=optimizer)
    with pytest.raises(FileNotFoundError, match="which a save writes last, is missing"):
        load(f"{folder}/nothing", optimizer=optimizer)
    other = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the optimizer class is AdamW in it, here SGD"):
        load(f"{folder}/good", optimizer=other)
    fewer = ShardedOptimizer(list(model.parameters())[1:], torch.optim.AdamW)
    with pytest.raises(ValueError, match="parameters of group 0 is 9 in it, here 8"):
        load(f"{folder}/good", optimizer=fewer)
    shapes = [
        nn.Parameter(torch.zeros(p.shape if i else (2, 2)))
        for i, p in enumerate(model.parameters())
    ]
    reshaped = ShardedOptimizer(shapes, torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"the shape of .* is \(\) in it, here \(2, 2\)"):
        load(f"{folder}/good", optimizer=reshaped)
    assert not reshaped.state


def test_other_checkpoints_are_refused(tmp_path):
    run_ranks(check_refusals, 2, str(tmp_path))


def check_damage(rank, world_size, folder):
    """One flipped bit anywhere: the right values, or an error that names the file."""
    model = build()
    optimizer = sharded(model)
    train(model, optimizer, range(2))
    save(folder, optimizer=optimizer)
    expected = str(optimizer.state_dict())
    refused = 0
    for path in sorted(Path(folder).iterdir()):
        good = path.read_bytes()
        positions = range(0, len(good), max(1, len(good) // 50))
        for damaged in [flipped(good, position) for position in positions] + [
            good[: len(good) // 2]
        ]:
            path.write_bytes(damaged)
            try:
                load(folder, optimizer=optimizer)
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017 - not every flip is an error
                refused += 1
            assert str(optimizer.state_dict()) == expected, path
        path.write_bytes(good)
    load(folder, optimizer=optimizer)
    return refused


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


def test_damage_never_loads_wrong_values(tmp_path):
    [outcome] = run_ranks(check_damage, 1, str(tmp_path / "saved"))
    assert outcome.value > 100


def check_readable(rank, world_size, folder):
    """torch's own functions read the folder too."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model = build()
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    save(f"{folder}/saved", optimizer=optimizer)
    full = whole_optimizer(optimizer)
    if rank == 0:
        dcp_to_torch_save(f"{folder}/saved", f"{folder}/whole.pt")
        whole = torch.load(f"{folder}/whole.pt", weights_only=True)
        for index, state in full["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                stored = whole[f"state.{index}.elements.{key}"]  # in the parameter's memory order
                assert torch.equal(stored.sort().values, state[key].flatten().sort().values)


def test_torchs_own_tools_read_it(tmp_path):
    run_ranks(check_readable, 2, str(tmp_path))


def check_killed(rank, world_size, folder):
    model = build()
    optimizer = sharded(model)
    train(model, optimizer, range(2))
    save(f"{folder}/first", optimizer=optimizer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="saving a checkpoint"):
        save(f"{folder}/second", optimizer=optimizer)
    with pytest.raises(FileExistsError):
        save(f"{folder}/first", optimizer=optimizer)


def check_restart(rank, world_size, folder):
    optimizer = sharded(build())
    with pytest.raises(FileNotFoundError, match="which a save writes last, is missing"):
        load(f"{folder}/second", optimizer=optimizer)
    load(f"{folder}/first", optimizer=optimizer)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(tmp_path):
    survivor, killed = run_ranks(check_killed, 2, str(tmp_path), check=False)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.ok, survivor.error
    run_ranks(check_restart, 2, str(tmp_path))
