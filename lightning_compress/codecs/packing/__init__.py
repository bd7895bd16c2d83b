"""Bytes of codes, places and values."""
