"""The tier for every GPU that Triton compiles for: one kernel per file, and its launch.

``forward`` is FlashAttention-2's Algorithm 1. ``backward`` launches the kernels of Algorithm 2:
``preprocess``, ``key_pass`` and ``query_pass``. ``bias_pass`` computes the gradient of a bias, and
``preprocess`` also that of attention sinks, for both tiers. ``launch`` makes their launches, and
has their compile-time options. What these kernels share is in :mod:`flashattn_triton.primitives`,
which says why the Hopper tier's own kernels do not use it.
What both tiers' launches share is in :mod:`flashattn_triton.launch`, and tile shapes are in
:mod:`flashattn_triton.configs`. Nothing is imported here, because it would import Triton.
"""
