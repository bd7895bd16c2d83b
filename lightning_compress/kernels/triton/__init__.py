"""What kernels for accelerators share.

A kernel is one pass over the numbers, which adds the residual, encodes, and writes what stays.

What they write equals, bit for bit, what the kernels for the CPU and the codecs' tensor operations write: products and
sums are rounded one by one (``enable_fp_fusion=False``), and sums over a block are in float64. They never wait for
the device and keep no state, so that a CUDA graph may hold them.
"""
