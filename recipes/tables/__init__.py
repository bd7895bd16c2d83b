"""The tables of docs/results: what runs cost and came to, compared; and sweeps without W&B."""
