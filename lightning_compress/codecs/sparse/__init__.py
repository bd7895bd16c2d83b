"""Codecs that send few elements."""
