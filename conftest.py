"""Settings every test of the workspace shares."""

import os

import pytest
import torch

# Triton reads this when a kernel is decorated, so it must be set before any of ours is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {devices}"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
