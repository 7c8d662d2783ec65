"""The tier for sm_90 (H100, H200): warp-specialised kernels in Gluon, which ships inside Triton.

``eligibility`` says which inputs it takes, and imports no Triton; ``forward`` and ``backward`` hold
the kernels, ``configs`` their shapes, ``support`` what they use of Triton that is not public.
"""
