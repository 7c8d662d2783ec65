"""Which implementation runs for which inputs, and with which tiles: decided here, and nowhere else.

``choose`` answers before anything is launched, ``explain`` says it in words. Nothing falls back
silently: an implementation that was asked for by name and cannot run is an error.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from flashattn_triton import triton_versions
from flashattn_triton.configs import INTERPRETER, Tiling, tiling_for
from flashattn_triton.hopper import eligibility
from flashattn_triton.hopper.configs import backward_config, forward_config
from flashattn_triton.inputs import (
    autocast,
    check_dense,
    check_tensors,
    refuse_unknown,
    refuse_with_packed_rows,
    warn_once,
)
from flashattn_triton.launch import tma_refusal
from flashattn_triton.mask_and_bias import NAMES, Given, in_four_dimensions, normalised
from flashattn_triton.problem import (
    MAX_HEAD_DIM_BACKWARD,
    MAX_HEAD_DIMS,
    Keywords,
    Problem,
    heads_first,
    new_problem,
    normalise_flag,
    normalise_length,
)

Tier = Literal["tiled", "triton", "hopper", "reference"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run.

    ``tiling``: tiles, warps and stages of the portable kernels. ``hopper_backward``: gradients are
    the "hopper" tier's too; else it uses portable kernels for them.
    """

    tier: Tier
    tiling: Tiling | None
    reason: str
    hopper_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class GPU:
    """What tiles depend on: compute capability and the shared memory of one block, in bytes."""

    name: str
    capability: tuple[int, int]
    shared_memory: int


@functools.cache
def describe_gpu(index: int) -> GPU:
    """The properties of CUDA device ``index``; they cannot change while the process lives."""
    properties: Any = torch.cuda.get_device_properties(index)  # whose types vary with torch
    return GPU(
        name=properties.name,
        capability=(properties.major, properties.minor),
        shared_memory=properties.shared_memory_per_block_optin,
    )


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    *,
    tensors: tuple[str, ...] = (),
) -> Plan:
    """The plan for (B, H, N_q, D), (B, G, N_k, D), (B, G, N_k, E) inputs, or packed views of them.

    Args:
        query: and ``key``, ``value``: only widths, dtype, device and places in memory are looked
            at.
        problem: mask, scale, soft-cap, and who computes: "auto" takes Triton for CUDA tensors (the
            Hopper tier, on sm_90, for what it supports) and the tiled PyTorch tier for all others;
            a name insists.
        tensors: which of :data:`~flashattn_triton.mask_and_bias.NAMES` come with the call.

    Raises:
        ValueError: the implementation cannot run these inputs.
    """
    is_empty = query.numel() == 0 or key.numel() == 0
    unreadable = None
    if query.is_cuda and not is_empty:
        refusals = (
            tma_refusal(name, x.shape, x.stride(), x.data_ptr() % 16, x.element_size())
            for name, x in (("query", query), ("key", key), ("value", value))
        )
        unreadable = next(filter(None, refusals), None)
    head_dims = (query.shape[-1], value.shape[-1])
    plan = _choose(query.device, query.dtype, head_dims, problem, tensors, unreadable)
    if is_empty and plan.tiling is not None:
        reason = "no scores: there is nothing to compute"
        if problem.packed:
            return Plan(tier="triton", tiling=plan.tiling, reason=reason)
        return Plan(tier="tiled", tiling=None, reason=reason)
    return plan


