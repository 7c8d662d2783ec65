"""The one short name of each variant of a training step, made from its label.

A label of bench-harness says everything that a variant sets, such as
``FullyShardedDataParallel(reshard_after_forward=False, compute_dtype=bf16)``. Pages show the name
that ``variant_names.toml`` gives it, "FSDP kept", and the label in a small second line.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def names() -> Mapping[str, str]:
    """All names by label."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def short_names(labels: Sequence[str]) -> list[str]:
    """The names of a table's variants.

    Raises:
        ValueError: a label has none.
    """
    for label in labels:
        if label not in names():
            raise ValueError(
                f"a variant must have a name in tools/pages/{_FILE.name}, but got {label!r}. "
                "Add one of at most 16 characters."
            )
    return [names()[label] for label in labels]
