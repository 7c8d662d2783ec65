"""The plan of copies: every element in one row, no race between ranks, whatever the sizes."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from ddp_lite.peer import schedule
from ddp_lite.peer.schedule import Chunk, Kind, Operation

WORLD_SIZES = range(2, 9)
PROGRAMS = (schedule.reduce_scatter, schedule.all_gather, schedule.average)

Program = Callable[[int, int], list[Operation]]
Place = tuple[int, int, int]  # owner, slot, row


def length_of(row: Sequence[Chunk]) -> int:
    """Elements from the begin of a row to the end of its last chunk."""
    return max((chunk.at + chunk.end - chunk.begin for chunk in row), default=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("capacity", [1, 7, 64, 10_000])
def test_every_element_lies_in_one_row(world_size: int, capacity: int) -> None:
    numels = [3, 0, 17, 128, 1, 333]
    for rows, equal in (
        (schedule.cut_together(numels, world_size, 8), False),
        (schedule.cut_each([n * world_size for n in numels], world_size), True),
    ):
        assert len(rows) == world_size
        seen: Counter[tuple[int, int]] = Counter()
        for window in schedule.windows(rows, capacity):
            for row in window:
                places: Counter[int] = Counter()
                for chunk in row:
                    count = chunk.end - chunk.begin
                    seen.update((chunk.tensor, i) for i in range(chunk.begin, chunk.end))
                    places.update(range(chunk.at, chunk.at + count))
                assert all(times == 1 for times in places.values())
                assert length_of(row) <= capacity
                assert length_of(row) == len(places), "no gaps"
        factor = world_size if equal else 1
        wanted = {(t, i) for t, n in enumerate(numels) for i in range(n * factor)}
        assert seen == Counter(wanted)


def test_rows_begin_aligned() -> None:
    rows = schedule.cut_together([1000, 1], 3, 64)
    firsts = [row[0] for row in rows if row]
    assert [chunk.begin % 64 for chunk in firsts] == [0, 0, 0]
    assert schedule.cut_together([5], 4, 64) == [[Chunk(0, 0, 5, 0)], [], [], []]
    assert schedule.windows(schedule.cut_together([], 2, 64), 8) == []


def accesses(
    operation: Operation, rank: int, slot: int, world_size: int, program: Program
) -> list[tuple[Place, bool]]:
    """The shared memory that an operation touches, and whether it writes there."""
    peer, result = operation.peer, schedule.result_row(world_size)
    landed = [
        schedule.landing_row(sender, rank, world_size)
        for sender in range(world_size)
        if sender != rank
    ]
    match operation.kind:
        case Kind.PUSH:
            return [((peer, slot, schedule.landing_row(rank, peer, world_size)), True)]
        case Kind.REDUCE:
            found = [((rank, slot, row), False) for row in landed]
            if program is schedule.average:
                found.append(((rank, slot, result), True))
            return found
        case Kind.PUBLISH:
            return [((rank, slot, result), True)]
        case Kind.PULL:
            return [((peer, slot, result), False)]
    return []


def races(world_size: int, messages: Sequence[Program], slots: int, leave_out: int = -1) -> int:
    """``races_between`` of windows whose slots alternate."""
    windows = [(program, number % slots, False) for number, program in enumerate(messages)]
    return races_between(world_size, windows, leave_out)


def races_between(
    world_size: int, windows: Sequence[tuple[Program, int, bool]], leave_out: int = -1
) -> int:
    """Pairs of conflicting accesses that no barrier and no signal orders, by vector clocks.

    Args:
        world_size: number of ranks.
        windows: of each its program, its slot, and whether a barrier comes before it.
        leave_out: all ranks skip this barrier.
    """
    todo: list[list[tuple[Operation, int, Program]]] = []
    for rank in range(world_size):
        operations = []
        barriers = 0
        for program, slot, barrier_before in windows:
            before = [Operation(Kind.BARRIER)] if barrier_before else []
            for operation in [*before, *program(rank, world_size)]:
                if operation.kind is Kind.BARRIER:
                    barriers += 1
                    if barriers - 1 == leave_out:
                        continue
                operations.append((operation, slot, program))
        todo.append(operations[::-1])
    clocks = [[0] * world_size for _ in range(world_size)]
    signals: list[list[list[int]]] = [[] for _ in range(world_size)]  # by receiver
    signalled = [False] * world_size
    log: dict[Place, list[tuple[int, bool, list[int]]]] = {}

    def join(rank: int, other: Sequence[int]) -> None:
        clocks[rank] = [max(a, b) for a, b in zip(clocks[rank], other, strict=True)]

    while any(todo):
        moved = False
        for rank in range(world_size):
            while todo[rank] and todo[rank][-1][0].kind is not Kind.BARRIER:
                operation, slot, program = todo[rank][-1]
                clocks[rank][rank] += 1
                if operation.kind is Kind.STAGGER:
                    if not signalled[rank]:
                        signals[(rank - 1) % world_size].append(list(clocks[rank]))
                        signalled[rank], moved = True, True
                    if not signals[rank]:
                        break
                    join(rank, signals[rank].pop(0))
                    signalled[rank] = False
                for place, writes in accesses(operation, rank, slot, world_size, program):
                    log.setdefault(place, []).append((rank, writes, list(clocks[rank])))
                todo[rank].pop()
                moved = True
        if all(queue and queue[-1][0].kind is Kind.BARRIER for queue in todo):
            everyone = [max(column) for column in zip(*clocks, strict=True)]
            for rank in range(world_size):
                join(rank, everyone)
                todo[rank].pop()
            moved = True
        assert moved, "the ranks wait for each other for ever"
    found = 0
    for touched in log.values():
        for place, (first, writes, before) in enumerate(touched):
            for second, also, after in touched[place + 1 :]:
                if first != second and (writes or also):
                    ordered = before[first] <= after[first] or after[second] <= before[second]
                    found += not ordered
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_two_ranks_race(world_size: int) -> None:
    generator = random.Random(world_size)
    for program in PROGRAMS:
        assert races(world_size, [program] * 5, schedule.SLOTS) == 0
    for _ in range(5):
        messages = generator.choices(PROGRAMS, k=8)
        assert races(world_size, messages, schedule.SLOTS) == 0


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_check_finds_races(world_size: int) -> None:
    for program in (schedule.reduce_scatter, schedule.all_gather):
        assert races(world_size, [program] * 3, slots=1) > 0, "one slot is not enough"
    for program in PROGRAMS:
        kinds = [operation.kind for operation in program(0, world_size)]
        barriers = kinds.count(Kind.BARRIER)
        # The second message's: nothing has used the memory before the first one.
        for number in range(barriers, 2 * barriers):
            assert races(world_size, [program] * 3, schedule.SLOTS, leave_out=number) > 0


class Session:
    """The windows that a program of exchanges, recordings and replays carries out."""

    def __init__(self) -> None:
        self.done: list[tuple[Program, int, bool]] = []
        self._recordings, self._number = schedule.Recordings(), 0

    def _exchanges(
        self, exchanges: Sequence[Sequence[Program]], recording: bool
    ) -> list[tuple[Program, int, bool]]:
        found = []
        for number, programs in enumerate(exchanges):  # each of one window or several
            barrier = self._recordings.begin(recording=recording, first=number == 0)
            for program in programs:
                self._number += 1
                found.append((program, self._number % schedule.SLOTS, barrier))
                barrier = False
        return found

    def exchange(self, *exchanges: Sequence[Program]) -> None:
        self.done += self._exchanges(exchanges, recording=False)

    def record(self, *exchanges: Sequence[Program]) -> Callable[[], None]:
        graph = self._exchanges(exchanges, recording=True)
        return lambda: self.done.extend(graph)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("program", PROGRAMS)
def test_replays_do_not_race(world_size: int, program: Program) -> None:
    """Odd and even numbers of windows, two graphs, exchanges between: barriers make up for them.

    Only averages of two ranks could do without: their result is read last by the rank that writes
    there next.
    """
    for windows in (1, 2, 3):
        session = Session()
        session.exchange([program])
        first = session.record([program] * windows, [program])
        second = session.record([program] * windows)
        for graph in (first, first, second, second, first):
            graph()
        for _ in range(3):
            session.exchange([program], [program] * windows)
            second()
        assert races_between(world_size, session.done) == 0
        without = [(program, slot, False) for program, slot, _ in session.done]
        needless = world_size == 2 and program is schedule.average
    assert (races_between(world_size, without) > 0) != needless


def test_only_where_slots_may_repeat_is_a_barrier() -> None:
    session = Session()
    session.exchange([schedule.average], [schedule.average])
    assert [barrier for _, _, barrier in session.done] == [False, False], "nothing is recorded yet"
    session.record([schedule.average], [schedule.average])()
    assert [barrier for _, _, barrier in session.done[2:]] == [True, False]
    session.exchange([schedule.average, schedule.average])
    assert [barrier for _, _, barrier in session.done[4:]] == [True, False]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_two_copies_meet_at_one_gpu(world_size: int) -> None:
    for kind in (Kind.PUSH, Kind.PULL):
        plans = [
            [op.peer for op in schedule.average(rank, world_size) if op.kind is kind]
            for rank in range(world_size)
        ]
        for rank, peers in enumerate(plans):
            assert sorted(peers) == [peer for peer in range(world_size) if peer != rank]
        for step in zip(*plans, strict=True):
            assert len(set(step)) == world_size
        staggers = [op.kind for op in schedule.average(0, world_size)].count(Kind.STAGGER)
        assert staggers == 2 * (world_size - 2)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bytes_that_cross_between_gpus(world_size: int) -> None:
    numels, alignment, capacity = [1600, 1600 * 1600, 6400, 1600 * 6400], 64, 2**20
    rows = schedule.cut_together(numels, world_size, alignment)
    windows = schedule.windows(rows, capacity)
    assert len(windows) == -(-schedule.row_length(sum(numels), world_size, alignment) // capacity)
    writes, reads = Counter[int](), Counter[int]()  # elements that leave a GPU, by either copy
    for rank in range(world_size):
        for window in windows:
            lengths = [length_of(row) for row in window]
            for operation in schedule.average(rank, world_size):
                if operation.kind is Kind.PUSH:
                    writes[rank] += lengths[operation.peer]
                elif operation.kind is Kind.PULL:
                    reads[operation.peer] += lengths[operation.peer]
    ring = (world_size - 1) * sum(numels)  # what a ring sends in either half, from all ranks
    assert sum(writes.values()) == sum(reads.values()) == ring
    # Rows begin aligned, so the last one is shorter by less than that for each of them.
    unequal = world_size**2 * alignment
    for rank in range(world_size):
        sent = writes[rank] + reads[rank]
        assert sent == pytest.approx(2 * ring / world_size, abs=unequal)
