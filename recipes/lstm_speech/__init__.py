"""Bidirectional LSTMs with CTC on spoken digits, or on a folder of one's own recordings."""
