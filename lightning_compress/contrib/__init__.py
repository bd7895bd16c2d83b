"""Methods that are here for completeness, which no recipe and no measured table uses, and what few use.

Methods are loaded by name through this package's entry points, like those of any other package; strategies and
callbacks when they are asked for. The core imports them in no other way. They obey the laws, but have no kernels and
no speed target.
"""
