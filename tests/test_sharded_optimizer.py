"""A sharded optimizer leaves the same parameters as the unsharded one, on every rank."""

import copy

import pytest
import torch
import torch.nn.functional as F

from ranks import run_ranks
from tests.adapters import get_sharded_optimizer
from tests.toy import MODELS, make_batch

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def train(rank: int, world_size: int, model_name: str, optimizer_name: str) -> int:
    """Compares after each step; returns the bytes of this rank's optimizer state."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    plain = copy.deepcopy(model)
    optimizer_cls, kwargs = OPTIMIZERS[optimizer_name]
    sharded = get_sharded_optimizer(model.parameters(), optimizer_cls, **kwargs)
    reference = optimizer_cls(plain.parameters(), **kwargs)
    x, y = make_batch()
    for _ in range(10):
        for network, optimizer in ((model, sharded), (plain, reference)):
            optimizer.zero_grad()
            F.mse_loss(network(x), y).backward()
            optimizer.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    tensors = (v for state in sharded.state.values() for v in state.values() if torch.is_tensor(v))
    return sum(t.nbytes for t in tensors if t.numel() > 1)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_equals_unsharded(model_name: str, optimizer_name: str) -> None:
    shards = [o.value for o in run_ranks(train, 2, model_name, optimizer_name)]
    trainable = sum(p.numel() for p in MODELS[model_name]().parameters() if p.requires_grad)
    states = {"AdamW": 2, "SGD": 1}[optimizer_name]
    assert sum(shards) == pytest.approx(4 * states * trainable, rel=0.02)
    assert max(shards) <= 0.55 * sum(shards)
