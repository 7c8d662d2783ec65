"""Are all ranks making the same synchronisation, from the same weights?

A rank that runs a backward more than the others, skips one, or whose optimizer did something else
trains on, one synchronisation apart, and nothing fails. So every rank sends a few bits with the
last reduction of a step: the number of the synchronisation, and some elements of some parameters.

Averaging must not blur them, whatever the dtype and the number of ranks. Every bit b therefore
travels as the pair (b, 1 - b). Where a rank sent 0, the average is exactly 0 if all ranks sent 0,
and positive if any rank sent 1; and two ranks that differ both have such a place. So either no rank
finds a difference, or every rank that differs from another does, at the same reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# 128 elements are compared in 8 steps of a model with 32 parameters or fewer.
_PARAMETERS, _ELEMENTS = 4, 4
_COUNT_BITS = 8
_BITS = torch.arange(32, dtype=torch.int32)


class StepCheck:
    """Makes and reads the bits of one wrapper.

    Args:
        parameters: the trainable ones, in an order that all ranks share.
        device: of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters = parameters
        self._bits = _BITS.to(device)
        counts = torch.arange(2**_COUNT_BITS, dtype=torch.int32)
        # Rows of a table on the device: a number from the host would be a copy of its own.
        self._counts = ((counts.unsqueeze(1) >> _BITS[:_COUNT_BITS]) & 1).to(device)
        self._sent_zero: Tensor | None = None
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._unread: Tensor | None = None  # on CUDA, what ``ranks_differ`` has not looked at
        self._number = 0

    def message(self, number: int, again: bool, dtype: torch.dtype) -> Tensor:
        """What this rank sends: zeros and ones.

        Args:
            number: synchronisations that were finished before this one.
            again: whether the last reduction of this synchronisation is made a second time.
            dtype: real.

        Returns:
            Shape (2, bits), to be averaged in place.
        """
        self._number = number
        with torch.no_grad():
            values = torch.cat([p.float() for p in self._sample(number)]).view(torch.int32)
            bits = (values.unsqueeze(1) >> self._bits) & 1
            count = self._counts[(2 * number + again) % 2**_COUNT_BITS]
            own = torch.cat([count, bits.view(-1)]).to(dtype)
            message = torch.stack([own, 1 - own])
            self._sent_zero = message.flip(0)
        return message

    def read(self, averaged: Tensor) -> None:
        """Compares the average with what was sent; on CUDA the host does not wait for it."""
        assert self._sent_zero is not None
        found = (averaged * self._sent_zero).sum()
        if averaged.device.type != "cuda":
            self._flag = found
        elif not torch.cuda.is_current_stream_capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
                self._flag = torch.zeros((), pin_memory=True)
            assert self._flag is not None
            self._unread = found if self._unread is None else self._unread + found
            self._flag.copy_(self._unread, non_blocking=True)
            self._event.record(torch.cuda.current_stream(averaged.device))

    def ranks_differ(self) -> bool:
        """Whether a ``read`` since the last call found a difference. On CUDA the host waits for it.

        While a CUDA graph is captured, when the host cannot wait, nothing is looked at.
        """
        if self._event is not None:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._event.synchronize()
            self._unread = None
        flag = self._flag
        return flag is not None and bool(flag.item() > 0)

    def describe(self, names: Sequence[str]) -> str:
        """What this rank sent last, in words; the weights may have been updated since."""
        shown = ", ".join(
            f"{names[index]} begins with {first[0].item():.9g}"
            for index, first in zip(
                self._indices(self._number), self._sample(self._number), strict=True
            )
        )
        return f"it is making synchronisation {self._number + 1} and its {shown}"

    def _indices(self, number: int) -> list[int]:
        count = len(self._parameters)
        return [(_PARAMETERS * number + i) % count for i in range(min(_PARAMETERS, count))]

    def _sample(self, number: int) -> list[Tensor]:
        """The first elements in memory of some parameters, other ones in every step."""
        found = []
        for index in self._indices(number):
            parameter = self._parameters[index].detach()
            if parameter.is_complex():
                parameter = torch.view_as_real(parameter)
            length = min(_ELEMENTS, parameter.numel()) if parameter.is_contiguous() else 1
            found.append(parameter.as_strided((length,), (1,)))
        return found
