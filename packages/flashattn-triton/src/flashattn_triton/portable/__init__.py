"""The tier for every GPU that Triton compiles for: one kernel and its launcher per file.

``forward`` is FlashAttention-2's Algorithm 1. ``backward`` launches the kernels of Algorithm 2:
``preprocess``, ``key_pass`` and ``query_pass``. ``bias_pass`` computes the gradient of a bias and
``sinks_pass`` the gradient of attention sinks, which the Hopper tier uses too. What these kernels
share is in :mod:`flashattn_triton.primitives` and :mod:`flashattn_triton.launch`, their tile shapes
in :mod:`flashattn_triton.configs`. Nothing is imported here, because it would import Triton.
"""
