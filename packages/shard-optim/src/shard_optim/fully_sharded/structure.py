"""Parameters, buffers and modules that are added, replaced or removed after a model is wrapped.

A parameter that was not there at wrapping is in no unit: its gradient is never averaged, so every
rank would train its own. One that was removed, and buffers, are what a program may change, but on
every rank alike; the ranks compare such a change in the next backward (``history.py``).

So is ``requires_grad``, but a collective cannot compare its changes, because a rank that has made
none is running the collectives of its training step. Ranks that have changed something therefore
meet through the process group's store first. The others find there, when their collectives time
out, which change this rank waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddp_lite.errors import ModelMismatchError
from ddp_lite.model import Structure, describe_module
from ddp_lite.ranks import Ranks, name_ranks, shortened
from shard_optim.history import History

_ALIKE = (
    "Change requires_grad of the same parameters on every rank, before the same forward, and "
    "restart from the last checkpoint."
)


class StructureWatch:
    """Looks whether a model has changed; ``history`` takes what ranks may change, but alike."""

    def __init__(self, module: nn.Module, history: History, ranks: Ranks) -> None:
        self._module, self._history, self._ranks = module, history, ranks
        self._wrapped = {id(param) for param in module.parameters()}
        self._params = list(module.parameters())  # alive, so that no other one has their ids
        self._remember()

    def _remember(self) -> None:
        self._structure = Structure(self._module, buffers=True)
        described = describe_module(self._module)
        self._described = {name: text.partition(" ")[2] for name, text in described}

    def check(self, step: int) -> None:
        """ModelMismatchError if a parameter was added or replaced; ``step`` is the next forward."""
        if self._structure.holds():
            return
        foreign = [
            f"{name} was {'replaced' if name in self._described else 'added'}"
            for name, param in self._module.named_parameters()
            if id(param) not in self._wrapped
        ]
        if foreign:
            report = f"{shortened(foreign)} since the model was wrapped"
            self._ranks.step = step
            self._ranks.tell(report)
            raise ModelMismatchError(
                f"a wrapped module must keep its parameters, but on rank {self._ranks.rank} "
                f"{report}. Copy new values into the parameter, or change the module first and "
                "wrap it then. torch.func.functional_call needs a module that is not sharded"
            )
        before = self._described
        self._remember()
        after = self._described
        changes = [f"removed {name}" for name in before if name not in after]
        changes += [
            f"made {name} {form}" for name, form in after.items() if before.get(name) != form
        ]
        if changes:
            self._history.note(shortened(changes))


def agree_on_trainable(changed: Sequence[tuple[str, bool]], ranks: Ranks) -> None:
    """RuntimeError unless every rank freezes and unfreezes these parameters within the timeout."""
    frozen = [name for name, trainable in changed if not trainable]
    verbs = (("froze", frozen), ("unfroze", [name for name, trainable in changed if trainable]))
    words = " and ".join(f"{verb} {shortened(names)}" for verb, names in verbs if names)
    if absent := ranks.absentees(f"it {words}, and waits for every rank to do so. {_ALIKE}"):
        raise RuntimeError(
            f"requires_grad must be changed alike on every rank, but rank {ranks.rank} {words}, "
            f"and {name_ranks(absent)} changed nothing. {_ALIKE}"
        )
    facts = [(verb, name) for verb, names in verbs for name in names]
    ranks.agree(facts, must="change requires_grad alike", remedy=_ALIKE)
