"""Exchanges among as many ranks as one likes, on paper."""
