"""What a program that uses flash-attn or torch's FlexAttention changes.

Data for ``bench-harness migrate``, which documents the fields.
"""

from __future__ import annotations

from typing import Any

from flashattn_triton.integrations.flash_attn import _UNSUPPORTED

_MASKS = (
    "pass causal=True for a causal mask, window=(left, 0) beside it for a sliding one, "
    "prefix_lengths=... for a prefix, document_ids=... for documents; keep FlexAttention for others"
)

RULES: tuple[dict[str, Any], ...] = (
    {
        "names": tuple(
            f"{module}.{function}"
            for module in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
            for function in ("flash_attn_func", "flash_attn_varlen_func")
        ),
        "instead": "import it from flashattn_triton.integrations.flash_attn: arguments, layout and "
        "alignment are the same",
        "at_import": True,
        "positional": (),
        "arguments": {
            name: f"must be {nothing!r}: there is no support for {feature}; keep flash-attn for "
            "this call"
            for name, (nothing, feature) in _UNSUPPORTED.items()
        },
        "nothing": {name: nothing for name, (nothing, _) in _UNSUPPORTED.items()},
        "methods": {},
        "also": {},
        "texts": {},
        "page": "packages/flashattn-triton/docs/from-flash-attn.md",
    },
    {
        "names": tuple(
            f"flash_attn.{function}"
            for function in (
                "flash_attn_qkvpacked_func",
                "flash_attn_kvpacked_func",
                "flash_attn_varlen_qkvpacked_func",
                "flash_attn_varlen_kvpacked_func",
            )
        ),
        "instead": "unpack with q, k, v = qkv.unbind(-3), which copies nothing, and call the "
        "function without qkvpacked or kvpacked in its name, from "
        "flashattn_triton.integrations.flash_attn",
        "positional": (),
        "arguments": {},
        "methods": {},
        "also": {},
        "texts": {},
        "page": "packages/flashattn-triton/docs/from-flash-attn.md",
    },
    {
        "names": ("flash_attn.flash_attn_with_kvcache",),
        "instead": "append to the cache yourself, and call flash_attn_func(q, keys, values, "
        "causal=True) from flashattn_triton.integrations.flash_attn",
        "positional": (),
        "arguments": {},
        "methods": {},
        "also": {},
        "texts": {},
        "page": "packages/flashattn-triton/docs/from-flash-attn.md",
    },
    {
        "names": ("torch.nn.attention.flex_attention.flex_attention",),
        "instead": "use flashattn_triton.flash_attention(query, key, value, ...); it needs no "
        "torch.compile around it",
        "positional": ("query", "key", "value", "score_mod", "block_mask", "scale"),
        "arguments": {
            "score_mod": "pass softcap=c for c * tanh(s / c), alibi_slopes=..., bias=... for a "
            "tensor that is added, or scale=; keep FlexAttention for other functions",
            "block_mask": _MASKS,
            "enable_gqa": "leave it out: key and value may have fewer heads",
            "kernel_options": "leave it out; tiling=... chooses kernel shapes",
            "return_aux": "use return_lse=True for the logsumexp",
        },
        "methods": {},
        "also": {
            "torch.nn.attention.flex_attention.create_block_mask": _MASKS,
            "torch.nn.attention.flex_attention.and_masks": _MASKS,
        },
        "texts": {},
        "page": "packages/flashattn-triton/docs/from-flex-attention.md",
    },
)
