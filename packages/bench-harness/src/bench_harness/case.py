"""A case: one measurement, defined completely by its configuration.

The configuration is what makes two measurements the same measurement, so it is also the identity
used for resuming: a run folder that already holds a finished row for a case's key does not
measure that case again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

#: Anything :mod:`json` can write. Left open because each experiment knows its own values.
JsonValue: TypeAlias = Any

#: One line of results: a flat mapping, except for raw samples, which stay lists.
Row: TypeAlias = dict[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: runs in its own process and gives one row per compared variant.

    Attributes:
        experiment: the experiment's registered name.
        config: everything that defines the measurement, as JSON. The entry ``"label"``, if
            given, is only its name and takes no part in the identity.
        timeout_s: seconds after which the case's processes are killed.
        placement: how this machine takes part in a case of several machines; not in the key.
    """

    experiment: str
    config: Mapping[str, JsonValue]
    timeout_s: float = 300.0
    placement: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name for people: ``config["label"]``, else ``key=value`` of every entry."""
        given = self.config.get("label")
        if given is not None:
            return str(given)
        return " ".join([self.experiment, *(f"{k}={v}" for k, v in self.config.items())])

    @property
    def key(self) -> str:
        """The identity: 16 hexadecimal digits of SHA-256 over experiment and configuration.

        Raises:
            TypeError, ValueError: the configuration is not JSON (NaN and infinity are not).
        """
        config = {name: value for name, value in self.config.items() if name != "label"}
        canonical = json.dumps(
            [self.experiment, config], sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def plural(count: int, what: str) -> str:
    """A count with its noun: 1 case, 2 cases."""
    return f"{count} {what}" + "s" * (count != 1)
