"""Changes of ``requires_grad``, which every rank must make alike.

A collective cannot compare changes, because a rank that has made none is running the collectives of
its training step. So ranks that have changed something meet through the process group's store
first. The others find there, when their collectives time out, which change this rank waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_lite.ranks import Ranks, name_ranks, shortened

_REMEDY = (
    "Change requires_grad of the same parameters on every rank, before the same forward, and "
    "restart from the last checkpoint."
)


def agree_on_trainable(frozen: Sequence[str], thawed: Sequence[str], ranks: Ranks) -> None:
    """Waits until every rank has frozen and unfrozen the same parameters as this one.

    Args:
        frozen: names of the parameters that no longer require gradients.
        thawed: names of those that require gradients again.
        ranks: the ranks.

    Raises:
        RuntimeError: if another rank changed other parameters, or none within the timeout.
    """
    verbs = (("froze", frozen), ("unfroze", thawed))
    words = " and ".join(f"{verb} {shortened(names)}" for verb, names in verbs if names)
    if absent := ranks.absentees(f"it {words}, and waits for every rank to do so. {_REMEDY}"):
        raise RuntimeError(
            f"requires_grad must be changed alike on every rank, but rank {ranks.rank} {words}, "
            f"and {name_ranks(absent)} changed nothing. {_REMEDY}"
        )
    facts = [(verb, name) for verb, names in verbs for name in names]
    ranks.agree(facts, must="change requires_grad alike", remedy=_REMEDY)
