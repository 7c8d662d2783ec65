"""Do all ranks describe the same optimizer? Every rank learns the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from shard_optim.collectives import guarded
from shard_optim.exchange import all_gather_values


def check_agreement(
    lines: Sequence[str],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    must: str = "construct the sharded optimizer from the same class, groups and parameters",
    remedy: str = "build the same optimizer on every rank",
) -> None:
    """Compares a description over all ranks: one 16-byte all-reduce if they agree.

    Args:
        lines: the description, one fact per line, most general first.
        group: the ranks to compare.
        device: where the group's back end can reduce tensors.
        must: what every rank must do, for the error.
        remedy: what to do otherwise.

    Raises:
        RuntimeError: on every rank if any two differ, naming the first difference.
    """
    if group.size() == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    # max(x) == -max(-x) exactly when every rank sent the same x.
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=device)
    guarded(
        "the comparison of what the ranks construct",
        group,
        lambda: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group),
    )
    largest, negated_smallest = bounds.tolist()
    if largest == -negated_smallest:
        return
    everyone = all_gather_values(list(lines), group)
    raise RuntimeError(f"every rank must {must}, but {first_difference(everyone)}; {remedy}")


def describe_groups(groups: Sequence[Mapping[str, Any]], *, first: int) -> list[str]:
    """One line per hyperparameter and per parameter.

    Args:
        groups: parameter groups.
        first: number of the first of them.
    """
    lines = []
    for number, group in enumerate(groups, start=first):
        settings = {key: value for key, value in group.items() if key != "params"}
        names = settings.pop("param_names", [""] * len(group["params"]))
        lines += [f"group {number}: {key} = {value}" for key, value in sorted(settings.items())]
        lines += [
            f"group {number}: parameter {position} {name} {tuple(param.shape)} {param.dtype} "
            f"{param.device.type} {'trainable' if param.requires_grad else 'frozen'}"
            for position, (param, name) in enumerate(zip(group["params"], names, strict=True))
        ]
    return lines


def first_difference(everyone: Sequence[Sequence[str]]) -> str:
    """Names the first line in which a rank differs from rank 0; some line must."""
    rows = zip_longest(*everyone, fillvalue="nothing")
    facts = next(row for row in rows if any(fact != row[0] for fact in row))
    rank = next(rank for rank, fact in enumerate(facts) if fact != facts[0])
    return f"rank 0 has [{facts[0]}] where rank {rank} has [{facts[rank]}]"
