"""The memory that a rank holds at four moments of its first two steps."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench_harness.core import Row
from bench_harness.timing import synchronize
from bench_harness.training.proof import mean_over_ranks

if TYPE_CHECKING:
    from bench_harness.training.build import Training
    from bench_harness.training.settings import Settings

#: In their order.
MOMENTS = (
    "after initialisation",
    "end of forward",
    "before the optimizer step",
    "after the optimizer step",
)


def held_before(device: torch.device) -> int:
    """Bytes that are allocated before a variant is built, after all else has been freed.

    Collective. NCCL keeps the tensors of a collective until its watchdog has seen the end and the
    next collective starts: torch's DistributedDataParallel would leave its buckets to the variant
    after it. So a collective is part of every look, until no rank holds less than before.
    """
    if device.type != "cuda":
        return 0
    before, differs = -1, True
    while differs:  # what one collection frees may hold more to collect
        synchronize(device)
        time.sleep(0.5)
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(device)
        flag = torch.tensor(float(held != before), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        before, differs = held, bool(flag.item())
    torch.cuda.reset_peak_memory_stats(device)
    return before


def weigh(
    training: Training, variant: Settings, before: int, *, first_step: bool = False
) -> tuple[list[Row], list[float]]:
    """Takes two steps, and weighs what is held before the first and at each moment of the second.

    Args:
        training: just built, no step taken.
        before: :func:`held_before`.
        first_step: weigh the moments of the first step instead. It makes the optimizer's state,
            which every later step holds throughout.

    Returns:
        One row per moment of :data:`MOMENTS`, and the losses of the two steps (averaged over
        ranks). Bytes of parameters are those of the rank's own parameters, or shards of them, and
        of the buffers that a ``FullyShardedDataParallel`` holds gathered parameters in.
    """
    predicted = _predicted(training, variant)
    stateless = predicted | {"optimizer_state": 0}
    rows, losses = [_moment(training, MOMENTS[0], before, stateless)], []
    for number in (1, 2):
        known = stateless if number == 1 else predicted
        loss = training.forward()
        forward = _moment(training, MOMENTS[1], before, known)
        training.backward(loss)
        losses.append(mean_over_ranks(loss))
        del loss
        backward = _moment(training, MOMENTS[2], before, known)
        training.update()
        training.wait()
        after = _moment(training, MOMENTS[3], before, predicted)
        if number == (1 if first_step else 2):
            rows += [forward, backward, after]
    return rows, losses


def _moment(training: Training, name: str, before: int, predicted: Row) -> Row:
    """What is held now, by kind; the allocator's own figures; the peak since the last moment."""
    device = training.workload.device
    state, slots = _state_bytes(training.optimizer), getattr(training.module, "slots", ())
    expected = predicted["optimizer_state"]
    away = predicted["offloads"]
    row: Row = {
        "moment": name,
        # With what is held of the buffers into which parameters are gathered.
        "parameter_bytes": _nbytes(training.workload.module.parameters())
        + sum(slot.whole.untyped_storage().nbytes() for slot in slots),
        "gradient_bytes": _gradient_bytes(
            training, shards=name == MOMENTS[2] and predicted["stage"] == 2
        ),
        "state_bytes": 0 if away else state,
        "predicted_parameter_bytes": predicted["parameters"],
        "predicted_gradient_bytes": 0,
        "predicted_state_bytes": 0 if away else expected,
        "allocated_bytes": None,
        "peak_bytes": None,
    }
    if away:
        row |= {"host_state_bytes": state, "predicted_host_state_bytes": expected}
    if name in MOMENTS[2:]:
        kind = "gradients" if name == MOMENTS[2] else "kept_gradients"
        row["predicted_gradient_bytes"] = predicted[kind]
    if device.type == "cuda":
        synchronize(device)
        row["allocated_bytes"] = torch.cuda.memory_allocated(device) - before
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
    return row


def _predicted(training: Training, variant: Settings) -> Row:
    """Bytes of parameters, gradients and optimizer state on one rank, by the accounting."""
    from shard_optim.accounting import DtypePolicy, fully_sharded_buffers, rank_memory

    # Groups of ranks that hold all shards each divide nothing among themselves.
    world_size = dist.get_world_size() // int(variant.wrapper.get("replicas", 1))
    policy = DtypePolicy(parameter=4, gradient=4, state=training.state_bytes / training.numel)
    memory = rank_memory(
        training.numel, world_size=world_size, stage=variant.zero_stage, policy=policy
    )
    wrapper, gathered = variant.wrapper, 0.0
    if wrapper.name == "fully-sharded" and not wrapper.get("reshard_after_forward", True):
        # All are held from the construction on; those of resharded units at no moment.
        units: Any = training.module.units  # type: ignore[attr-defined]
        gathered = fully_sharded_buffers(
            [sum(cut.numel for cut in unit.cuts) for unit in units],
            [],
            gathered=units[0].gather_dtype.itemsize,
            reduced=0,
            reshard_after_forward=False,
        )
    left = not variant.optimizer.get("update_in_backward")  # gradients of units, after backward
    return {
        "stage": variant.zero_stage,
        "parameters": round(memory.parameters + gathered),
        "gradients": round(left * memory.gradients),
        "kept_gradients": round(left * memory.kept_gradients),
        "optimizer_state": round(memory.optimizer_state),
        "offloads": variant.offloads,
    }


def _local(tensor: Any) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def _nbytes(tensors: Any) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors)


def _gradient_bytes(training: Training, *, shards: bool) -> int:
    """Bytes of the gradients that this rank holds in its parameters, or else in shards.

    Args:
        shards: whether the optimizer reduces gradients into shards and has them now. Asking for
            them completes the reduction; before that, parameters may still hold a bucket's.
    """
    local = getattr(training.optimizer, "local_gradients", None)
    held = _nbytes(local()) if shards and local is not None else 0
    grads = [p.grad for p in training.workload.module.parameters() if p.grad is not None]
    return held + _nbytes(grad for grad in grads if not hasattr(grad, "refusal"))  # stand-ins


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    # ZeroRedundancyOptimizer keeps the state of its part in an optimizer of its own.
    states = getattr(optimizer, "optim", optimizer).state.values()
    tensors = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    return _nbytes(tensors)
