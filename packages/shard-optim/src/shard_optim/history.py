"""The calls by which a rank changed a model since the last comparison, as text and as a number.

Ranks that train a sharded model differently do not fail: each updates its own shards and its own
copy of the small parameters, and these drift apart. So what a rank does is noted, and the number
travels with the next backward's small all-reduce, which every rank takes part in anyway.
"""

from __future__ import annotations

import zlib


class History:
    """Events since the last comparison, which must be the same on every rank."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self.in_backward = False  # a backward pass has begun and not ended

    def note(self, event: str) -> None:
        """Adds an event, in words that follow "it has"."""
        self._events.append(event)

    def take(self) -> tuple[int, str]:
        """A number for the events and their words; begins anew."""
        words = ", ".join(self._events) or "done nothing"
        self._events.clear()
        return zlib.crc32(words.encode()), words
