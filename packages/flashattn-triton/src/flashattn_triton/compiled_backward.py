"""The backward pass as eight lines of PyTorch, and the same lines compiled.

Recomputing P from the saved logsumexp needs no softmax and no online trick, so this is the whole
of it (assignment, Eq. 13-19; FlashAttention-2, Dao 2023, section 3.1.2):

    D  = rowsum(O ∘ dO)
    S  = Q Kᵀ · scale          Eq. 13
    P  = exp(S - L)            Eq. 14
    dV = Pᵀ dO                 Eq. 15
    dP = dO Vᵀ                 Eq. 16
    dS = P ∘ (dP - D)          Eq. 17
    dQ = dS K · scale          Eq. 18
    dK = dSᵀ Q · scale         Eq. 19

It is the step between autograd of the definition and the tiled kernels: it stores nothing but what
the forward pass saved, but S, P, dP and dS exist in full, N_q × N_k elements in fp32 each, fewer
where the compiler fuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


def flash_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741 - the paper's name
    dO: Tensor,
    L: Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """Eq. 13-19 on whole matrices, in fp32 whatever the dtype of the inputs.

    Args:
        Q: (..., N_q, D); all tensors share the leading dimensions.
        K: (..., N_k, D).
        V: (..., N_k, E).
        O: (..., N_q, E), the output of the forward pass.
        dO: (..., N_q, E), its gradient.
        L: (..., N_q), natural-log logsumexp of the scaled scores, fp32.
        is_causal: query i sees the keys j <= i.
        scale: what Q Kᵀ was multiplied by.

    Returns:
        dQ, dK, dV in the dtypes of Q, K, V.
    """
    q, k, v, do = Q.float(), K.float(), V.float(), dO.float()
    D = (O.float() * do).sum(dim=-1)
    S = q @ k.transpose(-2, -1) * scale
    P = torch.exp(S - L[..., None])
    if is_causal:
        # Masking P, not S, spares the -inf: P is an exact zero wherever the key is hidden.
        visible = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
        P = torch.where(visible, P, 0.0)
    dV = P.transpose(-2, -1) @ do
    dP = do @ v.transpose(-2, -1)
    dS = P * (dP - D[..., None])
    dQ = dS @ k * scale
    dK = dS.transpose(-2, -1) @ q * scale
    return dQ.to(Q.dtype), dK.to(K.dtype), dV.to(V.dtype)


def compiled_flash_backward(*arguments: Any) -> Gradients:
    """:func:`flash_backward` through ``torch.compile``, with the same arguments and results.

    The first call of a process compiles (on a CPU that needs a C++ compiler); later calls with
    other shapes may compile again.
    """
    return _compiled()(*arguments)


@functools.cache
def _compiled() -> Callable[..., Gradients]:
    return torch.compile(flash_backward, fullgraph=True)