def _choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    problem: Problem,
    tensors: tuple[str, ...],
    unreadable: str | None = None,
) -> Plan:
    """The plan; ``unreadable``: why the TMA cannot read tensors."""
    implementation, tiling = problem.implementation, problem.tiling
    if implementation in ("reference", "tiled"):
        return Plan(tier=implementation, tiling=None, reason=f"implementation={implementation!r}")
    if implementation == "auto" and device.type != "cuda":
        reason = f"{device.type} tensors: Triton's kernels need CUDA"
        return Plan(tier="tiled", tiling=None, reason=reason)
    _check_kernel_limits(dtype, head_dims)
    if device.type != "cuda":
        if implementation == "triton" and interpreting():
            return Plan(tier="triton", tiling=tiling or INTERPRETER, reason="Triton's interpreter")
        raise ValueError(
            f"implementation {implementation!r} must have CUDA tensors, but got {device.type}. "
            f"Move them to a GPU, use implementation='tiled' (or FlashAttention2PyTorch instead of "
            f"FlashAttention2Triton), or 'triton' with TRITON_INTERPRET=1 set before the first "
            f"import of flashattn_triton, which runs the kernels in Triton's interpreter."
        )
    if implementation == "hopper" and tiling is not None:
        raise ValueError(
            f"tiling must be None with implementation 'hopper', but got {tiling}. It shapes the "
            f"portable kernels: use implementation='triton'."
        )
    gpu = describe_gpu(device.index)
    reason = f"{gpu.name}, {gpu.shared_memory // 1024} KB of shared memory per block"
    if tiling is not None:
        check_tiling(tiling, gpu, dtype)
        return Plan(tier="triton", tiling=tiling, reason=f"{reason}; tiling given by the caller")
    chosen = tiling_for(gpu.shared_memory, max(head_dims), dtype, bias="bias" in tensors)
    if implementation == "triton":
        return Plan(tier="triton", tiling=chosen, reason=f"{reason}; shipped table")
    by_name = implementation == "hopper"
    refusal = eligibility.refusal(gpu.capability, dtype, head_dims, problem, tensors, by_name)
    refusal = refusal or unreadable
    if refusal is None:
        return Plan(
            tier="hopper",
            tiling=chosen,
            reason=gpu.name,
            hopper_backward=eligibility.takes_gradients(head_dims, problem, by_name),
        )
    if implementation == "hopper":
        raise ValueError(f"implementation 'hopper' cannot run this: {refusal}")
    if refusal == triton_versions.refusal():
        warn_once(
            "hopper",
            f"The Hopper tier of flashattn-triton, which is faster on {gpu.name}, must have "
            f"{triton_versions.KNOWN}, but got another: {refusal}. The portable kernels run "
            f"instead. Update flashattn-triton, install a torch that brings such a Triton, or "
            f"confirm with implementation='triton'.",
            stacklevel=2,
        )
    if gpu.capability == eligibility.CAPABILITY:
        reason = f"{reason}; not the Hopper tier: {refusal}"
    return Plan(tier="triton", tiling=chosen, reason=f"{reason}; shipped table")


