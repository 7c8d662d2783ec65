"""The XXL mesh problem against numbers worked out by hand."""

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
