"""Products of one input with several weights: one after the other, or as one larger product.

Query, key and value read the same input. A GPU fills its multiprocessors better with one product of
three times the rows than with three, and backward makes one gradient of the input instead of three
and their sum. The weights stay parameters of their own: a checkpoint does not depend on how they
are multiplied. (The two halves of a SwiGLU fill a GPU on their own: joined, they are slower.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Products: TypeAlias = "Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]"
"""Maps an input (..., in) and bias-free layers to each layer's output (..., out)."""


def separate_products(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """One product for each layer, of type :data:`Products`."""
    return [layer(x) for layer in layers]


def joined_products(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """One product for all layers, of type :data:`Products`; the results are views of one tensor.

    Weights in the input's dtype that lie side by side in memory are read where they are. That is
    how ``shard_optim.FullyShardedDataParallel`` gathers the parameters of a unit. Other weights are
    copied side by side, and cast if they need it, in every pass. The layers' hooks do not run.
    """
    weights = [layer.weight for layer in layers]
    rows = x.flatten(0, -2)
    if all(weight.dtype == x.dtype for weight in weights):
        whole = _product(rows, weights, True)
    else:
        whole = rows @ torch.cat(weights).to(x.dtype).t()
    parts: tuple[Tensor, ...] = whole.split([len(weight) for weight in weights], -1)
    return [part.unflatten(0, x.shape[:-1]) for part in parts]


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """The weights below each other as one matrix: a view if they are neighbours, else a copy."""
    first = weights[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == storage and weight.data_ptr() == end
        if not (same and weight.is_contiguous()):
            return torch.cat(list(weights))
        end += weight.nbytes
    rows = sum(len(weight) for weight in weights)
    return first.as_strided((rows, first.shape[1]), first.stride())


# Compilers see each weight as an input of its own. This operator hides from them that several
# weights are one matrix.


@torch.library.custom_op("basics_model::product", mutates_args=())
def _product(x: Tensor, weights: list[Tensor], transposed: bool) -> Tensor:
    """(N, in) times the transpose of the weights below each other, or (N, out) times them."""
    whole = _side_by_side(weights)
    return x @ (whole.t() if transposed else whole)


@_product.register_fake
def _(x: Tensor, weights: list[Tensor], transposed: bool) -> Tensor:
    rows = sum(len(weight) for weight in weights)
    return x.new_empty(len(x), rows if transposed else weights[0].shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], bool], output: Tensor) -> None:
    x, weights, ctx.transposed = inputs
    ctx.save_for_backward(x, *weights)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None]:
    x, *weights = ctx.saved_tensors
    whole = grad.t() @ x if ctx.transposed else x.t() @ grad
    parts = whole.split([len(weight) for weight in weights])
    return _product(grad, weights, not ctx.transposed), list(parts), None


_product.register_autograd(_gradients, setup_context=_keep)


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
        ValueError: the model is on the meta device, joins its products, or has other dimensions.
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
        if getattr(module, "products", separate_products) is not separate_products:
            raise ValueError(
                f"products must be separate_products beside float8, but got {module.products!r}. "
                "Leave products out."
            )
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
