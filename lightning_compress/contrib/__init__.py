"""What stands here for completeness: methods that no recipe and no measured table asks for.

They load by their names through this package's own entry points, as any other package's would; the core never imports
them. They keep the laws, have no kernels, and promise no speed.
"""
