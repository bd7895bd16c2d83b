"""Methods that are here for completeness; no recipe and no measured table uses them.

They are loaded by name through this package's entry points, like those of any other package; the core never imports
them. They obey the laws, but have no kernels and no speed target.
"""
