"""Runs a warp-specialised Gluon kernel on the host: its own code, in any order that barriers allow.

The kernel's functions are called as plain Python, with NumPy behind the names that they use. Each
partition is a thread, of which one runs at a time; wherever the hardware could change over, a
random choice decides who goes on, and whether one of the copies under way arrives. Checked is that

- nobody waits for ever, and nobody arrives at a hardware barrier twice before it opens;
- what asynchronous products and stores read stays as it is until they are waited for;
- results of products are not used before the wait;
- no barrier is left with arrivals, no product, copy or store is under way at the end.

What a copy has not brought yet, or a store has not been fenced, is NaN for its readers.

The warps of one partition are one here, so what Triton inserts between them is not seen.
"""

from __future__ import annotations

import builtins
import random
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gluon_grid import Grid

WARP = 32  # threads
WARP_GROUP = 128  # threads of a partition
BYTES = {"half": 2, "float32": 4}


class SimulationError(AssertionError):
    """The kernel does what it must not do on some schedule."""


class Tensor:
    """A tensor in registers, which may still be the result of a product under way."""

    def __init__(self, value: Any, layout: Any = None) -> None:
        self.array = np.asarray(value)
        self.type = types.SimpleNamespace(layout=layout)
        self.dtype = None
        self.pending = False

    @property
    def value(self) -> Any:
        if self.pending:
            raise SimulationError("a product is used before it was waited for")
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """Numbers have 64 bits here, whatever they are."""
        if not bitcast:
            return self
        return Tensor(self.value.view(np.int64 if dtype == "int32" else np.float64))


def _elementwise(name: str) -> Callable[[Tensor, Any], Tensor]:
    def operator(self: Tensor, other: Any) -> Tensor:
        return Tensor(getattr(self.value, name)(_array(other)), self.type.layout)

    return operator


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and",
    "or",
    "le",
    "ge",
    "lt",
    "eq",
    "ne",
):
    setattr(Tensor, f"__{_name}__", _elementwise(f"__{_name}__"))
    if _name in ("add", "sub", "mul", "truediv"):
        setattr(Tensor, f"__r{_name}__", _elementwise(f"__r{_name}__"))


def _array(x: Any) -> Any:
    return x.value if isinstance(x, Tensor) else np.asarray(x)


class Integer(int):
    """A number that has a tensor's ``to``, and so have results of arithmetic with it."""

    def to(self, dtype: Any) -> Integer:
        return self


