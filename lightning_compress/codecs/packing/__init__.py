"""Packing of codes, positions and values into bytes."""
