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

from ddp_lite.step import Observer, Step

# 128 elements are compared in 8 steps of a model with 32 parameters or fewer.
_PARAMETERS, _ELEMENTS = 4, 4
_COUNT_BITS = 8
_BITS = torch.arange(32, dtype=torch.int32)


class StepCheck:
    """Makes and reads the bits of one wrapper.

    Args:
        parameters: the trainable ones, in an order that all ranks share.
        device: of the parameters.

    Attributes:
        parameters: as given.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
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
        count = len(self.parameters)
        return [(_PARAMETERS * number + i) % count for i in range(min(_PARAMETERS, count))]

    def _sample(self, number: int) -> list[Tensor]:
        """The first elements in memory of some parameters, other ones in every step."""
        found = []
        for index in self._indices(number):
            parameter = self.parameters[index].detach()
            if parameter.is_complex():
                parameter = torch.view_as_real(parameter)
            length = min(_ELEMENTS, parameter.numel()) if parameter.is_contiguous() else 1
            found.append(parameter.as_strided((length,), (1,)))
        return found


class SameStep(Observer):
    """Sends and compares the bits, and raises on every rank where they differ.

    Args:
        device: of the parameters. On CUDA a difference is raised one step later, so that the host
            does not wait for the step that it has just queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._check: StepCheck | None = None
        self._message: Tensor | None = None

    def reset(self, step: Step) -> None:
        """Forgets the last message, and looks at the parameters if they have become others."""
        self._message = None
        if self._check is None or self._check.parameters is not step.parameters:
            self._check = StepCheck(step.parameters, self._device)

    def message(self, step: Step, dtype: torch.dtype, again: bool) -> Tensor | None:
        """The bits of this rank."""
        assert self._check is not None
        self._message = self._check.message(step.number, again, dtype)
        return self._message

    def messages_averaged(self, step: Step) -> None:
        """Compares. On CPU it raises here."""
        assert self._check is not None
        assert self._message is not None
        self._check.read(self._message)
        if self._device.type != "cuda":
            self._require_equal_steps(step)

    def backward_ended(self, step: Step) -> None:
        """On CUDA, raises what the step before found."""
        if self._device.type == "cuda":
            self._require_equal_steps(step)

    def _require_equal_steps(self, step: Step) -> None:
        if self._check is not None and self._check.ranks_differ():
            report = self._check.describe([spec.name for spec in step.specs])
            raise step.peer_probe.disagreement(report, step.number + 1)
