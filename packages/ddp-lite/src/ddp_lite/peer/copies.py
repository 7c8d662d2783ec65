"""Averages, reduce-scatters and all-gathers by copies between the GPUs of one host.

NCCL's thread blocks hold SMs for as long as a collective runs, waiting for the slower rank
included, and matrix products that were tuned for all SMs become slower by much more than their
share. Here the transfers are plain copies between GPUs with peer access, which need no SM. Sums
are short kernels, and signals are kernels of one small thread block.

Every copy that is started costs the host time. So one call of the driver starts all copies to or
from a peer (``memcpy.py``); and while the GPU waits for the host, which leaves SMs idle, a kernel
does the work of all these copies.

An average over N ranks, of which rank r averages row r of each message::

    push      my values of row q go to rank q's memory, for every other q      (copy engine)
    barrier   all values of my row have arrived
    reduce    my row: what arrived and my own values, into my memory and my tensors
    barrier   all rows are averaged
    pull      row q comes from rank q's memory into my tensors                 (copy engine)

Values are sent from the tensors and received into them: nothing is packed, unless they travel in
another dtype. Each row is averaged once and copied, so all ranks end with the same bits; they may
differ from NCCL's in the last place. Of float32 tensors one kernel reads all ranks' values,
and writes their average both to the shared memory and to the tensor (``kernel.py``). It needs
Triton; torch's operations do the rest. ``schedule.py`` has the order of all operations,
``memory.py`` the memory that the ranks share.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.collectives import Completed, Queued, Waitable, require_floating
from ddp_lite.peer import schedule
from ddp_lite.peer.memcpy import copy_batch, copy_each, driver_call
from ddp_lite.peer.memory import SharedMemory
from ddp_lite.peer.schedule import Chunk, Kind, Operation

_Part = tuple[int, Tensor]  # first element in the row, values
Program = Callable[[int, int], list[Operation]]
# Smaller tensors that cannot share a launch of the kernel are left to torch, between two ranks, of
# which it averages any number in two launches. Among more ranks it would first pack them.
_FUSED_NUMEL = 2**20
_NO_RANGE = nullcontext()


class PeerCopies:
    """Collectives by copies. Every rank calls the same ones in the same order.

    Each returns at once with something to wait for, like an asynchronous collective; until then
    the tensors must be left alone. They can be recorded in a CUDA graph, see ``PeerMemory``: what
    is started in a recording must be waited for in it, and what was started before, before it.

    Args:
        memory: what the ranks share.
        wire_dtype: sums travel in this dtype, such as ``torch.bfloat16``, and are made in float32;
            None for the tensors' own. What ``all_gather`` sends keeps its dtype always.

    Attributes:
        memory: as given.
        fused: whether ``average`` uses a Triton kernel for float32 tensors: on CUDA, where Triton
            is installed.
        batched: whether one call starts all copies to or from a peer: on CUDA, where the driver
            has it. In the recording of a graph, which cannot hold such a call, they are single.
        by_kernels: whether kernels copy while the GPU waits for the host; never in a recording.

    Raises:
        TypeError: ``memory`` is something else, such as a process group.
        ValueError: a ``wire_dtype`` that is not floating-point.
    """

    def __init__(self, memory: SharedMemory, *, wire_dtype: torch.dtype | None = None) -> None:
        if not hasattr(memory, "row_bytes"):
            raise TypeError(
                f"memory must be what the ranks share, but got {type(memory).__name__}. Build "
                "PeerMemory(group) first"
            )
        if wire_dtype is not None:
            require_floating(wire_dtype, "wire_dtype")
        self.memory = memory
        self._wire_dtype = wire_dtype
        self._rank, self._world_size = memory.group.rank(), memory.group.size()
        on_cuda = memory.device.type == "cuda"
        self.fused = on_cuda and importlib.util.find_spec("triton") is not None
        self.batched = on_cuda and driver_call() is not None
        self.by_kernels = on_cuda
        self._previous: tuple[weakref.ref[Queued], torch.cuda.Event] | None = None
        self._transfer = copy_each
        self._plans: dict[tuple[object, ...], list[list[list[Chunk]]]] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.memory.group

    def average(self, tensors: Sequence[Tensor]) -> Waitable:
        """Starts replacing every element by its mean over the ranks.

        Args:
            tensors: contiguous, of one floating or complex dtype, any shapes.
        """
        values = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        values = [value.view(-1) for value in self._checked(values)]
        dtype = values[0].dtype if values else torch.float32
        wire = self._wire_dtype or dtype
        numels = [value.numel() for value in values]
        alignment = schedule.ALIGNMENT_BYTES // wire.itemsize

        def run() -> None:
            for rows in self._plan("together", wire, numels, alignment):
                parts = [_parts(row, values) for row in rows]
                if wire == dtype:
                    self._exchange(schedule.average, wire, parts, parts)
                    continue
                packed = [_empty(row, wire, self.memory.device) for row in rows]
                views = [_parts_at(row, whole) for row, whole in zip(rows, packed, strict=True)]
                _copy(_flattened(views), _flattened(parts))
                whole = [[(0, row)] if row.numel() else [] for row in packed]
                self._exchange(schedule.average, wire, whole, whole)
                _copy(_flattened(parts), _flattened(views))

        return self._start(run, values)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Waitable:
        """Starts averaging each input, of which rank r gets the r-th part.

        Args:
            outputs: one-dimensional, shape (n,), each n its own.
            inputs: one-dimensional, shape (world_size * n,), of the same dtype, left as they are.
        """
        self._check_shapes(parts=outputs, wholes=inputs)
        dtype = inputs[0].dtype if inputs else torch.float32
        wire = self._wire_dtype or dtype

        def run() -> None:
            for rows in self._plan("each", wire, [whole.numel() for whole in inputs]):
                sent = [_parts(row, inputs) for row in rows]
                if wire != dtype:
                    for peer in range(self._world_size):
                        if peer != self._rank:
                            packed = _empty(rows[peer], wire, self.memory.device)
                            _copy(
                                _flattened([_parts_at(rows[peer], packed)]),
                                [v for _, v in sent[peer]],
                            )
                            sent[peer] = [(0, packed)] if packed.numel() else []
                mine = [_range_of(outputs[p.tensor], p, self._rank) for p in rows[self._rank]]
                targets = [(p.at, t) for p, t in zip(rows[self._rank], mine, strict=True)]
                self._exchange(schedule.reduce_scatter, wire, sent, [targets])

        return self._start(run, [*outputs, *inputs])

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Waitable:
        """Starts filling each whole with every rank's part of it, in the order of ranks.

        Args:
            wholes: one-dimensional, shape (world_size * n,), each n its own.
            parts: one-dimensional, shape (n,), of the same dtype; may be this rank's range of its
                whole.
        """
        self._check_shapes(parts=parts, wholes=wholes)
        dtype = wholes[0].dtype if wholes else torch.float32

        def run() -> None:
            for rows in self._plan("each", dtype, [whole.numel() for whole in wholes]):
                received = [_parts(row, wholes) for row in rows]
                mine = [_range_of(parts[p.tensor], p, self._rank) for p in rows[self._rank]]
                sent = [(p.at, t) for p, t in zip(rows[self._rank], mine, strict=True)]
                self._exchange(schedule.all_gather, dtype, [sent], received)

        return self._start(run, [*wholes, *parts])

    def operations(self, program: Program) -> list[Operation]:
        """What this rank does in one window. A subclass that leaves operations out measures them.

        Args:
            program: ``average``, ``reduce_scatter`` or ``all_gather`` of ``schedule``.
        """
        return program(self._rank, self._world_size)

    # -- one message -------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], tensors: Sequence[Tensor]) -> Waitable:
        memory, stream = self.memory, self.memory.stream
        if stream is None:
            with torch.no_grad(), _traced():
                run()
            memory.queued(None)
            return Completed()
        current = torch.cuda.current_stream(memory.device)
        message = Queued(stream, tensors)
        with torch.no_grad(), _traced(), torch.cuda.stream(stream):
            memory.follow(current)
            self._choose_transfer(current, message)
            run()
            message.event = stream.record_event()
        memory.queued(message.event)
        return message

    def _exchange(
        self,
        program: Program,
        dtype: torch.dtype,
        sent: Sequence[Sequence[_Part]],
        received: Sequence[Sequence[_Part]],
    ) -> None:
        """Carries out one window.

        Args:
            program: makes the list of operations.
            dtype: what travels.
            sent: this rank's values of each row; of its own row only, if nothing is pushed.
            received: where each row's results go; of its own row only, if nothing is pulled.
        """
        memory, rank, world_size = self.memory, self._rank, self._world_size
        number = memory.next_slot()
        slots = [memory.slot(peer, number, dtype) for peer in range(world_size)]
        result = schedule.result_row(world_size)
        own_sent = sent[rank if len(sent) > 1 else 0]
        own_received = received[rank if len(received) > 1 else 0]
        for operation in self.operations(program):
            peer = operation.peer
            match operation.kind:
                case Kind.BARRIER:
                    memory.barrier()
                case Kind.STAGGER:
                    memory.stagger()
                case Kind.PUSH:
                    landing = slots[peer][schedule.landing_row(rank, peer, world_size)]
                    self._transfer(_places(landing, sent[peer]), _values(sent[peer]))
                case Kind.REDUCE if program is schedule.average:
                    self._average(slots[rank], own_sent)
                case Kind.REDUCE:
                    self._reduce_into(own_received, slots[rank], own_sent)
                case Kind.PUBLISH:
                    copy_each(_places(slots[rank][result], own_sent), _values(own_sent))
                    if not all(map(_same_memory, own_sent, own_received)):
                        _copy(_values(own_received), _values(own_sent))
                case Kind.PULL:
                    source = _places(slots[peer][result], received[peer])
                    self._transfer(_values(received[peer]), source)

    def _choose_transfer(self, current: torch.cuda.Stream, message: Queued) -> None:
        """Chooses what copies for a message: copy engines, or kernels while the GPU waits.

        Every rank may choose for itself: what is copied is the same.
        """
        previous, self._previous = self._previous, None
        if torch.cuda.is_current_stream_capturing():
            self._transfer = copy_each
            return
        self._previous = weakref.ref(message), current.record_event()
        gpu_waits = False
        if previous is not None:
            # If the GPU has come to where the message before was started, it is at most that far
            # behind the host, and soon waits for it. If that message was awaited since, other work
            # lies between the two, such as the rest of a step, and nothing follows.
            before, start = previous[0](), previous[1]
            gpu_waits = before is not None and not before.awaited and start.query()
        if self.by_kernels and gpu_waits:
            self._transfer = _copy
        else:
            self._transfer = copy_batch if self.batched else copy_each

    def _average(self, rows: Tensor, own: Sequence[_Part]) -> None:
        """Averages this rank's row, into its result row and into ``own``, which it is read from.

        Args:
            rows: this rank's slot, shape (rows in a slot, elements in a row).
            own: this rank's values, of the same dtype.
        """
        result = rows[schedule.result_row(self._world_size)]
        if self.fused and rows.dtype == torch.float32:
            from ddp_lite.peer.kernel import average, shares_launch

            least = _FUSED_NUMEL if self._world_size == 2 else 0
            by_torch = []
            starts, values = [], []
            for at, value in own:
                if value.numel() >= least or shares_launch(value, at):
                    starts.append(at)
                    values.append(value)
                else:
                    by_torch.append((at, value))
            average(values, starts, rows, result, self._world_size)
            own = by_torch
        if not own:
            return
        values, averages = _values(own), [result[at : at + value.numel()] for at, value in own]
        if self._world_size == 2:
            # a + (b - a)/2, computed in float32 and rounded once; the result is where a landed
            torch._foreach_lerp_(averages, values, 0.5)
        else:
            copy_each(_places(rows[self._world_size - 1], own), values)
            length = max(at + value.numel() for at, value in own)
            torch.mean(rows[: self._world_size, :length], 0, out=result[:length])
        _copy(values, averages)

    def _reduce_into(self, targets: Sequence[_Part], rows: Tensor, own: Sequence[_Part]) -> None:
        """Averages this rank's row into ``targets``, which divide it as ``own`` does."""
        if self._world_size > 2:
            copy_each(_places(rows[self._world_size - 1], own), _values(own))
        for (at, target), (_, value) in zip(targets, own, strict=True):
            values = rows[: self._world_size, at : at + target.numel()]
            if self._world_size > 2:
                torch.mean(values, 0, dtype=target.dtype, out=target)
            elif target.dtype == values.dtype:
                torch.lerp(values[0], value, 0.5, out=target)
            else:
                torch.add(value, values[0], out=target).mul_(0.5)

    def _plan(
        self, cut: str, dtype: torch.dtype, numels: Sequence[int], alignment: int = 1
    ) -> list[list[list[Chunk]]]:
        key = (cut, dtype, *numels)
        if key not in self._plans:
            rows = (
                schedule.cut_together(numels, self._world_size, alignment)
                if cut == "together"
                else schedule.cut_each(numels, self._world_size)
            )
            self._plans[key] = schedule.windows(rows, self.memory.row_bytes // dtype.itemsize)
        return self._plans[key]

    # -- arguments ---------------------------------------------------------------------------

    def _checked(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for tensor in tensors:
            first = tensors[0]
            if tensor.dtype != first.dtype or not tensor.is_floating_point():
                raise ValueError(
                    "tensors of one message must have one floating dtype, but got "
                    f"{first.dtype} and {tensor.dtype}. Start one message per dtype"
                )
            if tensor.device != self.memory.device:
                raise ValueError(
                    f"tensors must be on {self.memory.device}, where this rank's shared memory "
                    f"is, but got one on {tensor.device}. Call torch.cuda.set_device before "
                    "PeerMemory is built"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"tensors must be contiguous, but got strides {tensor.stride()} for shape "
                    f"{tuple(tensor.shape)}. Call contiguous() first"
                )
        return tensors

    def _check_shapes(self, *, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        if len(parts) != len(wholes):
            raise ValueError(
                f"there must be one part for each whole, but got {len(parts)} parts and "
                f"{len(wholes)} wholes. Pass lists of the same length"
            )
        self._checked([*wholes, *parts])
        shapes = [
            (tuple(part.shape), tuple(whole.shape))
            for part, whole in zip(parts, wholes, strict=True)
        ]
        for part, whole in shapes:
            if len(part) != 1 or whole != (part[0] * self._world_size,):
                raise ValueError(
                    "a whole must have one dimension and world_size times the elements of its "
                    f"part, but got {whole} and {part} for {self._world_size} ranks. Pad both"
                )


def _traced() -> AbstractContextManager[object]:
    """A range in the trace of a running profiler: copies by themselves do not say what for."""
    if not torch._C._autograd._profiler_enabled():  # a range costs microseconds even then
        return _NO_RANGE
    return torch.profiler.record_function("ddp_lite::exchange")


def _parts(row: Sequence[Chunk], tensors: Sequence[Tensor]) -> list[_Part]:
    """The chunks of a row as views of the one-dimensional tensors."""
    parts = []
    for chunk in row:
        tensor = tensors[chunk.tensor]
        if chunk.end - chunk.begin != tensor.numel():  # a view costs the host microseconds
            tensor = tensor[chunk.begin : chunk.end]
        parts.append((chunk.at, tensor))
    return parts


def _parts_at(row: Sequence[Chunk], whole: Tensor) -> list[_Part]:
    """The chunks of a row as views of the row itself."""
    return [(p.at, whole[p.at : p.at + p.end - p.begin]) for p in row]


def _range_of(part: Tensor, chunk: Chunk, rank: int) -> Tensor:
    """The chunk of a whole, as a view of this rank's part of that whole."""
    first = rank * part.numel()
    return part[chunk.begin - first : chunk.end - first]


def _empty(row: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(schedule.length_of(row), dtype=dtype, device=device)


def _flattened(rows: Sequence[Sequence[_Part]]) -> list[Tensor]:
    return [tensor for row in rows for _, tensor in row]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _values(parts: Sequence[_Part]) -> list[Tensor]:
    return [values for _, values in parts]


def _places(row: Tensor, parts: Sequence[_Part]) -> list[Tensor]:
    """Where the parts of a row lie in it, one after the other."""
    if not parts:
        return []
    (first, _), (last, values) = parts[0], parts[-1]
    sizes = [values.numel() for _, values in parts]
    return list(row[first : last + values.numel()].split(sizes))


def _same_memory(first: _Part, second: _Part) -> bool:
    return first[1].data_ptr() == second[1].data_ptr()
