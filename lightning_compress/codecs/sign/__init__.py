"""Codecs that send one bit per element."""
