"""Short names of the variants of a training step, made from their labels.

A label of bench-harness says everything that a variant sets, such as
``FullyShardedDataParallel(reshard_after_forward=False, compute_dtype=bf16)``. Pages show a name of
at most 16 characters, "FSDP kept", and the label in a small second line. ``BucketedDDP`` alone is
what the class does by default; the label that bench-harness calls so averages over NCCL.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

#: Characters of a name: what a column of a phone's table holds.
MOST = 16

#: A comma between settings, outside of parentheses.
_OUTSIDE = re.compile(r", (?![^(]*\))")
_HEADS = {
    "no communication": "",
    "BucketedDDP": "DDP",
    "OverlapDDP": "OverlapDDP",
    "FlatDDP": "FlatDDP",
    "NaiveDDP": "NaiveDDP",
    "torch DDP": "torch DDP",
    "FSDP2": "torch FSDP2",
    "FullyShardedDataParallel": "FSDP",
    "ShardedOptimizer": "ZeRO-2",
}
_OPTIMIZERS = {
    "ShardedOptimizer": "+ ZeRO-1",
    "ShardedOptimizer(partition=whole)": "ZeRO-1 whole",
    "ZeroRedundancyOptimizer": "+ ZeRO",
    "Muon": "+ Muon",
    "AdamW(offload_state)": "offload",
    "AdamW(lr=0)": "rate 0",
}
#: Settings that all variants of a page share, or that another word implies.
_SILENT = {
    *("compute_dtype=bf16", "param_dtype=bf16", "reduce_dtype=bf16", "attention=flash"),
    *("reduce_gradients", "overlap=next-forward", "comm_hook=auto", ""),
    *("bucket_cap_mb=100", "gradient_as_bucket_view"),
}
_WORDS = {
    "reshard_after_forward=False": "kept",
    "comm_hook=collectives": "NCCL",
    "comm_hook=peer-copy": "copies",
    "communication=peer-copy": "copies",
    "wire_dtype=bf16": "bf16",
    "peer_parts=none": "hooks",
    "peer_parts=barriers": "waits",
    "peer_parts=barriers+averaging": "sums",
    "peer_parts=barriers+copies": "moves",
    "peer_way=torch-sums": "add",
    "peer_way=default-priority": "late",
    "peer_way=single-copies": "single",
    "missing_gradients=zeros": "0",
    "prefetch=2": "pre",
    "cuda_graph=True": "graph",
    "compile=off": "eager",
    "compile=blocks": "compiled",
    "elementwise=liger": "Liger",
    "keep_attention=True": "keep attention",
    "products=joined": "joined",
    "products=float8": "float8",
    "products=float8-rows": "float8 rows",
}
_NUMBERED = {
    "bucket_size_mb": "{} MiB",
    "checkpoint_blocks": "recompute {}",
    "nccl_max_ctas": "{} CTA",
}
#: Whole names, where words alone say too much or too little.
_WHOLE = {
    "no communication": "no communication",
    "BucketedDDP": "BucketedDDP NCCL",
    "BucketedDDP(comm_hook=auto)": "BucketedDDP",
    "BucketedDDP + ZeroRedundancyOptimizer": "DDP + torch ZeRO",
    "BucketedDDP(bucket_size_mb=1000, comm_hook=peer-copy, peer_parts=none)": "hooks 1000 MiB",
    "torch DDP(bucket_cap_mb=100, gradient_as_bucket_view)": "torch DDP tuned",
}
#: Tried in turn while a name is too long.
_SHORTER = (
    ("torch FSDP2", "FSDP2"),
    ("copies", "copy"),
    ("kept copy", "copy"),
    ("FSDP2 kept pre", "kept pre"),
    ("copy graph joined", "graph joined"),
    ("FSDP graph joined", "FSDP joined"),
    ("copy graph float8", "float8"),
)


def short_name(label: str) -> str:
    """The name of a variant, of at most :data:`MOST` characters.

    Raises:
        ValueError: the label holds a setting that has no word yet, or the words are too long.
    """
    before = label.startswith("ddp_before:")
    label = label.removeprefix("ddp_before:")
    if before:
        name = " ".join(["old", *_words(label)])
    elif label in _WHOLE:
        name = _WHOLE[label]
    else:
        name = " ".join(_words(label))
    for longer, shorter in _SHORTER:
        if len(name) > MOST:
            name = name.replace(longer, shorter)
    if len(name) > MOST:
        raise ValueError(
            f"the name of a variant must have at most {MOST} characters, but got {name!r} for "
            f"{label!r}. Give it a shorter word in tools/pages/variant_names.py."
        )
    return name


def short_names(labels: Sequence[str]) -> list[str]:
    """The names of a table's variants.

    Raises:
        ValueError: two different labels have one name, or a label has none.
    """
    names = [short_name(label) for label in labels]
    counts = Counter(name for name, _ in {*zip(names, labels, strict=True)})
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"names of variants must differ, but got {', '.join(twice)} twice. Give one a word in "
            "tools/pages/variant_names.py."
        )
    return names


def _words(label: str) -> list[str]:
    head, _, behind = label.partition(" + ")
    wrapper, *shared = _OUTSIDE.split(head)
    name, _, inner = wrapper.partition("(")
    settings = [*inner.removesuffix(")").split(", "), *shared]
    words = [_word(_HEADS, name, label), *_settings(settings, label)]
    if behind:
        optimizer, *shared = _OUTSIDE.split(behind)
        words += [_word(_OPTIMIZERS, optimizer, label), *_settings(shared, label)]
    return [word for word in words if word]


def _settings(settings: Sequence[str], label: str) -> list[str]:
    words = []
    for setting in settings:
        name, _, value = setting.partition("=")
        if setting in _SILENT:
            continue
        numbered = _NUMBERED.get(name)
        words.append(numbered.format(value) if numbered else _word(_WORDS, setting, label))
    return words


def _word(table: dict[str, str], text: str, label: str) -> str:
    if text not in table:
        raise ValueError(
            f"a setting must have a word in tools/pages/variant_names.py, but got {text!r} in "
            f"{label!r}. Add one."
        )
    return table[text]
