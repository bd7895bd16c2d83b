"""Code that GPU kernels share.

A kernel is one pass over the vector: it adds the residual, encodes, and writes what was not sent.

Results are bit-identical to those of CPU kernels and tensor operations: products and sums are rounded separately
(``enable_fp_fusion=False``), and sums over a block are in float64. Kernels never wait for the device and keep no state,
so they can be part of a CUDA graph.
"""
