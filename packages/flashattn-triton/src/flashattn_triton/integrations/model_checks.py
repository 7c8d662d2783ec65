"""Checks of a transformers model when it takes one of this package's attention implementations.

transformers resolves ``attn_implementation`` in a method of ``PreTrainedModel`` that runs for each
model and each part of it, in ``from_pretrained`` and in ``set_attn_implementation``. :func:`check`
looks at the model there: attention that transformers computes without asking an implementation is
an error that names the model, and dropout in attention, which would be an error of the first
training step, is a warning.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Collection
from typing import Any

# What a model's module imports if its attention asks an implementation that is registered.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# Model types whose layers tell an implementation something else than the mask of the model does, or
# use that mask themselves.
_NOT_CAUSAL = "layers of its decoder say that they are not causal"
_SELECTS = "its layers select keys for each query (sparse attention) from a mask of scores"
_CONTRADICTIONS = {
    "aimv2_text_model": "its layers say that they are not causal",
    "axk2": _SELECTS,
    "bridgetower": "layers of its text say that they are causal",
    "bigbird_pegasus": "its encoder takes a mask of scores",
    "deepseek_v32": _SELECTS,
    "dots3_note_text": _SELECTS,
    "glm_moe_dsa": _SELECTS,
    "hy_v4": _SELECTS,
    "mistral_large4_text": _SELECTS,
    "nllb-moe": _NOT_CAUSAL,
    "pegasus_x": _NOT_CAUSAL,
    "phimoe": "its layers do not say that they have a sliding window",
}


def install(model_class: Any, names: Collection[str]) -> None:
    """Has ``model_class`` (``PreTrainedModel``) run :func:`check` for ``names``; repeatable."""
    adjust = model_class._check_and_adjust_attn_implementation
    if hasattr(adjust, "checks"):
        return

    @functools.wraps(adjust)
    def adjust_and_check(self: Any, attn_implementation: Any, *args: Any, **keywords: Any) -> Any:
        if attn_implementation in names:
            check(self, attn_implementation)
        return adjust(self, attn_implementation, *args, **keywords)

    adjust_and_check.checks = names  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = adjust_and_check


def check(model: Any, name: str) -> None:
    """Refuses models with attention of their own, and warns of dropout in attention.

    ``model`` is a ``PreTrainedModel``, or a part of one, that is being built or changed; ``name``
    is that of the implementation.

    Raises:
        ValueError: the model does not ask its attention implementation, or tells it wrong things.
    """
    kind = type(model).__name__
    family = model.config.model_type
    if family in _CONTRADICTIONS and (family != "phimoe" or model.config.sliding_window):
        raise ValueError(
            f"attn_implementation of {kind} must be 'eager', because {_CONTRADICTIONS[family]}, "
            f"but got {name!r}. Leave it out."
        )
    if computes_attention_itself(model):
        raise ValueError(
            f"attn_implementation of {kind} must be 'eager' or one of transformers' own, because "
            f"the model computes its attention itself and asks no implementation, but got "
            f"{name!r}. Leave it out."
        )
    settings = dropout_settings(model.config)
    if settings:
        off = ", ".join(f"{setting}=0.0" for setting in settings)
        warnings.warn(
            f"{kind} must have no dropout in attention to be trained with {name}, but got "
            f"{', '.join(f'{k}={v}' for k, v in settings.items())}. Turn it off by "
            f"from_pretrained(..., {off}); inference needs no change.",
            UserWarning,
            stacklevel=6,
        )


def computes_attention_itself(model: Any) -> bool:
    """Whether a model's own file has layers of attention, none of which asks an implementation.

    Such models would be given this package's masks, which are no tensors of scores. Models whose
    file only puts others together are not among them.
    """
    for base in type(model).__mro__:
        contents = vars(sys.modules.get(base.__module__, object))
        if not base.__module__.startswith("transformers.models."):
            continue
        if any(name.endswith("ATTENTION_CLASSES") for name in contents):
            return True  # by name, from a list of its own
        if _INTERFACE in contents:
            return False
        masks = any(name.startswith("create_") and name.endswith("_mask") for name in contents)
        if masks and any("Attention" in name for name in contents):
            return True
    return False


def dropout_settings(config: Any) -> dict[str, float]:
    """The settings that cause dropout in attention, those with a value above 0."""
    return {
        name: value
        for name, value in vars(config).items()
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0
    }
