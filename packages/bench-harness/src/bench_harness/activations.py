"""Memory of a training step of the language model, counted from shapes before it runs.

What forward keeps for backward follows from one rule: autograd saves the operands that an
operation's derivative needs, each tensor once however many operations need it. Walking through the
model (``basics_model.model``, ``basics_model.attention``) with that rule gives the list below.

Dimensions: B batch, S sequence, T = B·S tokens, M model width, F feed-forward width, H heads,
D = M/H, L layers, V vocabulary. ``e`` is the size of the elements of matrix products: 4 bytes in
fp32 and TF32, 2 under bf16 autocast, which leaves the residual stream, normalisation and softmax in
fp32.
"""

from __future__ import annotations

from basics_model.sizes import ModelConfig

#: Bytes of fp32: parameters, gradients, each of AdamW's moments, the residual stream.
_FP32 = 4


def saved_for_backward(
    shape: ModelConfig,
    batch: int,
    sequence: int,
    *,
    precision: str,
    attention: str,
    device: str = "cuda",
) -> dict[str, int]:
    """Bytes that forward leaves allocated for backward, by part.

    In every layer:

    - ``residual stream``: the inputs of both normalisations and their reciprocal deviations,
      2·(4·T·M + 4·T); once more for the last normalisation.
    - ``attention``: the normalised input, which three projections share; query, key and value in
      the memory order of the heads; the mixed values, which the output projection takes: 5·e·T·M.
    - ``scores``, naive attention only: the softmax's output of B·H·S² fp32 values; under autocast
      its copy of 2 bytes each, which the second product takes; the mask of S² bytes. Fused
      attention keeps one logarithm per row instead, 4·B·H·S.
    - ``feed-forward``: the normalised input, gate, its SiLU, up, and the product of the two:
      e·T·M + 4·e·T·F.

    Once: the ``head``'s input (e·T·M) and the ``logits`` with one logarithm per token, in fp32
    (4·T·V + 4·T); the ``rotary tables`` of 2·S·D fp32 values; under autocast ``weights in bf16``,
    two bytes for every element of a linear layer, because the gradient of a product's input needs
    the cast weight and autocast keeps the cast until the pass ends.

    A CPU differs twice: normalisation is several operations there and keeps what it normalised
    before it is scaled, 4·T·M more each; and autocast leaves the softmax in bf16, so there is one
    matrix of 2 bytes each instead of two.

    Args:
        precision: "fp32", "tf32" or "bf16" (autocast).
        attention: "naive", "sdpa" or "flash".
        device: "cuda" or "cpu".
    """
    e = 2 if precision == "bf16" else _FP32
    tokens, width, layers = batch * sequence, shape.d_model, shape.num_layers
    scores = batch * shape.num_heads * sequence**2
    of_norm = 2 if device == "cpu" else 1
    if attention == "naive":
        wide = e if device == "cpu" else _FP32
        per_layer = scores * (wide + (e if e != wide else 0)) + sequence**2
    else:
        per_layer = _FP32 * batch * shape.num_heads * sequence
    return {
        "residual stream": (2 * layers + 1) * _FP32 * tokens * (width * of_norm + 1),
        "attention": layers * 5 * e * tokens * width,
        "scores": layers * per_layer,
        "feed-forward": layers * e * tokens * (width + 4 * shape.d_ff),
        "head": e * tokens * width,
        "logits": _FP32 * tokens * (shape.vocab_size + 1),
        "rotary tables": 2 * _FP32 * sequence * (width // shape.num_heads),
        "weights in bf16": 2 * linear_parameters(shape) if e == 2 else 0,
    }


def linear_parameters(shape: ModelConfig) -> int:
    """Elements of all linear layers: four projections, three of the feed-forward part, the head."""
    width = shape.d_model
    return shape.num_layers * width * (4 * width + 3 * shape.d_ff) + shape.vocab_size * width


def peaks(
    shape: ModelConfig,
    batch: int,
    sequence: int,
    *,
    precision: str,
    attention: str,
    training: bool,
    device: str = "cuda",
    second_step: bool = False,
) -> dict[str, int]:
    """Bytes in use at the fullest moment of every phase, from the building of the model on.

    N parameters take 4·N bytes throughout.

    - ``forward`` of a training step is fullest in the loss, when everything is kept: one more
      matrix of logits for the exponentials (4·T·V), and under autocast the bf16 logits.
    - ``forward`` of inference keeps no activation, but under autocast the bf16 weights cast so far.
      It is fullest in the last layer's attention (naive: two matrices of scores in fp32, under
      autocast also one in bf16; the residual stream, the normalised input, query, key, value), in
      the last feed-forward part (three e·T·F, the residual stream, the normalised input), or in the
      loss (two fp32 logits, under autocast also the bf16 ones).
    - ``backward`` lets go of activations while gradients come: what is in use is linear in between,
      so it is fullest at one end. At its beginning: everything kept and two gradients of the
      logits. At its end: the parameters and their gradients, 8·N.
    - ``optimizer``: parameters, gradients, AdamW's two moments, 16·N.

    A second step holds the two moments, 8·N, from its beginning.

    What libraries keep for themselves (cuBLAS: 32 MiB on an H200) is left out.
    """
    kept = sum(
        saved_for_backward(
            shape, batch, sequence, precision=precision, attention=attention, device=device
        ).values()
    )
    half = 2 if precision == "bf16" else 0
    tokens = batch * sequence
    logits = tokens * shape.vocab_size
    parameters = _FP32 * shape.num_parameters
    if training:
        moments = 2 * parameters if second_step else 0
        return {
            "model": parameters,
            "forward": moments + parameters + kept + (_FP32 + half) * logits,
            "backward": moments + max(parameters + kept + 2 * _FP32 * logits, 2 * parameters),
            "optimizer": 4 * parameters,
        }
    scores = batch * shape.num_heads * sequence**2 if attention == "naive" else 0
    e, width = half or _FP32, shape.d_model
    head, feed_forward = shape.vocab_size * width, 3 * width * shape.d_ff
    linear = linear_parameters(shape)
    fullest = max(
        half * (linear - head - feed_forward - width**2)
        + (2 * _FP32 + half) * scores
        + (_FP32 + 4 * e) * tokens * width,
        half * (linear - head) + 3 * e * tokens * shape.d_ff + (_FP32 + e) * tokens * width,
        half * linear + (2 * _FP32 + half) * logits,
    )
    return {"model": parameters, "forward": parameters + fullest}
