"""Exchanges of sparse vectors."""
