"""Decentralised training: ranks average their parameters with neighbours only. Mathematics alone, no Lightning."""
