"""Planning is pure: which parameters share a bucket, and in which order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_lite.bucket_sizes import (
    automatic_bucket_bytes,
    bytes_from_mb,
    plan_buckets,
)
from ddp_lite.buckets import ParameterSpec, one_per_kind, one_per_parameter
from ddp_lite.peer.hook import typical_bytes


def specs(*sizes: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[ParameterSpec]:
    return [
        ParameterSpec(index=i, name=f"p{i}", numel=n, dtype=dtypes[i % len(dtypes)])
        for i, n in enumerate(sizes)
    ]


def test_greedy_in_the_given_order() -> None:
    # float32: 4 bytes an element
    assert plan_buckets(specs(1, 1, 1, 5, 1), bucket_bytes=8) == [(0, 1), (2,), (3,), (4,)]


def test_none_means_one_bucket_whatever_the_last_size() -> None:
    assert plan_buckets(specs(3, 4, 5), None, last_bucket_bytes=4) == [(0, 1, 2)]


def test_small_last_bucket_is_filled_from_the_end() -> None:
    assert plan_buckets(specs(2, 2, 2, 1, 1), 24, last_bucket_bytes=8) == [(0, 1, 2), (3, 4)]


def test_last_bucket_is_never_larger_than_the_others() -> None:
    assert plan_buckets(specs(1, 1, 1), 4, last_bucket_bytes=100) == [(0,), (1,), (2,)]


def test_tapered_buckets_hold_at_most_half_of_what_is_left() -> None:
    sixteen = specs(*[1] * 16)  # 64 bytes: 24, then half of 40, of 20, of 12, and the last 8
    assert [len(g) for g in plan_buckets(sixteen, 24, 8, taper=True)] == [6, 5, 2, 1, 2]
    assert [len(g) for g in plan_buckets(sixteen, 24, 8)] == [6, 6, 2, 2]


def test_large_parameters_stand_alone() -> None:
    assert plan_buckets(specs(9, 1, 9), 8, 8) == [(0,), (1,), (2,)]


def test_dtypes_never_mix() -> None:
    mixed = specs(1, 1, 1, 1, dtypes=(torch.float32, torch.float16))
    assert one_per_kind(mixed) == [(0, 2), (1, 3)]
    assert plan_buckets(mixed, 1024) == [(1,), (0, 2), (3,)]
    assert plan_buckets(mixed, None) == [(0, 2), (1, 3)]


def test_one_per_parameter_keeps_the_order() -> None:
    assert one_per_parameter(reversed(specs(1, 2, 3))) == [(2,), (1,), (0,)]


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "large"])
def test_sizes_must_be_positive_and_finite(size: float | str) -> None:
    with pytest.raises(ValueError, match=r"bucket_size_mb must be a positive number.*but got"):
        bytes_from_mb(size, "bucket_size_mb")


def test_mb_is_two_to_the_twentieth() -> None:
    assert bytes_from_mb(1, "x") == 1024**2
    assert bytes_from_mb(0.0001, "x") == 104
    assert bytes_from_mb(None, "x") is None


def test_automatic_size_is_a_sixteenth_but_at_least_25_mb() -> None:
    assert automatic_bucket_bytes(specs(1, 2)) == 25 * 1024**2
    assert automatic_bucket_bytes(specs(*[25 * 2**18] * 64)) == 100 * 1024**2
    assert automatic_bucket_bytes([]) == 25 * 1024**2


def test_the_typical_bucket_is_the_one_that_the_middle_byte_travels_in() -> None:
    """One large embedding among many small buckets does not speak for them."""
    assert typical_bytes([400, 240, 240, 240, 240]) == 240
    assert typical_bytes([400, 480, 480]) == 480
    assert typical_bytes([1360]) == 1360
    assert typical_bytes([]) == 0


def test_no_parameters_no_buckets() -> None:
    assert plan_buckets([], 100) == plan_buckets([], None) == []


@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    bucket=st.integers(1, 200),
    last=st.none() | st.integers(1, 200),
    kinds=st.sampled_from([(torch.float32,), (torch.float32, torch.bfloat16)]),
    taper=st.booleans(),
)
def test_plans_are_partitions_within_the_limits(sizes, bucket, last, kinds, taper) -> None:
    chosen = specs(*sizes, dtypes=kinds)
    plan = plan_buckets(chosen, bucket, last, taper=taper)
    assert sorted(index for group in plan for index in group) == list(range(len(sizes)))
    for place, group in enumerate(plan):
        limit = min(bucket, last or bucket) if place == len(plan) - 1 else bucket
        assert len({chosen[index].dtype for index in group}) == 1
        assert len(group) == 1 or sum(chosen[index].nbytes for index in group) <= limit
        assert list(group) == sorted(group)
    ends = [max(group) for group in plan]
    assert ends == sorted(ends)  # a bucket never waits for one that is expected later
