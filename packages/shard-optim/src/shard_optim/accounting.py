"""Memory and communication of data-parallel training, as arithmetic.

Stages are ZeRO's (Rajbhandari et al. 2020): 0 replicates everything, 1 shards optimizer state,
2 also gradients, 3 also parameters. GB is 10^9 bytes, as on accelerator data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Bytes per element of everything a rank may hold.

    Attributes:
        parameter: the parameters that the model computes with.
        gradient: accumulated gradients.
        master: higher-precision copies of the parameters (0 if the parameters are updated).
        state: optimizer state; 8 is two fp32 moments (Adam).
    """

    parameter: float = 4
    gradient: float = 4
    master: float = 0
    state: float = 8

    def __post_init__(self) -> None:
        _check_amounts(**vars(self))


def _check_amounts(**amounts: float) -> None:
    for name, amount in amounts.items():
        if not 0 <= amount < math.inf:
            raise ValueError(
                f"{name} must be a number that is at least 0, but got {amount}. Pass how many "
                "there are, or 0 for what is not kept."
            )


FP32 = DtypePolicy()
MIXED_BF16 = DtypePolicy(parameter=2, gradient=2, master=4, state=8)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted bytes on one rank, activations excluded.

    Attributes:
        parameters: the parameters that the model computes with.
        gradients: accumulated gradients, from the end of backward to the optimizer step.
        kept_gradients: of them, those that are held after the step too, until ``zero_grad()``.
        master_copies: higher-precision copies of the parameters.
        optimizer_state: what the optimizer keeps on the device.
        buffers: at most this much more while collectives are under way.
        host_state: what the optimizer keeps in host memory, which ``total`` leaves out.
    """

    parameters: float
    gradients: float
    kept_gradients: float
    master_copies: float
    optimizer_state: float
    buffers: float
    host_state: float = 0

    @property
    def total(self) -> float:
        """The sum of what is on the device before the optimizer step, in bytes."""
        kept = self.parameters + self.gradients + self.master_copies + self.optimizer_state
        return kept + self.buffers

    @property
    def total_after_step(self) -> float:
        """The sum of what is on the device between the step and ``zero_grad()``, in bytes."""
        return self.total - self.gradients + self.kept_gradients


def rank_memory(
    numel: int,
    *,
    world_size: int,
    stage: Stage,
    policy: DtypePolicy = FP32,
    in_flight: float = 0,
    offloaded_chunk: float | None = None,
) -> RankMemory:
    """Bytes per rank from the second step on, when there is optimizer state.

    Stage 2 is ``ShardedOptimizer(reduce_gradients=True)``, which frees reduced gradients in its
    step. In the other stages gradients belong to the parameters until ``zero_grad()``.

    Args:
        numel: trainable parameters of the whole model.
        world_size: data-parallel ranks.
        stage: 0, 1, 2 or 3.
        policy: bytes per element.
        in_flight: bytes of whole gradients on their way into shards (stages 2 and 3) and of
            parameters gathered for use (stage 3) that a rank holds at once. ``ShardedOptimizer``
            with ``reduce_gradients=True`` keeps at most 1 GiB, or two buckets.
        offloaded_chunk: with optimizer state in host memory, elements of the largest chunk that is
            updated at once, of which the device holds the state of two; None keeps it all on the
            device.

    Raises:
        ValueError: for an unknown stage, a world size below 1, or a negative number.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0, 1, 2 or 3, but got {stage}. Use one of them.")
    if world_size < 1:
        raise ValueError(
            f"world_size must be at least 1, but got {world_size}. Pass the number of ranks."
        )
    _check_amounts(numel=numel, in_flight=in_flight, offloaded_chunk=offloaded_chunk or 0)
    # Elements of parameters, of gradients and of optimizer state that this rank holds.
    held, reduced, updated = (numel / world_size if stage >= cut else numel for cut in (3, 2, 1))
    gradients, state = policy.gradient * reduced, policy.state * updated
    moved = policy.gradient * (stage >= 2) + policy.parameter * (stage == 3)
    visiting = math.inf if offloaded_chunk is None else 2 * policy.state * offloaded_chunk
    return RankMemory(
        parameters=policy.parameter * held,
        gradients=gradients,
        kept_gradients=0.0 if stage == 2 else gradients,
        master_copies=policy.master * updated,
        optimizer_state=min(state, visiting),
        host_state=0 if offloaded_chunk is None else state,
        buffers=min(in_flight, numel * moved) if world_size > 1 else 0.0,
    )


def fully_sharded_buffers(
    repeated: Sequence[int],
    others: Sequence[int],
    *,
    gathered: float = 2,
    reduced: float = 2,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
) -> float:
    """Bytes that ``FullyShardedDataParallel`` holds besides shards, at most: ``in_flight``.

    Repeated units take turns in ``prefetch + 1`` buffers, or have one each; the others have one
    each. While the gradients of one unit are made, those of two more may be on their way.

    Args:
        repeated, others: parameters of each repeated unit, and of each other one.
        gathered, reduced: bytes of a gathered element, and of a whole gradient's.
        prefetch, reshard_after_forward: as given to the wrapper.
    """
    largest = max(repeated, default=0)
    turns = min(prefetch + 1, len(repeated)) * largest
    held = (turns if reshard_after_forward else sum(repeated)) + sum(others)
    gradients = 3 * max(largest, *others, 0) if others else 3 * largest
    return gathered * held + reduced * gradients


def step_traffic(
    numel: int,
    *,
    world_size: int,
    stage: Stage,
    policy: DtypePolicy = FP32,
    gathered_once: float = 0,
) -> float:
    """Bytes that one rank sends in one step, with ring collectives.

    An all-reduce sends 2 (N-1)/N of the buffer, a reduce-scatter or an all-gather (N-1)/N. Stage 0
    all-reduces gradients. Stage 1 all-reduces gradients and gathers parameters. Stage 2
    reduce-scatters gradients and gathers parameters: as much as stage 0. Stage 3 gathers
    parameters twice, for forward and for backward, except those that stay gathered in between.

    Args:
        numel, world_size, stage, policy: as for ``rank_memory``.
        gathered_once: parameters that stay gathered between forward and backward (stage 3):
            all with ``reshard_after_forward=False``, else none.

    Raises:
        ValueError: for an unknown stage, a world size below 1, a negative number, or more
            parameters gathered once than there are.
    """
    rank_memory(numel, world_size=world_size, stage=stage, policy=policy)
    if not 0 <= gathered_once <= numel:
        raise ValueError(
            f"gathered_once must be between 0 and numel={numel}, but got {gathered_once}. Pass how "
            "many of the parameters stay gathered."
        )
    ring = (world_size - 1) / world_size * numel
    reductions = {0: 2, 1: 2, 2: 1, 3: 1}[stage]
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    saved = gathered_once / numel if stage == 3 and numel else 0
    return ring * (reductions * policy.gradient + (gathers - saved) * policy.parameter)
