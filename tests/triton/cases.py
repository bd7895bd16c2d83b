"""Codecs that have a kernel for accelerators, with the settings under which it is compared with a CPU."""

METHODS = [
    {"name": "onebit"},
    {"name": "onebit", "block": 96},
    {"name": "onebit", "block": 64},
    {"name": "onebit", "block": 4096},
    {"name": "efsign"},
    {"name": "efsign", "block": 264},
    {"name": "qsgd"},
    {"name": "qsgd", "bits": 2, "bucket": 96, "norm": "l2"},
    {"name": "qsgd", "bits": 5, "bucket": 200},
    {"name": "rotated"},
    {"name": "rotated", "bits": 5, "block": 64},
    {"name": "rotated", "bits": 8, "block": 1024},
]
EXACT = sorted({method["name"] for method in METHODS})
"""What a CPU writes and decodes, these do to the bit."""
