"""Exchanges of few numbers and their places."""
