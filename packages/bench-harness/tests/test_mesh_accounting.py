"""Mesh problems against numbers worked out by hand and against a search over all meshes."""

import itertools
import math

import pytest

from bench_harness.mesh_accounting import Derived, MeshProblem, described

XXL = MeshProblem()


def values(found: list[Derived]) -> dict[str, float]:
    return {each.variant: each.value for each in found}


def test_xxl_memory():
    found = XXL.memory(80, 95)
    parts = values(found)
    assert XXL.numel == 219_848_638_464
    assert parts["master weights"] == pytest.approx(879.4, abs=0.05)
    assert parts["gradients"] == parts["master weights"]
    assert parts["optimizer state"] == 2 * parts["master weights"]
    assert parts["total"] == pytest.approx(3517.6, abs=0.1)
    assert parts["saved for backward per token"] == pytest.approx(17.547, abs=1e-3)
    assert math.ceil(parts["devices"]) == 44
    assert any("80 GB" in each.derivation for each in found)


def test_xxl_under_fsdp():
    assert XXL.fewest_ranks(95)[0] == 38  # 3517.6 / 95 = 37.03
    assert XXL.sharded_gb(38) < 95 < XXL.sharded_gb(37)
    ranks, _ = XXL.fewest_ranks(95, tokens=1024)
    assert XXL.sharded_gb(ranks, tokens=1024) < 95
    assert XXL.sharded_gb(ranks - 1, tokens=1024) >= 95
    with pytest.raises(ValueError, match="fewer than 100000 tokens"):
        XXL.fewest_ranks(95, tokens=100_000)


BATCH = "compute-bound batch, {}, transfers {}"


def test_xxl_compute_bound_batch():
    """α = 4.6e14 / 1.8e11 = 2555.6; 16·1277.8·53248 / (53248 - 10222) = 25302; / 64 = 395."""
    batch = values(XXL.compute_bound())
    assert batch[BATCH.format("overall", "in turn")] == pytest.approx(25302, rel=1e-4)
    assert batch[BATCH.format("per device", "in turn")] == pytest.approx(395.3, abs=0.1)
    assert batch[BATCH.format("overall", "at once")] == pytest.approx(20444, rel=1e-4)


def test_at_the_compute_bound_batch_the_times_are_equal():
    mesh = MeshProblem(fsdp=8, tensor=2, bandwidth=1e11, flops=1e14)
    tokens = values(mesh.compute_bound())[BATCH.format("overall", "in turn")]
    math_time = 4 * tokens * mesh.d_model * mesh.d_ff / (16 * mesh.flops)
    weights = 4 * mesh.d_model * mesh.d_ff / (2 * mesh.bandwidth * mesh.fsdp_axes)
    activations = 4 * tokens * mesh.d_model / (8 * mesh.bandwidth * mesh.tensor_axes)
    assert math_time == pytest.approx(weights + activations)


def test_matrices_split_too_far_are_refused():
    with pytest.raises(ValueError, match="Split matrices over fewer ranks"):
        MeshProblem(tensor=64).compute_bound()


def test_best_split_of_the_xxl_mesh():
    """2555.6² / (2·53248) = 61.3 tokens per device; 64·2555.6 / 53248 = 3.07 ranks of FSDP."""
    found = values(XXL.compute_bound())
    least, best = found["least batch per device, best split"], 64 * 2555.556 / 53248
    assert least == pytest.approx(61.33, abs=0.01)
    assert found["FSDP ranks of the best split"] == pytest.approx(best, rel=1e-4)
    # At that batch and split both transfers take as long as computing.
    mesh, tokens = XXL, 64 * least
    computing = 4 * tokens * mesh.d_model * mesh.d_ff / (64 * mesh.flops)
    weights = 4 * mesh.d_model * mesh.d_ff / (64 / best * mesh.bandwidth * mesh.fsdp_axes)
    moved = 4 * tokens * mesh.d_model / (best * mesh.bandwidth * mesh.tensor_axes)
    assert weights == pytest.approx(computing, rel=1e-4)
    assert moved == pytest.approx(computing, rel=1e-4)


def gated(tokens: int, **ranks: int) -> MeshProblem:
    """A gated layer on slow links."""
    return MeshProblem(
        **{"data": 1, "fsdp": 1, "tensor": 1} | ranks,
        d_model=512,
        d_ff=2048,
        num_blocks=1,
        matrices=3,
        bandwidth=1e10,
        flops=1e13,
        tokens=tokens,
    )


def hides(phase: str, how: str, tokens: int, **ranks: int) -> bool:
    """Whether computing takes as long as the transfers, from the times of a step."""
    step = values(gated(tokens, **ranks).step())
    return step.get(f"{phase}, computing over transfers {how}", 1.0) >= 1 - 1e-9


@pytest.mark.parametrize(
    ("axis", "phase", "name"),
    [
        ("data", "backward", "most replicas (data parallel)"),
        ("fsdp", "forward", "most ranks of FSDP"),
        ("fsdp", "backward", "most ranks of FSDP"),
        ("tensor", "forward", "most ranks of tensor parallelism, forward"),
        ("tensor", "backward", "most ranks of tensor parallelism, backward"),
    ],
)
def test_limits_of_one_axis_are_where_the_times_of_a_step_cross(axis: str, phase: str, name: str):
    for tokens in (4000, 20_500):
        limit = values(gated(tokens).limits())[name]
        for ranks in range(1, math.ceil(limit) + 3):
            assert hides(phase, "at once", tokens, **{axis: ranks}) == (ranks <= limit)


@pytest.mark.parametrize("how", ["at once", "in turn"])
@pytest.mark.parametrize("tokens", [500, 4000, 60_000])
def test_no_mesh_beats_the_limit_of_both_axes(how: str, tokens: int):
    """A search over all whole meshes stays below the limit, and a real split comes close to it."""
    limit = values(gated(tokens).limits())[f"most devices of both, transfers {how}"]
    found = [
        x * y
        for x, y in itertools.product(range(1, 70), range(1, 12))
        if hides("forward", how, tokens, fsdp=x, tensor=y)
    ]
    assert max(found) <= limit * (1 + 1e-9)
    assert max(found) > 0.6 * limit


def test_a_mesh_is_described_by_names():
    assert described({"fsdp": 8, "tokens": 100, "flops": 1e15}) == MeshProblem(
        fsdp=8, tokens=100, flops=1e15
    )
    with pytest.raises(ValueError, match="but got 'rank'"):
        described({"rank": 2})
    for wrong in (0, -1, 2.5, True, "2"):
        with pytest.raises(ValueError, match="fsdp of mesh must be a positive whole number"):
            described({"fsdp": wrong})
