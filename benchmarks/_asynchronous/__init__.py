"""Ranks that train without waiting for each other, and what becomes of them."""
