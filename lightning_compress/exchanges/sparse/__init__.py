"""Exchanges of few numbers and their indices."""