def _integral(name: str) -> Callable[[Integer, Any], Any]:
    def operator(self: Integer, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return result if result is NotImplemented else Integer(result)

    return operator


for _name in ("add", "sub", "mul", "floordiv", "mod", "radd", "rmul"):
    setattr(Integer, f"__{_name}__", _integral(f"__{_name}__"))


class Shared:
    """A view of shared memory."""

    def __init__(self, machine: Machine, dtype: str, array: Any) -> None:
        self.machine, self.dtype, self.array = machine, dtype, array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def address(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def _view(self, array: Any) -> Shared:
        return Shared(self.machine, self.dtype, array)

    def index(self, i: int) -> Shared:
        if not 0 <= i < self.shape[0]:
            raise SimulationError(f"index {i} of shared memory of shape {self.shape}")
        return self._view(self.array[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        index = [slice(None)] * self.array.ndim
        index[dim] = slice(start, start + length)
        view = self._view(self.array[tuple(index)])
        assert view.shape[dim] == length
        return view

    def reinterpret(self, dtype: str, shape: Sequence[int], layout: Any) -> Shared:
        return self._view(self.array.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.array.transpose(order))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.array.copy(), layout)

    def store(self, x: Tensor) -> None:
        """Asynchronous readers, which half types alone have, see NaN until the fence."""
        assert x.shape == self.shape
        if self.dtype in ("int32", "float32"):
            self.array[...] = x.value
            return
        self.machine.here.unfenced.append((self.array, x.value.copy()))
        self.array[...] = np.nan


@dataclass
class Descriptor:
    """Tiles of a tensor in global memory."""

    array: Any
    block: Sequence[int]
    dtype: str = "half"
    layout: Any = None

    @property
    def shape(self) -> Sequence[int]:
        return tuple(self.array.shape)

    @property
    def block_shape(self) -> Sequence[int]:
        return self.block

    def inside(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tile at ``at`` what lies inside the tensor: there, and in the tile."""
        ends = [
            max(0, min(n, i + b) - i) for i, b, n in zip(at, self.block, self.shape, strict=True)
        ]
        return (
            tuple(slice(i, i + e) for i, e in zip(at, ends, strict=True)),
            tuple(slice(0, e) for e in ends),
        )

    def load(self, at: Sequence[int]) -> Any:
        tile = np.zeros(self.block)
        outer, inner = self.inside(at)
        tile[inner] = self.array[outer]
        return tile

    def store(self, at: Sequence[int], tile: Any) -> None:
        outer, inner = self.inside(at)
        self.array[outer] = tile.reshape(self.block)[inner]


class PackedDescriptor(Descriptor):
    """Tiles of a packed (T, H, D) tensor, which begin at (end, end, head, token, column)."""

    end = 2**30

    def inside(self, at: Sequence[int]) -> tuple[Any, Any]:
        if at[0] != self.end:
            raise SimulationError("a place of no packed sequence")
        _, stop, head, row, column = at
        tile_rows, tile_columns = self.block[-2:]
        rows = min(max(self.end - row, 0), tile_rows) if stop >= 0 else 0  # outside the tensor
        columns = max(0, min(self.shape[2] - column, tile_columns))
        first = stop - (self.end - row)
        there = (slice(first, first + rows), head, slice(column, column + columns))
        return there, (0, 0, 0, slice(0, rows), slice(0, columns))


@dataclass
class Pointer:
    """Addresses in global memory, in elements."""

    memory: Any
    offsets: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + _array(other))


@dataclass
class TransactionBarrier:
    """A barrier in shared memory that one arrival and some bytes complete."""

    count: int
    arrivals: int = 0
    bytes: int = 0
    completed: int = 0

    def update(self) -> None:
        if self.arrivals == self.count and self.bytes == 0:
            self.completed += 1
            self.arrivals = 0


@dataclass
class HardwareBarrier:
    """A barrier that opens when so many threads have arrived."""

    threads: int = 0
    arrived: dict[str, int] = field(default_factory=dict)  # threads of each partition
    opened: int = 0

    def arrive(self, who: str, threads: int, own: int) -> None:
        """``own``: how many threads come, of the ``threads`` that open the barrier."""
        if self.arrived and self.threads != threads:
            raise SimulationError(f"{threads} and {self.threads} threads at one barrier")
        if who in self.arrived:
            raise SimulationError(f"{who} arrives twice at one barrier")
        self.threads = threads
        self.arrived[who] = own
        if sum(self.arrived.values()) == threads:
            self.arrived, self.opened = {}, self.opened + 1


@dataclass
class Partition:
    """A warp group."""

    name: str
    weight: float
    turn: Any = field(default_factory=threading.Lock)  # is held until it is this one's turn
    condition: Callable[[], bool] = lambda: True
    done: bool = False
    products: list[Callable[[], None]] = field(default_factory=list)
    stores: list[Callable[[], None]] = field(default_factory=list)
    unfenced: list[tuple[Any, Any]] = field(default_factory=list)


class Machine:
    """One program of a kernel, on one random schedule."""

    def __init__(
        self, seed: int, program: int, programs: int = 1, grid: Grid | None = None
    ) -> None:
        self.grid = grid or Grid(1)
        self.random = random.Random(seed)
        self.program, self.programs = program, programs
        self.partitions: list[Partition] = []
        self.copies: list[Callable[[], None]] = []
        self.copies_weight = 1.0
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.waiting = 0  # partitions that wait for predecessors
        self.hardware: dict[int, HardwareBarrier] = {}
        self.transaction: dict[int, TransactionBarrier] = {}
        self.memory: list[Any] = []  # kept, so that addresses stay unique

    # ---- schedule ----

    def run(self, partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """Runs all partitions to their ends."""
        threads = []
        for i, (function, arguments) in enumerate(partitions):
            partition = Partition(f"partition {i}", self.random.choice((1, 1, 30)))
            partition.turn.acquire()
            self.partitions.append(partition)
            work = (partition, function, arguments)
            threads.append(threading.Thread(target=self._run_one, args=work, daemon=True))
        self.copies_weight = self.random.choice((0.1, 1, 30))
        for thread in threads:
            thread.start()
        self._give_way()
        self.ended.wait()
        for partition in self.partitions:
            if not partition.done:  # an error stops it
                partition.turn.release()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        for partition in self.partitions:
            if partition.products or partition.stores or partition.unfenced:
                raise SimulationError(f"{partition.name} ends with something under way")
        if self.copies or any(b.arrived for b in self.hardware.values()):
            raise SimulationError("the end leaves copies, or arrivals at a barrier")

    def _run_one(self, partition: Partition, function: Any, arguments: Sequence[Any]) -> None:
        partition.turn.acquire()
        try:
            if not self.error:
                function(*arguments)
        except BaseException as error:  # noqa: BLE001 (raised again by run)
            self.error = self.error or error
        partition.done = True
        self._give_way()

    def _give_way(self, me: Partition | None = None) -> None:
        """Lets copies arrive until a partition is chosen, which goes on; returns if that is ``me``.

        Otherwise ``me`` waits for its turn, or raises what is wrong.
        """
        chosen = None if self.error else self._choose()
        if chosen is None:
            self.ended.set()
        elif chosen is not me:
            chosen.turn.release()
            if me:
                me.turn.acquire()
        if me and self.error:
            raise SimulationError("stopped")

    def _choose(self) -> Partition | None:
        """Who goes on; None if all have ended, or nobody ever can."""
        while not all(p.done for p in self.partitions):
            signals = self.grid.signals
            able: list[Any] = [p for p in self.partitions if not p.done and p.condition()]
            weights = [p.weight for p in able] + [self.copies_weight] * len(self.copies)
            if not weights:
                if self.waiting and self.grid.wait(signals):
                    continue
                stuck = "a predecessor that never signals" if self.waiting else "deadlock"
                self.error = SimulationError(stuck)
                break
            chosen = self.random.choices([*able, *self.copies], weights)[0]
            if isinstance(chosen, Partition):
                self.here = chosen
                return chosen
            self.copies.remove(chosen)
            chosen()
        return None

    def pause(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, at least until ``condition``."""
        me = self.here
        me.condition = condition
        self._give_way(me)

    # ---- what kernels call ----

    def allocate(self, dtype: str, shape: Sequence[int], layout: Any) -> Shared:
        array = np.full(shape, np.nan)
        self.memory.append(array)
        return Shared(self, dtype, array)

    def init(self, barrier: Shared, count: int) -> None:
        self.transaction[barrier.address] = TransactionBarrier(count)

    def expect(self, barrier: Shared, n_bytes: int, pred: bool = True) -> None:
        if pred:
            state = self.transaction[barrier.address]
            state.arrivals += 1
            state.bytes += n_bytes
            state.update()
        self.pause()

    def arrive(self, barrier: Shared, count: int, pred: bool = True) -> None:
        if pred:
            state = self.transaction[barrier.address]
            state.arrivals += count
            state.update()
        self.pause()

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> None:
        state = self.transaction[barrier.address]
        self.pause()
        if pred:
            self.pause(lambda: state.completed % 2 != phase)

    def copy_in(self, desc: Descriptor, at: Sequence[int], barrier: Shared, to: Shared) -> None:
        tile = desc.load(at)
        assert tile.size == to.array.size
        to.array[...] = np.nan

        def arrive() -> None:
            to.array[...] = tile.reshape(to.shape)
            state = self.transaction[barrier.address]
            state.bytes -= tile.size * BYTES[desc.dtype]
            state.update()

        self.copies.append(arrive)
        self.pause()

    def copy_out(self, desc: Descriptor, at: Sequence[int], source: Shared) -> None:
        before = source.array.copy()

        def complete() -> None:
            _unchanged(before, source.array)
            desc.store(at, before)

        self.here.stores.append(complete)
        self.pause()

    def store_wait(self, pendings: int) -> None:
        self._complete(self.here.stores, pendings)

    def fence(self) -> None:
        for array, value in self.here.unfenced:
            array[...] = value
        self.here.unfenced.clear()
        self.pause()

    def product(
        self, a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        operands = [x for x in (a, b) if isinstance(x, Shared)]
        before = [x.array.copy() for x in operands]
        left = a.array if isinstance(a, Shared) else a.value
        # Products run in order, so that one may add to what another has yet to compute.
        result = Tensor(left @ b.array + (acc.array if use_acc else 0.0), acc.type.layout)
        result.pending = True

        def complete() -> None:
            for was, x in zip(before, operands, strict=True):
                _unchanged(was, x.array)
            result.pending = False

        self.here.products.append(complete)
        if not is_async:
            self.product_wait(0)
        self.pause()
        return result

    def product_wait(self, pendings: int, deps: Sequence[Tensor] = ()) -> Any:
        self.pause()
        self._complete(self.here.products, pendings)
        return deps[0] if len(deps) == 1 else tuple(deps)

    def _complete(self, under_way: list[Callable[[], None]], pendings: int) -> None:
        while len(under_way) > pendings:
            under_way.pop(0)()

    def named_arrive(self, index: int, threads: int, own: int = WARP_GROUP) -> None:
        barrier = self.hardware.setdefault(index, HardwareBarrier())
        barrier.arrive(self.here.name, threads, own)
        self.pause()

    def named_arrive_soon(self, index: int, threads: int) -> None:
        if self.here.products:
            raise SimulationError(f"{self.here.name} has a product in flight")
        self.named_arrive(index, threads)

    def named_arrive_at_one(self, index: int, which: int, threads: int) -> None:
        if which not in (0, 1):
            raise SimulationError(f"barrier {which} of two")
        self.named_arrive(index + which, threads)

    def named_sync(self, index: int, threads: int, own: int = WARP_GROUP) -> None:
        barrier = self.hardware.setdefault(index, HardwareBarrier())
        opened = barrier.opened
        barrier.arrive(self.here.name, threads, own)
        self.pause(lambda: barrier.opened > opened)

    def reduce_add(self, pointers: Pointer, x: Tensor, condition: bool) -> None:
        """In any order with additions of other programs."""
        if condition:
            for addresses, elements in _groups(pointers, x):
                with self.grid.addition:
                    pointers.memory[addresses] += elements  # no address comes twice
        self.pause()

    def store_or_add(self, pointers: Pointer, x: Tensor, adds: bool, stores: bool) -> None:
        self.reduce_add(pointers, x, adds)
        if stores:
            for addresses, elements in _groups(pointers, x):
                pointers.memory[addresses] = elements

    def atomic_add(self, pointer: Pointer, x: int) -> Integer:
        self.pause()
        with self.grid.addition:
            before = pointer.memory[pointer.offsets]
            pointer.memory[pointer.offsets] += x
        self.grid.signalled()
        return Integer(before)

    def wait_for_predecessors(
        self, counter: Pointer, n_signals: int, index: int, threads: int
    ) -> None:
        """Of programs that run at the same time, or have ended. One warp waits, then arrives."""
        self.waiting += 1
        self.pause(lambda: counter.memory[counter.offsets] >= n_signals)
        self.waiting -= 1
        for barrier in (index, index + 1):
            self.named_arrive(barrier, threads, WARP)

    def wait_until_reached(self, counter: Pointer, n: int) -> None:
        """Of programs that run at the same time, or have ended."""
        self.waiting += 1
        self.pause(lambda: counter.memory[counter.offsets] >= n)
        self.waiting -= 1

    def signal_successors(self, counter: Pointer) -> None:
        """One thread signals."""
        self.pause()
        counter.memory[counter.offsets] += 1
        self.grid.signalled()

    def load(
        self,
        pointers: Pointer,
        mask: Tensor | None = None,
        other: float = 0.0,
        cache_modifier: str = "",
        volatile: bool = False,
    ) -> Any:
        """Of one integer, or of a tensor's elements, of all or where the mask is."""
        if mask is None:
            found = pointers.memory[pointers.offsets]
            return Tensor(found) if isinstance(found, np.ndarray) else Integer(found)
        found = np.full(mask.shape, other)
        found[mask.value] = pointers.memory[pointers.offsets[mask.value]]
        return Tensor(found)

    def store(self, pointers: Pointer, x: Tensor, mask: Tensor) -> None:
        pointers.memory[pointers.offsets[mask.value]] = x.value[mask.value]
        self.pause()


def _groups(pointers: Pointer, x: Tensor) -> Iterator[tuple[Any, Any]]:
    """(addresses, views of elements) of groups of four, of which the first ones' pointers count.

    As threads hold wgmma's results: rows r and r + 8, columns c and c + 1.
    """
    in_threads = (x.shape[0] // 16, 2, 8, x.shape[1] // 2, 2)
    at = np.broadcast_to(pointers.offsets, x.shape).reshape(in_threads)[:, 0, :, :, 0]
    elements = x.value.reshape(in_threads)
    for i, (dr, dc) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        yield at + i, elements[:, dr, :, :, dc]


def _unchanged(before: Any, now: Any) -> None:
    # As bits, of which NaN has the same before and after.
    if not (before.view(np.int64) == now.view(np.int64)).all():
        raise SimulationError("memory changes while a product or a store reads it")


def _where(condition: Any, a: Any, b: Any) -> Any:
    tensors = [x for x in (condition, a, b) if isinstance(x, Tensor)]
    if tensors:
        chosen = np.where(_array(condition), _array(a), _array(b))
        return Tensor(chosen, tensors[0].type.layout)
    return a if condition else b


def _keep_where(comparison: str, x: Tensor, a: Tensor, b: Tensor, other: float) -> Tensor:
    seen = {"lt": np.less, "ge": np.greater_equal}[comparison](a.value, b.value)
    return Tensor(np.where(seen, x.value, other))


def _keep_between(x: Tensor, a: Tensor, first: Tensor, n: Tensor, other: float) -> Tensor:
    past = a.value - first.value
    return Tensor(np.where((past >= 0) & (past < n.value), x.value, other))


def _reduction(function: Callable[..., Any]) -> Callable[[Tensor, int], Any]:
    def reduced(x: Tensor, axis: int) -> Any:
        """All that kernels reduce to one number are integers."""
        result = function(x.value, axis=axis)
        return Tensor(result) if np.ndim(result) else Integer(result)

    return reduced


def _operation(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda x, *others: Tensor(function(x.value, *map(_array, others)), x.type.layout)


class _Namespace(types.SimpleNamespace):
    """Names that are layouts or types here stand for nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


def _collect(scope: dict[str, Any], scopes: list[dict[str, Any]]) -> None:
    """Appends ``scope``, and the modules of all functions that it names, to ``scopes``."""
    scopes.append(scope)
    for value in list(scope.values()):
        function = getattr(value, "fn", None)
        if isinstance(function, types.FunctionType) and not any(
            function.__globals__ is known for known in scopes
        ):
            _collect(function.__globals__, scopes)


def load(module: types.ModuleType, machine: Machine, **changes: Any) -> dict[str, Any]:
    """The functions of ``module`` as plain Python on ``machine``, by name.

    ``changes``: names that are to stand for something else.
    """
    gl = _Namespace(
        float32="float32",
        int64="int64",
        int32="int32",
        program_id=lambda axis: Integer(machine.program),
        num_programs=lambda axis: Integer(machine.programs),
        atomic_add=machine.atomic_add,
        cdiv=lambda a, b: -(-a // b),
        where=_where,
        cast=lambda x, dtype: x,
        to_tensor=lambda x: x,
        zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape), layout),
        arange=lambda start, end, layout=None: Tensor(np.arange(start, end), layout),
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value), layout),
        maximum=_operation(np.maximum),
        minimum=_operation(np.minimum),
        log2=_operation(np.log2),
        permute=_operation(np.transpose),
        reshape=_operation(np.reshape),
        join=lambda x, y: Tensor(np.stack((x.value, y.value), -1)),
        split=lambda x: (Tensor(x.value[..., 0]), Tensor(x.value[..., 1])),
        max=_reduction(np.max),
        min=_reduction(np.min),
        sum=_reduction(np.sum),
        load=machine.load,
        store=machine.store,
        expand_dims=lambda x, axis: Tensor(np.expand_dims(x.value, axis)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        static_range=range,
        allocate_shared_memory=machine.allocate,
        NVMMASharedLayout=_Namespace(),
        warp_specialize=lambda partitions, warps, registers: machine.run(partitions),
    )
    names: dict[str, Any] = {
        "__builtins__": builtins,
        "gl": gl,
        "mbarrier": _Namespace(
            init=machine.init,
            expect=machine.expect,
            arrive=machine.arrive,
            wait=machine.wait,
            MBarrierLayout=lambda: None,
        ),
        "tma": types.SimpleNamespace(store_wait=machine.store_wait),
        "tma_load": machine.copy_in,
        "tma_store": machine.copy_out,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.product_wait,
        "fence_async_shared": machine.fence,
        "exp2": _operation(np.exp2),
        "reciprocal": _operation(np.reciprocal),
        "VIEWS_ARE_PUBLIC": True,
        "keep_where": _keep_where,
        "keep_between": _keep_between,
        "to_operand": lambda x, dtype, layout: x,
        "reduce_add": machine.reduce_add,
        "store_or_add": machine.store_or_add,
        "wait_for_predecessors": machine.wait_for_predecessors,
        "signal_successors": machine.signal_successors,
        "wait_until_reached": machine.wait_until_reached,
        "wait_for_prerequisites": lambda: None,  # here one has ended when the next begins
        "launch_dependents": lambda: None,
        "wait_until_written": lambda: machine.store_wait(0),
        "named_barrier_sync": machine.named_sync,
        "named_barrier_arrive": machine.named_arrive,
        "named_barrier_sync_at": machine.named_sync,
        "named_barrier_arrive_at": machine.named_arrive,
        "named_barrier_arrive_soon_at": machine.named_arrive_soon,
        "named_barrier_arrive_at_one": machine.named_arrive_at_one,
    }
    known = set(names)
    # What the module imports comes first, with all that the functions there call.
    scopes: list[dict[str, Any]] = []
    _collect(vars(module), scopes)
    for name, value in (item for scope in reversed(scopes) for item in scope.items()):
        if name in known:
            continue
        if isinstance(getattr(value, "fn", None), types.FunctionType):
            names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
    names.update(changes)
    return names
