"""FlashAttention-2, forward and backward, in Triton: exact attention without the S x S matrix."""
