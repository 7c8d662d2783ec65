"""Fully sharded data parallelism through the adapters, as a course's tests would use it."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from basics_model import ModelConfig, TransformerLM
from ranks import run_ranks
from tests.adapters import fsdp_gather_full_params, fsdp_on_after_backward, get_fsdp
from tests.toy import MODELS

STEPS, BATCH, SEQUENCE = 5, 4, 8
CONFIG = ModelConfig(
    vocab_size=64, context_length=SEQUENCE, d_model=16, d_ff=40, num_layers=3, num_heads=2
)


def language_model() -> nn.Module:
    return TransformerLM(CONFIG)


def make_batch(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    if name == "transformer":
        tokens = torch.randint(0, 64, (BATCH, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 5, generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    outputs = model(inputs).float()
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def average_replicas(model: nn.Module) -> None:
    for param in model.parameters():
        if param.requires_grad:
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


def assert_layout(wrapped: nn.Module, plain: nn.Module, world_size: int) -> None:
    """Matrices in equal shards, norms and biases whole with the same gradient on every rank."""
    assert wrapped.module is not wrapped
    pairs = zip(wrapped.named_parameters(), plain.named_parameters(), strict=True)
    for (name, mine), (expected_name, whole) in pairs:
        assert name == expected_name
        assert mine.dtype == torch.float32
        if whole.ndim > 1:
            assert mine.numel() == whole.numel() // world_size, name
        else:
            assert mine.shape == whole.shape, name
        if not mine.requires_grad:
            continue
        assert mine.grad is not None, name
        assert mine.grad.shape == mine.data.shape, name
        assert mine.grad.dtype == torch.float32, name
        if whole.ndim == 1:
            everyone = [torch.empty_like(mine.grad) for _ in range(world_size)]
            dist.all_gather(everyone, mine.grad)
            assert all(torch.equal(other, mine.grad) for other in everyone), name


def sums_in_one_order(name: str) -> bool:
    """Whether this processor averages two half batches to the bits of the whole, unsharded."""
    torch.manual_seed(0)
    model = language_model() if name == "transformer" else MODELS[name]()
    trainable = [param for param in model.parameters() if param.requires_grad]
    inputs, targets = make_batch(name, 0)
    parts = (slice(None), slice(0, BATCH // 2), slice(BATCH // 2, BATCH))
    whole, first, second = (
        torch.autograd.grad(loss_of(model, inputs[part], targets[part]), trainable)
        for part in parts
    )
    return all(torch.equal(a, (b + c) / 2) for a, b, c in zip(whole, first, second, strict=True))


def train(
    rank: int, world_size: int, name: str, compute_dtype: torch.dtype | None, oracle: str
) -> bool:
    """Asserts equality with the oracle; returns whether it had to be bitwise."""
    warnings.simplefilter("error")
    exact = compute_dtype is None and (oracle == "replicas" or sums_in_one_order(name))
    torch.manual_seed(rank)  # ranks start from different weights: rank 0's must win
    module = language_model() if name == "transformer" else MODELS[name]()
    plain = copy.deepcopy(module)
    wrapped = get_fsdp(module, compute_dtype=compute_dtype)
    plain.load_state_dict(fsdp_gather_full_params(wrapped), strict=name != "tied")
    ours = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = make_batch(name, step)
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        seen = slice(None) if oracle == "whole batch" else mine
        reference.zero_grad()
        loss_of(plain, inputs[seen], targets[seen]).backward()
        if oracle == "replicas":
            average_replicas(plain)
        reference.step()

        ours.zero_grad()
        loss_of(wrapped, inputs[mine], targets[mine]).backward()
        fsdp_on_after_backward(wrapped, ours)
        assert_layout(wrapped, plain, world_size)
        ours.step()

        found = fsdp_gather_full_params(wrapped)
        assert list(found) == [each for each, _ in plain.named_parameters()]
        for each, expected in plain.named_parameters():
            if exact:
                assert torch.equal(found[each], expected), f"{each}, step {step}"
            elif compute_dtype is not None:
                torch.testing.assert_close(found[each], expected.detach(), rtol=1e-4, atol=1e-4)
            else:  # the processor adds a whole batch in another order than two halves
                torch.testing.assert_close(found[each], expected.detach(), rtol=1e-5, atol=1e-6)
    return exact


@pytest.mark.parametrize("oracle", ["replicas", "whole batch"])
@pytest.mark.parametrize("name", [*MODELS, "transformer"])
def test_fsdp(name: str, oracle: str) -> None:
    outcomes = run_ranks(train, 2, name, None, oracle)
    exact = all(outcome.value for outcome in outcomes)
    print(
        f"{name}: equal to {oracle} training " + ("bit for bit" if exact else "in fp32 tolerance")
    )


@pytest.mark.parametrize("name", [*MODELS, "transformer"])
def test_fsdp_computing_in_fp16(name: str) -> None:
    run_ranks(train, 2, name, torch.float16, "whole batch")
