"""The tier for sm_90 (H100, H200): warp-specialised kernels in Gluon, which ships inside Triton.

``eligibility`` says which inputs it takes, and imports no Triton; ``forward_kernel`` and
``backward_kernel`` hold the kernels, ``backward_wide`` and ``backward_256`` the backward kernels of
heads up to 192 and 256 wide, ``backward_common`` what those three share, and ``preprocess`` the
small kernels that run before and after a backward kernel. ``forward`` and ``backward`` build their
arguments, and ``configs`` holds tile shapes. Of what kernels call, ``schedule`` says which tiles
they compute, ``products`` starts matrix products, and ``scores`` works on scores in registers.
``support`` holds lines of PTX, and ``launch`` compiles and starts kernels.
"""
