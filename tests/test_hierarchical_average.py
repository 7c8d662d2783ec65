"""``examples/hierarchical_average.py``: a comm hook on two levels."""

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage, gradients

from ranks import run_ranks


def compared(rank: int, world_size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, world_size // 2))
    torch.testing.assert_close(gradients(HierarchicalAverage(mesh)), gradients(None))
    with pytest.raises(ValueError, match=r"the mesh must have two dimensions .*, but got 1\. Buil"):
        HierarchicalAverage(dist.device_mesh.init_device_mesh("cpu", (world_size,)))


def test_two_levels_average_as_one_does() -> None:
    run_ranks(compared, 4)
