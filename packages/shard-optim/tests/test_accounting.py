"""Accounting against numbers worked out by hand."""

import pytest

from shard_optim import accounting

XL = 1_998_235_200


@pytest.mark.parametrize(("world_size", "gigabytes"), [(1, 32), (2, 24), (4, 20)])
def test_xl_in_fp32_under_stage_1(world_size, gigabytes):
    memory = accounting.rank_memory(XL, world_size=world_size, stage=1)
    assert memory.total / 1e9 == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "per_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_mixed_precision_bytes_per_parameter(stage, per_parameter):
    """The ZeRO paper's table with K = 12 and N = 8."""
    memory = accounting.rank_memory(1000, world_size=8, stage=stage, policy=accounting.MIXED_BF16)
    assert memory.total == 1000 * per_parameter


@pytest.mark.parametrize(("stage", "freed"), [(0, 0), (1, 0), (2, 2 / 8), (3, 0)])
def test_only_stage_2_frees_gradients_in_the_step(stage, freed):
    memory = accounting.rank_memory(1000, world_size=8, stage=stage, policy=accounting.MIXED_BF16)
    assert memory.total - memory.total_after_step == 1000 * freed


@pytest.mark.parametrize(("stage", "elements"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_traffic_in_units_of_the_model(stage, elements):
    sent = accounting.step_traffic(1000, world_size=4, stage=stage)
    assert sent == 4 * 1000 * elements * 3 / 4


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3, but got 4"):
        accounting.rank_memory(1, world_size=1, stage=4)
    with pytest.raises(ValueError, match="world_size must be at least 1, but got 0"):
        accounting.rank_memory(1, world_size=0, stage=1)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="state must be a number that is at least 0, but got"):
            accounting.DtypePolicy(state=bad)
        with pytest.raises(ValueError, match="numel must be a number that is at least 0, but got"):
            accounting.rank_memory(bad, world_size=1, stage=1)
        with pytest.raises(ValueError, match="in_flight must be a number that is at least 0"):
            accounting.rank_memory(1, world_size=1, stage=2, in_flight=bad)
        with pytest.raises(ValueError, match="offloaded_chunk must be a number that is at least 0"):
            accounting.rank_memory(1, world_size=1, stage=2, offloaded_chunk=bad)
        with pytest.raises(ValueError, match="gathered_once must be between 0 and numel=1, but"):
            accounting.step_traffic(1, world_size=2, stage=3, gathered_once=bad)
    assert accounting.step_traffic(0, world_size=2, stage=3) == 0


def test_buffers_are_bounded_by_the_model():
    settings = {"world_size": 4, "in_flight": 500.0}
    assert accounting.rank_memory(1000, stage=1, **settings).buffers == 0
    assert accounting.rank_memory(1000, stage=2, **settings).buffers == 500
    assert accounting.rank_memory(10, stage=2, **settings).buffers == 40
    assert accounting.rank_memory(10, stage=3, **settings).buffers == 80
    memory = accounting.rank_memory(1000, stage=2, **settings)
    assert memory.total == 4 * 1000 + 4 * 250 + 8 * 250 + 500
