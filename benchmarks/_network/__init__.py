"""Ranks in network namespaces of their own, joined by links of a set speed."""
