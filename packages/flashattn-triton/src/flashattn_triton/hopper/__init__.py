"""The tier for sm_90 (H100, H200): warp-specialised kernels in Gluon, which ships inside Triton.

``eligibility`` says which inputs it takes, and imports no Triton; ``forward_kernel`` and
``backward_kernel`` hold the kernels, and ``preprocess`` the small kernels that run before and after
the backward kernel. ``backward_wide`` and ``backward_256`` hold the backward kernels of heads up to
192 and 256 wide, whose arguments ``wide_launches`` builds. ``forward`` and ``backward`` build those
of the others, and ``configs`` holds tile shapes. Of what kernels call, ``schedule`` says which
tiles they compute, ``products`` and ``backward_products`` start matrix products, and ``scores``
works on scores in registers.
``support`` holds lines of PTX, and ``launch`` the uses of Triton's private interface.
"""
