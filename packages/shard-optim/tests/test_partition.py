"""The plans: every element owned once, balanced, whatever the sizes."""

from hypothesis import given
from hypothesis import strategies as st

from shard_optim.bucket_plan import plan_buckets


def owned(plan, rank):
    """Elements of parameters that a rank owns."""
    spans = [plan.span(position, rank) for position in range(len(plan.members))]
    return sum(span[1] for span in spans if span is not None)


NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(
    numels=NUMELS,
    world_size=st.integers(1, 9),
    bucket_numel=st.integers(1, 100),
    first_numel=st.none() | st.integers(1, 100),
    partition=st.sampled_from(["flat", "whole"]),
    alignment=st.sampled_from([1, 4]),
)
def test_every_element_has_exactly_one_owner(
    numels, world_size, bucket_numel, first_numel, partition, alignment
):
    plans = plan_buckets(
        numels,
        world_size=world_size,
        partition=partition,
        bucket_numel=bucket_numel,
        first_numel=first_numel,
        alignment=alignment,
    )
    assert sorted(index for plan in plans for index in plan.members) == list(range(len(numels)))
    for plan in plans:
        used = set()
        for position, (offset, numel) in enumerate(zip(plan.offsets, plan.numels, strict=True)):
            spans = {rank: plan.span(position, rank) for rank in range(world_size)}
            owners = [rank for rank, span in spans.items() if span is not None]
            assert owners
            covered = [e for r in owners for e in range(spans[r][0], sum(spans[r]))]
            assert covered == list(range(numel))
            for rank in owners:
                begin = offset + spans[rank][0]
                assert rank * plan.chunk <= begin <= begin + spans[rank][1]
                assert begin + spans[rank][1] <= (rank + 1) * plan.chunk
            assert offset % alignment == 0
            assert used.isdisjoint(range(offset, offset + numel))
            used.update(range(offset, offset + numel))
            assert len(owners) == 1 or partition == "flat"
        assert len(used) + plan.padding == plan.numel


@given(numels=NUMELS, world_size=st.integers(1, 9))
def test_flat_gives_no_rank_more_than_one_element_above_the_mean(numels, world_size):
    (plan,) = plan_buckets(numels, world_size=world_size, partition="flat", bucket_numel=10**6)
    mean = sum(numels) / world_size
    assert max(owned(plan, rank) for rank in range(world_size)) < mean + 1


@given(numels=NUMELS, world_size=st.integers(1, 9))
def test_whole_is_within_the_largest_parameter_of_the_mean(numels, world_size):
    plans = plan_buckets(numels, world_size=world_size, partition="whole", bucket_numel=10**6)
    (plan,) = plans
    assert max(owned(plan, r) for r in range(world_size)) <= sum(numels) / world_size + max(numels)


def test_whole_puts_the_largest_first():
    (plan,) = plan_buckets([1, 5, 4, 3, 2], world_size=2, partition="whole", bucket_numel=100)
    assert [owned(plan, rank) for rank in range(2)] == [8, 7]
    assert plan.span(1, 1) is None
    assert plan.span(2, 0) is None


def test_a_whole_bucket_grows_until_padding_is_small():
    plans = plan_buckets([100] * 640, world_size=64, partition="whole", bucket_numel=100)
    assert max(plan.padding / plan.numel for plan in plans) < 0.25
    assert len(plans) > 1


def test_flat_buckets_hold_at_most_their_size_but_never_split_a_parameter():
    plans = plan_buckets([4, 4, 9, 1, 1], world_size=2, partition="flat", bucket_numel=8)
    assert [plan.members for plan in plans] == [(0, 1), (2,), (3, 4)]


def test_the_first_flat_buckets_can_be_smaller():
    sizes = {"world_size": 2, "partition": "flat", "bucket_numel": 8}
    plans = plan_buckets([1] * 24, **sizes, first_numel=2)
    assert [len(plan.members) for plan in plans] == [2, 4, 8, 8, 2]
    plans = plan_buckets([3] + [1] * 13, **sizes, first_numel=2)
    assert [sum(plan.numels) for plan in plans] == [3, 6, 7]
    assert plan_buckets([1] * 24, **sizes, first_numel=9) == plan_buckets([1] * 24, **sizes)
