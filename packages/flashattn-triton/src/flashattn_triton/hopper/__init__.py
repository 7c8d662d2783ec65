"""The tier for sm_90 (H100, H200): warp-specialised kernels in Gluon, which ships inside Triton.

``eligibility`` says which inputs it takes, and imports no Triton; ``forward_kernel`` and
``backward_kernel`` hold the kernels, ``preprocess`` small ones around the second, ``forward`` and
``backward`` their arguments, ``configs`` their shapes; ``support`` holds lines of PTX, ``launch``
what is used of Triton that is not public.
"""
