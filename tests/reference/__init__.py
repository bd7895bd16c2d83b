"""Slow and obvious versions of the methods, written from their rules and not from the package's code."""