def _check_kernel_limits(dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Refuses what no kernel computes, though plain PyTorch does."""
    if dtype == torch.float64:
        raise ValueError(
            "query must be float16, bfloat16 or float32 for Triton's kernels, but got float64. "
            "Convert it, or use implementation='tiled', which computes in float64."
        )
    limits = MAX_HEAD_DIMS[dtype.itemsize]
    for name, dim, limit in zip(("query", "value"), head_dims, limits, strict=True):
        if dim > limit:
            slices = ", or attend to slices of value one by one" if name == "value" else ""
            raise ValueError(
                f"{name} must have a head_dim of at most {limit} for Triton's kernels in {dtype}, "
                f"but got {dim}. Use implementation='tiled', which has no limit{slices}."
            )


def check_tiling(tiling: Tiling, gpu: GPU, dtype: torch.dtype) -> None:
    """Refuses shapes that Triton 3.6 compiles wrongly for sm_90's warp-group matrix products.

    A warp group of 4 warps works on 64 rows. With fewer rows than that for each group, Triton lets
    groups repeat rows and read past the end of the operand. Operands of fp32 products are split
    into parts whose shared memory it reuses too early; fewer than 64 rows take other instructions.
    """
    if gpu.capability[0] != 9:
        return
    for name, tiles in tiling.kernels.items():
        rows = tiles.queries if name in ("forward", "query_pass") else tiles.keys  # of a program
        if 64 <= rows < 16 * tiles.warps:
            raise ValueError(
                f"tiling.{name} must have at least 16 rows per warp on {gpu.name}, or fewer than "
                f"64 rows, but got {rows} rows and {tiles.warps} warps. Use fewer warps."
            )
        if rows >= 64 and dtype == torch.float32:
            raise ValueError(
                f"tiling.{name} must have fewer than 64 rows for float32 on {gpu.name}, but got "
                f"{rows}. Use 32."
            )


def interpreting() -> bool:
    """Whether Triton's kernels were decorated for its interpreter."""
    try:
        import triton

        from flashattn_triton.portable.forward import flash_forward_kernel
    except ImportError:  # no Triton on this platform
        return False
    return not isinstance(flash_forward_kernel, triton.JITFunction)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = False,
    **keywords: Unpack[Keywords],
) -> str:
    """In words: which implementation and which tiles ``flash_attention`` would run, and why.

    Takes ``flash_attention``'s arguments and raises its errors. Launches nothing. The answer does
    not depend on ``document_ids``, ``max_documents``, ``key_lengths`` and ``return_lse``, which are
    taken so that a call can be explained as it is written; the first and third are not checked.
    """
    refuse_unknown("explain", [*Keywords.__annotations__, "return_lse"], keywords)
    normalise_flag("return_lse", return_lse)
    check_tensors(query=query, key=key, value=value)
    options: dict[str, Any] = dict(keywords)
    tensors = {name: options.pop(name, None) for name in NAMES}
    layout = options.pop("layout", None)
    if (max_documents := options.pop("max_documents", None)) is not None:
        normalise_length("max_documents", max_documents)
    packed = {name: options.pop(name, None) for name in ("document_ids", "key_lengths")}
    query, key, value, given = in_four_dimensions(layout, query, key, value, Given(**tensors))
    query, key, value = (heads_first(x, layout or "bhsd") for x in autocast(query, key, value))
    check_dense(query, key, value)
    problem = new_problem("bhsd", query.shape[-1], **options)
    given = normalised(problem, query, key, given)
    bias = tensors["bias"]
    del tensors["alibi_slopes"], tensors["sinks"]
    for name in (name for name, x in packed.items() if x is not None):
        refuse_with_packed_rows(name, **tensors)
    plan = choose(query, key, value, problem, tensors=given.names)
    lines = [f"tier: {plan.tier} ({plan.reason})"]
    head_dims = query.shape[-1], value.shape[-1]
    if plan.tier == "hopper":
        shape = forward_config(head_dims, query.shape[-2], problem, query.shape[:-1].numel())
        lines.append(
            f"forward: {shape.queries} queries x {shape.keys} keys, {shape.consumers} consumers "
            f"of 4 warps, {shape.stages} stages"
        )
    if plan.hopper_backward:
        tile = backward_config(head_dims, problem)
        order = " in a fixed order" if problem.deterministic else ""
        tiles = {f"fused (dQ by fp32 addition{order})": (tile.queries, "2 stages")}
        if tile.two_passes:
            tiles = {
                "keys (dK, dV)": (tile.keys, "2 stages"),
                "queries (dQ)": (tile.queries, "3 tiles of keys and values in turn"),
            }
        lines += [
            f"backward, {name}: {queries} queries x {tile.keys} keys, 2 consumers of 4 warps, "
            f"{kept}"
            for name, (queries, kept) in tiles.items()
        ]
    elif plan.tiling is not None:
        kernels = {} if plan.tier == "hopper" else {"forward": plan.tiling.forward}
        if plan.tiling.fused is not None and not problem.deterministic:
            addition = "TMA reduction" if plan.tiling.tma_reduce else "atomic addition"
            kernels[f"backward, fused (dQ by fp32 {addition})"] = plan.tiling.fused
        else:
            kernels["backward, keys (dK, dV)"] = plan.tiling.key_pass
            kernels["backward, queries (dQ)"] = plan.tiling.query_pass
        if max(head_dims) > MAX_HEAD_DIM_BACKWARD:
            kernels = {name: t for name, t in kernels.items() if name == "forward"}
            lines.append(f"backward: tiles of PyTorch, above head_dim {MAX_HEAD_DIM_BACKWARD}")
        lines += [
            f"{name}: {t.queries} queries x {t.keys} keys, {t.warps} warps, {t.stages} stages"
            f"{', fed by the TMA where strides allow it' if t.use_tma else ''}"
            for name, t in kernels.items()
        ]
    if problem.deterministic and keywords.get("deterministic") is None:
        lines.append("deterministic gradients, as torch.use_deterministic_algorithms asks for")
    if bias is not None and bias.requires_grad:
        lines.append("backward, bias: its own pass over the scores, every sum in a fixed order")
    return "\n".join(lines)
