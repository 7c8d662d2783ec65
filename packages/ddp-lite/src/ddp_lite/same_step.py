"""Side task: do all ranks make the same step, from the same weights?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp_lite.engine import Engine, SideTask

# 128 elements are compared in 8 steps of a model with 32 parameters or fewer.
_PARAMETERS, _ELEMENTS = 4, 4
_COUNT_BITS = 8
_BITS = torch.arange(32, dtype=torch.int32, device="cpu")
_REMEDY = (
    ". Where weights differ on purpose, as in sharpness-aware minimisation, run forward and "
    "backward inside `with wrapped.different_weights():`"
)


class SameStep(SideTask):
    """Sends a few bits with the last reduction of a step, and raises where the ranks' bits differ.

    A rank that runs a backward more than the others, skips one, or whose optimizer did something
    else trains on, one synchronisation apart, and nothing fails. So every rank sends the number of
    the synchronisation, and some elements of some parameters, other ones in every step.

    Averaging must not blur them, whatever the dtype and the number of ranks. Every bit b therefore
    travels as the pair (b, 1 - b). Where a rank sent 0, the average is exactly 0 if all ranks sent
    0, and positive if any rank sent 1; and two ranks that differ both have such a place. So either
    no rank finds a difference, or every rank that differs from another does, at the same reduction.

    The bits are compared as soon as that reduction has ended, before another one starts: a rank
    that got more gradient for the last bucket reduces it a second time, and would wait for ranks
    that have raised. On CUDA a difference is raised one step later, so that the host does not wait
    for the step that it has just queued.

    Args:
        device: of the parameters.

    Attributes:
        compare_weights: False leaves the elements out of the comparison.
    """

    def __init__(self, device: torch.device) -> None:
        self.compare_weights = True
        self._bits = _BITS.to(device)
        counts = torch.arange(2**_COUNT_BITS, dtype=torch.int32, device="cpu")
        # Rows of a table on the device: a number from the host would be a copy of its own.
        self._counts = ((counts.unsqueeze(1) >> _BITS[:_COUNT_BITS]) & 1).to(device)
        self._parameters: Sequence[nn.Parameter] = ()
        self._lengths: list[int] = []
        self._number = 0  # synchronisations that were finished before this one
        self._message: Tensor | None = None
        self._sent_zero: Tensor | None = None
        self._flag: Tensor | None = None  # positive if a difference was found; on CUDA, on the host
        self._event: torch.cuda.Event | None = None  # on CUDA, the flag has arrived
        self._unread: Tensor | None = None  # on CUDA, differences that the host has not looked at

    def begin(self, engine: Engine) -> None:
        """Looks at the parameters, if they have become others."""
        if self._parameters is not engine.parameters:
            self._parameters = engine.parameters
            # Elements of the last dimension, which every layout in memory can show without a copy.
            self._lengths = [min(_ELEMENTS, p.shape[-1] if p.ndim else 1) for p in self._parameters]

    def message(self, engine: Engine, dtype: torch.dtype, again: bool) -> Tensor | None:
        """This rank's zeros and ones, shape (2, bits)."""
        self._number = engine.ranks.step - 1
        with torch.no_grad():
            values = torch.cat([p.float() for p in self._sample()]).view(torch.int32)
            if not self.compare_weights:
                values = torch.full_like(values, -1)
            bits = (values.unsqueeze(1) >> self._bits) & 1
            count = self._counts[(2 * self._number + again) % 2**_COUNT_BITS]
            own = torch.cat([count, bits.view(-1)]).to(dtype)
            self._message = torch.stack([own, 1 - own])
            self._sent_zero = self._message.flip(0)
        return self._message

    def message_averaged(self, engine: Engine) -> None:
        """Compares the average with the bits that were sent. On CPU it raises here."""
        assert self._message is not None
        assert self._sent_zero is not None
        found = (self._message * self._sent_zero).sum()
        if found.device.type != "cuda":
            self._flag = found
            self._require_equal_steps(engine)
        elif not torch.cuda.is_current_stream_capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
                self._flag = torch.zeros((), device="cpu", pin_memory=True)
            assert self._flag is not None
            self._unread = found if self._unread is None else self._unread + found
            self._flag.copy_(self._unread, non_blocking=True)
            self._event.record(torch.cuda.current_stream(found.device))

    def backward_ended(self, engine: Engine) -> None:
        """On CUDA, raises if the step before found a difference.

        While a CUDA graph is captured, when the host cannot wait, nothing is looked at.
        """
        if self._event is not None and not torch.cuda.is_current_stream_capturing():
            self._event.synchronize()
            self._unread = None
            self._require_equal_steps(engine)

    def _require_equal_steps(self, engine: Engine) -> None:
        if self._flag is None or not self._flag.item() > 0:
            return
        # The weights may have been updated since.
        shown = ", ".join(
            f"{engine.specs[index].name} begins with {first[0].item():.9g}"
            for index, first in zip(self._indices(), self._sample(), strict=True)
        )
        raise engine.ranks.disagreement(
            f"it is making synchronisation {self._number + 1} and its {shown}", _REMEDY
        )

    def _indices(self) -> list[int]:
        count = len(self._parameters)
        return [(_PARAMETERS * self._number + i) % count for i in range(min(_PARAMETERS, count))]

    def _sample(self) -> list[Tensor]:
        """The first elements of some parameters, other ones in every step."""
        found = []
        for index in self._indices():
            parameter = self._parameters[index].detach()
            if parameter.is_complex():
                parameter = torch.view_as_real(parameter)
            step = parameter.stride(-1) if parameter.ndim else 1
            found.append(parameter.as_strided((self._lengths[index],), (step,)))
        return found
