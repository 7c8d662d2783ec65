"""Mesh problems against numbers worked out by hand and against a search over all meshes."""

import itertools
import math

import pytest

from bench_harness import mesh_accounting as accounting


def test_xxl_memory():
    parts = accounting.training_memory()
    assert accounting.XXL.numel == 219_848_638_464
    assert parts["master_weights"].value == pytest.approx(879.4, abs=0.05)
    assert parts["gradients"].value == parts["master_weights"].value
    assert parts["optimizer_state"].value == 2 * parts["master_weights"].value
    assert parts["total"].value == pytest.approx(3517.6, abs=0.1)
    assert parts["saved_for_backward_per_token"].value == pytest.approx(17.547, abs=1e-3)
    assert math.ceil(parts["devices"].value) == 44
    assert "80 GB" in parts["devices"].derivation


def test_xxl_under_fsdp():
    assert accounting.fsdp_ranks(device_gb=95).value == 38  # 3517.6 / 95 = 37.03
    assert accounting.fsdp_memory(ranks=38).value < 95 < accounting.fsdp_memory(ranks=37).value
    ranks = int(accounting.fsdp_ranks(device_gb=95, tokens=1024).value)
    assert accounting.fsdp_memory(ranks=ranks, tokens=1024).value < 95
    assert accounting.fsdp_memory(ranks=ranks - 1, tokens=1024).value >= 95
    with pytest.raises(ValueError, match="fewer than 100000 tokens"):
        accounting.fsdp_ranks(device_gb=95, tokens=100_000)


def test_xxl_compute_bound_batch():
    """α = 4.6e14 / 1.8e11 = 2555.6; 16·1277.8·53248 / (53248 - 10222) = 25302; / 64 = 395."""
    batch = accounting.compute_bound_batch()
    assert batch["overall"].value == pytest.approx(25302, rel=1e-4)
    assert batch["per_device"].value == pytest.approx(395.3, abs=0.1)
    concurrent = accounting.compute_bound_batch(concurrent=True)
    assert concurrent["overall"].value == pytest.approx(20444, rel=1e-4)


def test_at_the_compute_bound_batch_the_times_are_equal():
    mesh, model = accounting.Mesh(fsdp=8, tensor=2, bandwidth=1e11, flops=1e14), accounting.XXL
    tokens = accounting.compute_bound_batch(mesh=mesh)["overall"].value
    math_time = 4 * tokens * model.d_model * model.d_ff / (16 * mesh.flops)
    weights = 4 * model.d_model * model.d_ff / (2 * mesh.bandwidth * mesh.fsdp_axes)
    activations = 4 * tokens * model.d_model / (8 * mesh.bandwidth * mesh.tensor_axes)
    assert math_time == pytest.approx(weights + activations)


def test_matrices_split_too_far_are_refused():
    with pytest.raises(ValueError, match="Split matrices over fewer ranks"):
        accounting.compute_bound_batch(mesh=accounting.Mesh(tensor=64))


def test_best_split_of_the_xxl_mesh():
    """2555.6² / (2·53248) = 61.3 tokens per device; 64·2555.6 / 53248 = 3.07 ranks of FSDP."""
    found = accounting.fewest_tokens()
    least, best = found["least batch per device, best split"].value, 64 * 2555.556 / 53248
    assert least == pytest.approx(61.33, abs=0.01)
    assert found["FSDP ranks of the best split"].value == pytest.approx(best, rel=1e-4)
    # At that batch and split both transfers take as long as computing.
    model, mesh, tokens = accounting.XXL, accounting.Mesh(), 64 * least
    computing = 4 * tokens * model.d_model * model.d_ff / (64 * mesh.flops)
    weights = 4 * model.d_model * model.d_ff / (64 / best * mesh.bandwidth * mesh.fsdp_axes)
    moved = 4 * tokens * model.d_model / (best * mesh.bandwidth * mesh.tensor_axes)
    assert weights == pytest.approx(computing, rel=1e-4)
    assert moved == pytest.approx(computing, rel=1e-4)


GATED = accounting.FeedForwardStack(d_model=512, d_ff=2048, num_blocks=1, matrices=3)


def hides(phase: str, how: str, tokens: int, **ranks: int) -> bool:
    """Whether computing takes as long as the transfers, from the times of a step."""
    mesh = accounting.Mesh(
        **{"data": 1, "fsdp": 1, "tensor": 1} | ranks, bandwidth=1e10, flops=1e13
    )
    step = accounting.ring_step(GATED, mesh=mesh, tokens=tokens)
    share = step.get(f"{phase}, computing over transfers {how}")
    return share is None or share.value >= 1 - 1e-9


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
    mesh = accounting.Mesh(bandwidth=1e10, flops=1e13)
    for tokens in (4000, 20_500):
        limit = accounting.ring_limits(GATED, mesh=mesh, tokens=tokens)[name].value
        for ranks in range(1, math.ceil(limit) + 3):
            assert hides(phase, "at once", tokens, **{axis: ranks}) == (ranks <= limit)


@pytest.mark.parametrize("how", ["at once", "in turn"])
@pytest.mark.parametrize("tokens", [500, 4000, 60_000])
def test_no_mesh_beats_the_limit_of_both_axes(how: str, tokens: int):
    """A search over all whole meshes stays below the limit, and a real split comes close to it."""
    mesh = accounting.Mesh(bandwidth=1e10, flops=1e13)
    limits = accounting.ring_limits(GATED, mesh=mesh, tokens=tokens)
    limit = limits[f"most devices of both, transfers {how}"].value
    found = [
        x * y
        for x, y in itertools.product(range(1, 70), range(1, 12))
        if hides("forward", how, tokens, fsdp=x, tensor=y)
    ]
    assert max(found) <= limit * (1 + 1e-9)
    assert max(found) > 0.6 * limit


def test_a_mesh_is_described_by_names():
    model, mesh, tokens = accounting.described({"fsdp": 8, "tokens": 100, "flops": 1e15})
    assert (model, mesh.fsdp, mesh.flops, tokens) == (accounting.XXL, 8, 1e15, 100)
    with pytest.raises(ValueError, match="but got 'rank'"):
        accounting.described({"rank": 2})
    for wrong in (0, -1, 2.5, True, "2"):
        with pytest.raises(ValueError, match="fsdp of mesh must be a positive whole number"):
            accounting.described({"fsdp": wrong})
