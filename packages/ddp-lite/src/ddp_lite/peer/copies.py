"""Averages, reduce-scatters and all-gathers by copies between the GPUs of one host.

NCCL's thread blocks hold SMs for as long as a collective runs, waiting for the slower rank
included, and matrix products that were tuned for all SMs become slower by much more than their
share. Here the transfers are plain copies between GPUs with peer access, which need no SM. Sums
are short kernels, and signals are kernels of one small thread block.

Every operation that is started costs the host time, and so does every view of a tensor. So copies
and kernels are given addresses, and one call of the driver starts all copies to or from a peer
(``memcpy.py``, ``kernel.py``).

An average over N ranks, of which rank r averages row r of each message::

    push      my values of row q go to rank q's memory, for every other q      (copy engine)
    barrier   all values of my row have arrived
    reduce    my row: what arrived and my own values, into my memory and my tensors
    barrier   all rows are averaged
    pull      row q comes from rank q's memory into my tensors                 (copy engine)

Values are sent from the tensors and received into them: nothing is packed. Each row is averaged
once and copied, so all ranks end with the same bits; they may differ from NCCL's in the last place.
One kernel reads all ranks' values, and writes their mean to the tensor, and to the shared memory if
others pull it (``kernel.py``); torch's operations do the same on a host.
``schedule.py`` has the order of all operations, ``memory.py`` the memory that the ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, Never

import torch
from torch import Tensor

from ddp_lite.peer import schedule
from ddp_lite.peer.memcpy import Transfer, copy_batch, copy_each, copy_on_host, driver_call
from ddp_lite.peer.memory import SharedMemory
from ddp_lite.peer.rows import Layout, Row
from ddp_lite.peer.schedule import Kind, Operation
from ddp_lite.reduce import Reduction, Waitable
from ddp_lite.wire import Queued

Program = Callable[[int, int], list[Operation]]
# Smaller tensors that cannot share a launch of the kernel are left to torch, between two ranks,
# where four launches average any number of float32 ones.
_FUSED_NUMEL = 2**20
_NO_RANGE = nullcontext()


class PeerCopies:
    """Collectives by copies. Every rank calls the same ones in the same order.

    Each returns at once with something to wait for, like an asynchronous collective; until then
    the tensors must be left alone. They can be recorded in a CUDA graph, see ``PeerMemory``: what
    is started in a recording must be waited for in it, and what was started before, before it.

    Args:
        memory: what the ranks share.

    Attributes:
        memory, group: as given, and its ranks.
        fused: whether a Triton kernel computes means: on CUDA.
        casts: True: outputs may have another floating dtype than inputs.
        batched: whether one call starts all copies to or from a peer: on CUDA, where the driver
            has it. In the recording of a graph, which cannot hold such a call, they are single.

    Raises:
        TypeError: ``memory`` is something else, such as a process group, or ``wire_dtype`` is
            given, which there was.
    """

    casts = True

    def __init__(self, memory: SharedMemory, **removed: Never) -> None:
        refuse_removed(type(self), removed)
        if not hasattr(memory, "row_bytes"):
            raise TypeError(
                f"memory must be what the ranks share, but got {type(memory).__name__}. Build "
                "PeerMemory(group) first"
            )
        self.memory, self.group = memory, memory.group
        self._rank, self._world_size = memory.group.rank(), memory.group.size()
        on_cuda = memory.device.type == "cuda"
        self.fused = on_cuda
        self.batched = on_cuda and driver_call() is not None
        self._singly = copy_each if on_cuda else copy_on_host
        self._transfer: Transfer = self._singly
        self._plans: dict[tuple[object, ...], list[list[Layout]]] = {}
        self._slots: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def average(self, tensors: Sequence[Tensor]) -> Waitable:
        """Starts replacing every element by its mean over the ranks.

        Args:
            tensors: contiguous, of one floating or complex dtype, any shapes.
        """
        values = self._checked([torch.view_as_real(t) if t.is_complex() else t for t in tensors])
        dtype = values[0].dtype if values else torch.float32
        numels = [value.numel() for value in values]
        alignment = schedule.ALIGNMENT_BYTES // dtype.itemsize

        def run() -> None:
            addresses = _addresses(values)
            for window in self._plan("together", dtype, numels, alignment):
                rows = [layout.row(values, addresses) for layout in window]
                self._exchange(schedule.average, dtype, rows, rows)

        return self._start(run, values)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Waitable:
        """Starts averaging each input, of which rank r gets the r-th part.

        Args:
            outputs: one-dimensional, shape (n,), each n its own, of any one floating dtype: means
                are summed in float32 at least, and rounded once, to this dtype.
            inputs: one-dimensional, shape (world_size * n,), left as they are.
        """
        self._check_shapes(parts=outputs, wholes=inputs, averaged=True)
        dtype = inputs[0].dtype if inputs else torch.float32

        def run() -> None:
            whole_at, part_at = _addresses(inputs), _addresses(outputs)
            for *window, own in self._plan("each", dtype, [whole.numel() for whole in inputs]):
                sent = [layout.row(inputs, whole_at) for layout in window]
                self._exchange(schedule.reduce_scatter, dtype, sent, [own.row(outputs, part_at)])

        return self._start(run, [*outputs, *inputs])

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Waitable:
        """Starts filling each whole with every rank's part of it, in the order of ranks.

        Args:
            wholes: one-dimensional, shape (world_size * n,), each n its own.
            parts: one-dimensional, shape (n,); may be this rank's range of its whole. Floating ones
                are cast to another dtype before they are sent.
        """
        self._check_shapes(parts=parts, wholes=wholes, averaged=False)
        dtype = wholes[0].dtype if wholes else torch.float32

        def run() -> None:
            whole_at, part_at = _addresses(wholes), _addresses(parts)
            for *window, own in self._plan("each", dtype, [whole.numel() for whole in wholes]):
                received = [layout.row(wholes, whole_at) for layout in window]
                self._exchange(schedule.all_gather, dtype, [own.row(parts, part_at)], received)

        return self._start(run, [*wholes, *parts])

    # -- one message -------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], tensors: Sequence[Tensor]) -> Waitable:
        memory, stream = self.memory, self.memory.stream
        if stream is None:
            with torch.no_grad(), _traced():
                run()
            return Reduction((), ())
        message = Queued(stream, tensors)
        start = torch.cuda.current_stream(memory.device).record_event()
        with torch.no_grad(), _traced(), torch.cuda.stream(stream):
            memory.follow(start)
            self._transfer = self._choose_transfer()
            run()
            message.event = stream.record_event()
        return message

    def _exchange(
        self, program: Program, dtype: torch.dtype, sent: Sequence[Row], received: Sequence[Row]
    ) -> None:
        """Carries out one window.

        Args:
            program: makes the list of operations.
            dtype: what travels.
            sent: this rank's values of each row; of its own row only, if nothing is pushed.
            received: where each row's results go; of its own row only, if nothing is pulled.
        """
        memory, rank, world_size = self.memory, self._rank, self._world_size
        slots = self._slots_of(memory.next_slot(), dtype)
        stream = 0 if memory.stream is None else memory.stream.cuda_stream
        result = schedule.result_row(world_size)
        own_sent = sent[rank if len(sent) > 1 else 0]
        own_received = received[rank if len(received) > 1 else 0]
        for operation in program(rank, world_size):
            peer = operation.peer
            match operation.kind:
                case Kind.BARRIER:
                    memory.barrier()
                case Kind.STAGGER:
                    memory.stagger()
                case Kind.PUSH:
                    row = sent[peer]
                    landing = schedule.landing_row(rank, peer, world_size)
                    there = _places(slots[peer], landing, row.layout)
                    self._transfer(there, row.addresses, row.layout.sizes, stream)
                case Kind.REDUCE:
                    pulled = result if program is schedule.average else None
                    self._average(slots[rank], own_sent, own_received, world_size, pulled)
                case Kind.PUBLISH:
                    self._average(slots[rank], own_sent, own_received, 1, result)
                case Kind.PULL:
                    row = received[peer]
                    there = _places(slots[peer], result, row.layout)
                    self._transfer(row.addresses, there, row.layout.sizes, stream)

    def _choose_transfer(self) -> Transfer:
        """What copies to and from peers: a recording cannot hold the driver's one call for many."""
        if self.batched and not torch.cuda.is_current_stream_capturing():
            return copy_batch
        return self._singly

    def _average(
        self, slot: Tensor, own: Row, targets: Row, world_size: int, result: int | None
    ) -> None:
        """Averages ``world_size`` ranks' values of a row: those in a slot and this rank's own.

        One rank's own are only cast. Means go to ``targets``, and to the row ``result`` of the slot
        if the others pull them.
        """
        layout = own.layout
        values, places = own.addresses, targets.addresses
        entries = list(zip(values, places, layout.starts, layout.numels, strict=True))
        by_torch = [True] * len(entries)
        if self.fused and entries:
            from ddp_lite.peer.kernel import DTYPES, average, shares_launch

            given, into = own.tensors[0].dtype, targets.tensors[0].dtype
            if {slot.dtype, given, into} <= DTYPES.keys():
                least = _FUSED_NUMEL if world_size == 2 and result is not None else 0
                by_torch = [e[3] < least and not shares_launch(*e) for e in entries]
                chosen = [e for e, other in zip(entries, by_torch, strict=True) if not other]
                average(chosen, slot, world_size, given, into, result)
        if any(by_torch):
            rows = [list(compress(layout.views_in(row), by_torch)) for row in slot]
            means = list(compress(own.views(), by_torch))
            if world_size > 1:
                exact = torch.promote_types(slot.dtype, torch.float32)
                means = list(torch._foreach_add([mean.to(exact) for mean in means], rows[0]))
                for others in rows[1 : world_size - 1]:
                    torch._foreach_add_(means, others)
                torch._foreach_div_(means, world_size)
            torch._foreach_copy_(list(compress(targets.views(), by_torch)), means)
            if result is not None:
                torch._foreach_copy_(rows[result], means)

    def _slots_of(self, number: int, dtype: torch.dtype) -> list[Tensor]:
        """Each rank's slot of a number."""
        key = (number, dtype)
        if key not in self._slots:
            ranks = range(self._world_size)
            self._slots[key] = [self.memory.slot(peer, number, dtype) for peer in ranks]
        return self._slots[key]

    def _plan(
        self, cut: str, dtype: torch.dtype, numels: Sequence[int], alignment: int = 1
    ) -> list[list[Layout]]:
        """For each window the layout of each row, and for "each" that of this rank's own parts."""
        key = (cut, dtype, *numels)
        if key not in self._plans:
            rows = (
                schedule.cut_together(numels, self._world_size, alignment)
                if cut == "together"
                else schedule.cut_each(numels, self._world_size)
            )
            windows = schedule.windows(rows, self.memory.row_bytes // dtype.itemsize)
            if cut == "each":
                lengths = [numel // self._world_size for numel in numels]
                for window in windows:
                    window.append(schedule.inside_parts(window[self._rank], self._rank, lengths))
            self._plans[key] = [[Layout(row, dtype.itemsize) for row in w] for w in windows]
        return self._plans[key]

    # -- arguments ---------------------------------------------------------------------------

    def _checked(self, tensors: Sequence[Tensor], *, floating: bool = True) -> Sequence[Tensor]:
        """The tensors; ValueError unless they are contiguous, here, and of one (floating) dtype."""
        if not tensors:
            return tensors
        dtype, device = tensors[0].dtype, self.memory.device
        for tensor in tensors:
            if tensor.dtype != dtype or (floating and not dtype.is_floating_point):
                raise ValueError(
                    "tensors of one message must have one floating dtype, but got "
                    f"{dtype} and {tensor.dtype}. Start one message per dtype"
                )
            if tensor.device != device:
                raise ValueError(
                    f"tensors must be on {device}, where this rank's shared memory "
                    f"is, but got one on {tensor.device}. Call torch.cuda.set_device before "
                    "PeerMemory is built"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"tensors must be contiguous, but got strides {tensor.stride()} for shape "
                    f"{tuple(tensor.shape)}. Call contiguous() first"
                )
        return tensors

    def _check_shapes(
        self, *, parts: Sequence[Tensor], wholes: Sequence[Tensor], averaged: bool
    ) -> None:
        if len(parts) != len(wholes):
            raise ValueError(
                f"there must be one part for each whole, but got {len(parts)} parts and "
                f"{len(wholes)} wholes. Pass lists of the same length"
            )
        cast = all(tensor.is_floating_point() for tensor in (*wholes[:1], *parts[:1]))
        for tensors in (wholes, parts) if cast else ([*wholes, *parts],):
            self._checked(tensors, floating=averaged)
        for part, whole in zip(parts, wholes, strict=True):
            if part.dim() != 1 or whole.shape != (part.numel() * self._world_size,):
                raise ValueError(
                    "a whole must have one dimension and world_size times the elements of its "
                    f"part, but got {tuple(whole.shape)} and {tuple(part.shape)} for "
                    f"{self._world_size} ranks. Pad both"
                )


def refuse_removed(owner: type, removed: dict[str, Any]) -> None:
    """Refuses keyword arguments, and names the replacement of one that there was.

    Raises:
        TypeError: if there are any.
    """
    if removed:
        raise TypeError(
            f"{owner.__name__} has no argument {', '.join(removed)}. Copies send gradients in "
            "their own dtype; to send fewer bytes, pass wire_dtype= to BucketedDDP, which then "
            "sends them by collectives"
        )


def _traced() -> AbstractContextManager[object]:
    """A range in the trace of a running profiler: copies by themselves do not say what for."""
    if not torch._C._autograd._profiler_enabled():  # a range costs microseconds even then
        return _NO_RANGE
    return torch.profiler.record_function("ddp_lite::exchange")


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _places(slot: Tensor, row: int, layout: Layout) -> list[int]:
    """The addresses of a row's chunks in a slot."""
    begin = _row_at(slot, row)
    return [begin + place for place in layout.places]


def _row_at(slot: Tensor, row: int) -> int:
    return slot.data_ptr() + row * slot.stride(0) * slot.itemsize
