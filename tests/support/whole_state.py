"""The whole state of a model or of an optimizer alone, as tests of one of them need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shard_optim import full_state, load_full_state


def whole_model(model: nn.Module) -> Any:
    """The plain module's state dict on rank 0, None elsewhere."""
    state = full_state(model)
    return state and state["model"]


def whole_optimizer(optimizer: Optimizer, model: nn.Module | None = None) -> Any:
    """The plain optimizer's state dict on rank 0, None elsewhere."""
    state = full_state(optimizer=optimizer)
    return state and state["optimizer"]


def load_whole_model(model: nn.Module, state_dict: Any) -> None:
    """Loads rank 0's state dict of the plain module."""
    load_full_state({"model": state_dict}, model)


def load_whole_optimizer(optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Loads rank 0's state dict of the plain optimizer."""
    load_full_state({"optimizer": state_dict}, optimizer=optimizer)
