"""Products of a model's blocks in float8, by torchao."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn


def use_float8_products(
    model: nn.Module, recipe: str = "tensorwise", *, emulate: bool = False
) -> None:
    """Makes the layers of the model's blocks multiply in float8, in place, by torchao.

    Input, weight and gradient are scaled and cast in every pass (Micikevicius et al.,
    arXiv:2209.05433); the weights stay as they are, and so do the names of a state dict. Compile
    the blocks, or the casts cost more than the products save. Call it before the model is wrapped.

    Args:
        model: with a list of blocks, such as :class:`basics_model.TransformerLM`. Dimensions are
            multiples of 16, and so is the number of tokens of a batch.
        recipe: "tensorwise": one scale a tensor; "rowwise": one a row, more exact and slower.
        emulate: compute what a GPU of compute capability 8.9 or more would, on any device.

    Raises:
        ImportError: torchao is not installed.
        ValueError: the model is on the meta device, or has other dimensions.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(
            f"float8 products must have torchao 0.18 or later, but got: {error}. Install "
            "basics-model[float8]."
        ) from error
    blocks: Any = model.blocks
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            if module.weight.is_meta:  # torchao's layers would draw their weights otherwise
                raise ValueError(
                    f"model must be on its device, but got {name}.weight on the meta device. Make "
                    "it there."
                )
            if module.in_features % 16 or module.out_features % 16:
                raise ValueError(
                    "dimensions of float8 products must be multiples of 16, but got "
                    f"{module.in_features} and {module.out_features} of {name}. Change the size."
                )
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(blocks, config=dataclasses.replace(config, emulate=emulate))
