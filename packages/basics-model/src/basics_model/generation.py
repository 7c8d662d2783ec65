"""Sampling from a language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from basics_model.model import TransformerLM
from basics_model.sizes import require_integer


def filter_logits(
    logits: Tensor, *, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Sets the logits of tokens that must not be drawn to -inf.

    Args:
        logits: (..., vocab_size).
        top_k: keep the k highest; all of them if k exceeds the vocabulary.
        top_p: of what is left, keep the fewest most likely tokens whose probabilities sum to at
            least p (nucleus sampling, Holtzman et al., arXiv:1904.09751); always at least one.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: ``top_k`` no integer of at least 1, or ``top_p`` not above 0 and at most 1.
    """
    if top_k is not None:
        require_integer("top_k", top_k, least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, but got {top_p}.")
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -math.inf
    if top_p is not None:
        probabilities = torch.softmax(ordered, dim=-1, dtype=torch.float32)
        # A token goes when the more likely ones before it reach p already.
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered[..., 1:].masked_fill_(before[..., 1:] >= top_p, -math.inf)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues every row of a prompt, one token at a time.

    Each token is drawn from softmax(logits / temperature) over the tokens that ``top_k`` and
    ``top_p`` leave. The model looks back over its configuration's ``context_length`` tokens and
    evaluates that whole window for each new token.

    Args:
        prompt: (batch, seq) int64 on the model's device, with at least one token.
        max_new_tokens: tokens to add at most.
        temperature: 0 takes the most likely token every time.
        stop_token: a row is finished when it draws this token; what follows it in the row is filled
            with the same token, and the function returns once all rows are finished.
        generator: source of randomness on the model's device; torch's default one if None.

    Returns:
        (batch, seq + n) int64 with n ≤ ``max_new_tokens``: the prompt and its continuation.

    Raises:
        ValueError: an empty prompt, a negative number, wrong filters, NaN or inf in the logits.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            "prompt must be (batch, seq) with at least one token, but got shape "
            f"{tuple(prompt.shape)}."
        )
    if not temperature >= 0:  # also refuses NaN
        raise ValueError(f"temperature must be a number of at least 0, but got {temperature}.")
    require_integer("max_new_tokens", max_new_tokens, least=0)
    filter_logits(torch.zeros(1, 1), top_k=top_k, top_p=top_p)  # refuses wrong ones at once
    tokens = prompt
    finished = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.config.context_length :])[:, -1].float()  # [batch, vocab]
        highest = logits.amax(dim=-1, keepdim=True)
        if not bool(highest.isfinite().all()):
            raise ValueError("the model's logits must not be NaN or inf. Check its weights.")
        if temperature == 0:
            drawn = logits.argmax(dim=-1)
        else:
            # The highest becomes 0, so that no temperature, however low, makes it infinite.
            scaled = (logits - highest) / max(temperature, torch.finfo(torch.float32).tiny)
            allowed = filter_logits(scaled, top_k=top_k, top_p=top_p)
            drawn = torch.multinomial(allowed.softmax(-1), 1, generator=generator).squeeze(-1)
        if stop_token is not None:
            drawn = drawn.masked_fill(finished, stop_token)
            finished |= drawn == stop_token
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
        if stop_token is not None and bool(finished.all()):
            break
    return tokens
