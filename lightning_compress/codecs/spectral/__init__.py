"""Codecs that send few coefficients of a transform."""
