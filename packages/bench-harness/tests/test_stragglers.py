"""Who arrives last at a collective, from made-up spans of several ranks."""

from __future__ import annotations

from bench_harness.core import Row
from bench_harness.traces.stragglers import arrivals, stragglers
from bench_harness.traces.trace import Event, Trace


def spans(*durations_ms: tuple[str, float]) -> list[Row]:
    return [{"name": name, "duration_ns": int(1e6 * ms)} for name, ms in durations_ms]


def test_the_shortest_span_belongs_to_the_rank_that_came_last() -> None:
    found = stragglers(
        [
            spans(("all_reduce", 5), ("all_reduce", 1), ("broadcast", 2)),
            spans(("all_reduce", 2), ("all_reduce", 4), ("broadcast", 2)),
            spans(("all_reduce", 4), ("all_reduce", 3), ("broadcast", 9)),
        ]
    )
    assert found["stragglers"] == [
        {"rank": 0, "last": 2, "waited_for_ms": 10.0, "waited_ms": 3.0},
        {"rank": 1, "last": 1, "waited_for_ms": 3.0, "waited_ms": 3.0},
        {"rank": 2, "last": 0, "waited_for_ms": 0.0, "waited_ms": 11.0},
    ]
    assert [(wait["number"], wait["last_rank"], wait["wait_ms"]) for wait in found["latest"]] == [
        (2, 0, 7.0),
        (0, 1, 3.0),
        (1, 0, 3.0),
    ]


def test_collectives_are_matched_by_name_and_place() -> None:
    """Streams run side by side, so two kinds may start in another order on another rank."""
    found = stragglers(
        [spans(("all_gather", 1), ("all_reduce", 3)), spans(("all_reduce", 1), ("all_gather", 6))]
    )
    assert [entry["last"] for entry in found["stragglers"]] == [1, 1]
    assert found["latest"][0] == {
        "number": 0, "name": "all_gather", "last_rank": 0, "wait_ms": 5.0
    }  # fmt: skip


def test_nothing_is_said_of_one_rank_or_of_ranks_that_differ() -> None:
    assert stragglers([spans(("all_reduce", 1))]) == {}
    assert stragglers([[], []]) == {}
    assert stragglers([spans(("all_reduce", 1)), []]) == {}
    assert stragglers([spans(("all_reduce", 1)), spans(("broadcast", 1))]) == {}


def test_only_collectives_that_begin_in_the_window_count() -> None:
    def event(name: str, start: int, end: int) -> Event:
        return Event(name, start, end, (0, 0), end - start)

    trace = Trace(
        on_device=True,
        communication=[
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Storage<4096ul>)", 9, 20),
            event("ncclDevKernel_AllGather_RING_LL(x)", 5, 8),
            event("before", 1, 6),
            event("after", 30, 31),
        ],
    )  # fmt: skip
    assert arrivals(trace, (5, 30)) == [
        {"name": "ncclDevKernel_AllGather_RING_LL", "duration_ns": 3},
        {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "duration_ns": 11},
    ]
