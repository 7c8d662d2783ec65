"""Whether the hosts or the GPUs limit the steps, on which all ranks agree without a collective.

Copies between GPUs leave all SMs to the model, but each costs the host time. Where the GPUs wait
for their hosts, SMs are idle and the host's time is what counts: NCCL is the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.step import Observer, Step

# Beyond the one the hosts limit the steps, below the other they do not. In between nothing changes.
_LIMITS, _DOES_NOT = 0.6, 0.4


class HostLimit(Observer):
    """Finds out for what share of the buckets the GPUs were about to wait for their hosts.

    A bucket is started when its gradients have been queued, and the GPU usually computes them much
    later. If it has come to where the bucket before was started, it has less than one bucket's work
    left. Each rank's share travels with the last bucket, and its average is read one step later, as
    in ``SameStep``, so the host waits for nothing.

    Args:
        device: a GPU.

    Attributes:
        found: whether the hosts limit the steps: the same on every rank, and throughout a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = False
        self._device = device
        self._share = 0.0  # of the last steps, of which each counts half as much as the next
        self._previous: torch.cuda.Event | None = None
        self._buckets = self._waits = 0
        self._message: Tensor | None = None
        self._average: Tensor | None = None  # in memory of the host
        self._arrived: torch.cuda.Event | None = None
        self._read: float | None = None

    @property
    def asks_for_collectives(self) -> bool:
        """Whether they are the better choice now: never in a recording, which costs no host."""
        return self.found and not torch.cuda.is_current_stream_capturing()

    def reset(self, step: Step) -> None:
        """Forgets the buckets of the last step."""
        self._previous, self._buckets, self._waits = None, 0, 0

    def gradients_taken(
        self, step: Step, bucket: Bucket, gradients: Sequence[Tensor | None], again: bool
    ) -> None:
        """Asks whether the GPU has come to where the bucket before was started."""
        if torch.cuda.is_current_stream_capturing():
            return
        before = self._previous
        self._previous = torch.cuda.current_stream(self._device).record_event()
        if before is not None:
            self._buckets += 1
            self._waits += before.query()

    def message(self, step: Step, dtype: torch.dtype, again: bool) -> Tensor | None:
        """This rank's share."""
        share = self._waits / max(self._buckets, 1)
        self._message = torch.full((1,), share, dtype=dtype, device=step.device)
        return self._message

    def messages_averaged(self, step: Step) -> None:
        """Sends the average to the host, which does not wait for it."""
        assert self._message is not None
        if torch.cuda.is_current_stream_capturing():
            return
        if self._average is None:
            self._average = torch.zeros(1, pin_memory=True)
            self._arrived = torch.cuda.Event()
        assert self._arrived is not None
        self._average.copy_(self._message, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._device))

    def backward_ended(self, step: Step) -> None:
        """Reads the average of the step before, which has arrived by now."""
        if self._arrived is None or torch.cuda.is_current_stream_capturing():
            return
        assert self._average is not None
        self._arrived.synchronize()
        self._read = self._average.item()

    def ended(self, step: Step) -> None:
        """Decides, between two steps, where all ranks do."""
        if self._read is None:
            return
        self._share = (self._share + self._read) / 2
        self._read = None
        self.found = self._share > (_DOES_NOT if self.found else _LIMITS)
