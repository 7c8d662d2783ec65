"""When enough samples have been taken: the interval is narrow, or the time is up.

As pyperf and hyperfine do, sampling goes on past the least number until the 95 % interval of every
median is narrow enough to quote, but not for ever: a busy machine may never be steady.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_harness.core import option


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of every experiment that takes samples until they are enough."""

    interval: float = option(
        2.0,
        "Sample until the 95 % interval is at most this far from the median (%); 0: only the least "
        "number of samples.",
    )
    max_seconds: float = option(10.0, "Seconds that a case may go on sampling for that.")

    def sampling(self) -> dict[str, float]:
        """The options by the names under which a case's configuration stores them."""
        return {"interval": self.interval, "max_seconds": self.max_seconds}


class Enough:
    """Says whether enough samples were taken; its time limit begins when it is constructed.

    Args:
        config: of a case, with :meth:`SamplingOptions.sampling`; without it the least is enough.
        parts: how many such decisions share the seconds of the case.
    """

    def __init__(self, config: Mapping[str, Any], *, parts: int = 1) -> None:
        self._width = float(config.get("interval", 0.0)) / 100
        self._end = time.monotonic() + float(config.get("max_seconds", 0.0)) / parts

    def reached(self, samples: Iterable[Sequence[float]]) -> bool:
        """Whether every quantity's interval is narrow, or no time is left."""
        if not self._width or time.monotonic() >= self._end:
            return True
        return all(narrow(each, self._width) for each in samples if each)


def narrow(samples: Sequence[float], width: float) -> bool:
    """Whether the 95 % interval of the median lies within ± ``width``, a share of the median."""
    from bench_harness.stats import summarize

    found = summarize(samples)
    low, high = found["ci_low"], found["ci_high"]
    if low is None or high is None:
        return False
    return max(high - found["median"], found["median"] - low) <= width * found["median"]
