import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_harness.traces.intervals import clip, overlap, total, union

LIMIT = 60
interval = st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)).map(
    lambda pair: (min(pair), max(pair))
)
intervals = st.lists(interval, max_size=12)


def points(items, window=(0, LIMIT)):
    """Brute force: the set of whole nanoseconds that are covered."""
    return {p for start, end in items for p in range(max(start, window[0]), min(end, window[1]))}


@given(intervals)
def test_union_covers_the_same_points_with_disjoint_sorted_intervals(items):
    merged = union(items)
    assert points(merged) == points(items)
    assert total(items) == len(points(items))
    assert all(start < end for start, end in merged)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


@given(intervals, interval)
def test_clip_keeps_the_points_inside(items, window):
    assert points(clip(items, window)) == points(items, window)


@given(intervals, intervals, interval)
def test_overlap_equals_brute_force(compute, communication, window):
    p, c = points(compute, window), points(communication, window)
    found = overlap(compute, communication, window)
    assert found.window_ns == window[1] - window[0]
    assert found.compute_ns == len(p)
    assert found.communication_ns == len(c)
    assert found.exposed_ns == len(c - p)
    assert found.hidden_ns == len(c & p)
    assert found.idle_ns == window[1] - window[0] - len(p | c)
    assert found.ratio == (len(c & p) / len(c) if c else None)


def test_large_times_stay_exact():
    base = 1_760_000_000_000_000_000
    found = overlap([(base, base + 10)], [(base + 9, base + 12)], (base, base + 20))
    assert (found.exposed_ns, found.hidden_ns, found.idle_ns) == (2, 1, 8)


def test_an_interval_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="must not end before it begins"):
        union([(3, 1)])
