"""Compile-time options of the portable kernels: one object, which is one parameter of a kernel.

In a kernel an attribute of it is a Python number or string. Where Triton 3.6 wants a ``constexpr``
(shapes, ranges, strings as arguments), kernels bind the attribute to a ``tl.constexpr`` name first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """What every kernel and its functions are specialised on, besides D, tiles and ``is_causal``.

    e: head_dim of value.
    d_padded: and ``e_padded``: the powers of two at which D and E are computed.
    packed: sequences are packed. bottom_right: the last query's diagonal ends at the last key.
    has_left: no query sees a key more than a window before its diagonal.
    alibi: 0 without slopes, ``primitives.CAUSAL_ALIBI`` where no key behind the diagonal is seen,
        else 1.
    has_mask: some keys are hidden from all queries, by a mask (B, N_k).
    wide: rows of one tile can be more than 2^31 elements apart.
    precision: of products, see :func:`~flashattn_triton.launch.dot_precision`.
    interpreted: Triton's interpreter runs the kernel.
    use_tma: operands are loaded by the TMA, from descriptors. bias_tma: so is the bias.
    adds: gradients are added to what is in memory, in fp32.
    """

    e: int
    d_padded: int
    e_padded: int
    packed: bool
    bottom_right: bool
    has_left: bool
    has_softcap: bool
    has_prefix: bool
    alibi: int
    has_bias: bool
    has_mask: bool
    wide: bool
    precision: str
    interpreted: bool
    use_tma: bool
    bias_tma: bool = False
    adds: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardOptions(KernelOptions):
    """Of the forward kernel. largest_only: it computes each query's largest score alone."""

    has_sinks: bool
    largest_only: bool
    negative_scale: bool


@dataclass(frozen=True, kw_only=True)
class KeyPassOptions(KernelOptions):
    """Of the key pass; see ``key_pass``.

    dq_mode: how it adds its part of dQ. statistics_by_tma: from a descriptor.
    """

    dq_mode: int
    statistics_by_tma: bool


@dataclass(frozen=True, kw_only=True)
class BiasPassOptions(KernelOptions):
    """Of the bias pass.

    columns: of operands that are multiplied at a time.
    shared_by_queries: the bias has one row for all queries.
    shared_by_keys: the bias has one column for all keys.
    """

    columns: int
    shared_by_queries: bool
    shared_by_keys: bool
