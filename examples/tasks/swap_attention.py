"""Task: give an attention layer that calls PyTorch's function this repository's kernels.

    python examples/tasks/swap_attention.py

One import changes. The program compares outputs and gradients of both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashattn_triton import flash_attention


class Attention(nn.Module):
    """Causal self-attention of (batch, sequence, width) with four heads."""

    def __init__(self, width: int, *, swapped: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        """Attends and projects."""
        heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()  # (batch, heads, sequence, head_dim)
        if self.swapped:
            y = flash_attention(query, key, value, causal=True)
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return projected


def main() -> None:
    """Compares the layer before and after."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = Attention(64, swapped=False).to(device)
    after = Attention(64, swapped=True).to(device)
    after.load_state_dict(before.state_dict())
    x = torch.randn(2, 100, 64, device=device)
    outputs = [layer(x) for layer in (before, after)]
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(new.grad, old.grad, atol=1e-4, rtol=1e-4)
    print("attention swapped: outputs and gradients agree within 1e-4")


if __name__ == "__main__":
    main()
