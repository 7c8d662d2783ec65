"""The tier for sm_90 (H100, H200): warp-specialised kernels in Gluon, which ships inside Triton.

``eligibility`` says which inputs it takes, and imports no Triton; ``forward_kernel`` and
``backward_kernel`` hold the kernels, ``backward_wide`` the backward kernel of heads up to 192 wide,
``key_pass`` and ``query_pass`` those of heads up to 256 wide, ``backward_common`` what backward
kernels share, and ``preprocess`` the small kernels that run before and after them. ``forward`` and
``backward`` build their arguments, and ``configs`` holds tile shapes. Of what kernels call,
``schedule`` says which tiles they compute, ``products`` starts matrix products, and ``scores``
works on scores in registers. ``support`` holds lines of PTX, and ``launch`` compiles and starts
kernels.
"""
