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
    across: dist.ProcessGroup | None = None,
    device: torch.device,
    must: str = "construct the sharded optimizer from the same class, groups and parameters",
    remedy: str = "build the same optimizer on every rank",
) -> None:
    """Compares a description over all ranks: one 16-byte all-reduce if they agree.

    Args:
        lines: the description, one fact per line, most general first.
        group: the ranks to compare.
        across: if given, the ranks that are at this rank's place in other such groups, which are
            compared too.
        device: where the group's back end can reduce tensors.
        must: what every rank must do, for the error.
        remedy: what to do otherwise.

    Raises:
        RuntimeError: on every rank if any two differ, naming the first difference.
    """
    groups = [each for each in (group, across) if each is not None and each.size() > 1]
    if not groups:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    # max(x) == -max(-x) exactly when every rank sent the same x.
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=device)
    for each in groups:
        guarded(
            "the comparison of what the ranks construct",
            each,
            lambda each=each: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=each),
        )
    largest, negated_smallest = bounds.tolist()
    if largest == -negated_smallest:
        return
    everyone = [list(lines)]
    for each in groups:
        gathered = all_gather_values(everyone, each)
        everyone = [described for ranks in gathered for described in ranks]
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
