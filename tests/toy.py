"""Small models with the parameters that trip data-parallel wrappers: frozen, tied, repeated."""

import torch
from torch import nn


class ToyModel(nn.Module):
    """Three layers; the middle weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20, bias=False)
        self.fc2 = nn.Linear(20, 20, bias=True)
        self.fc3 = nn.Linear(20, 5, bias=False)
        self.fc2.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 10) -> (batch, 5)."""
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class TiedModel(nn.Module):
    """The same weight object is used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 16, bias=False)
        self.fc2 = nn.Linear(16, 16, bias=False)
        self.fc3 = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 5)
        self.fc3.weight = self.fc2.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 10) -> (batch, 5)."""
        for layer in (self.fc1, self.fc2, self.fc3):
            x = torch.relu(layer(x))
        return self.head(x)


MODELS = {"frozen": ToyModel, "tied": TiedModel}
BATCH = 12  # divides by every world size used


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch: inputs (BATCH, 10) and targets (BATCH, 5), the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 5, generator=generator)
