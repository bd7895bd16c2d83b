"""Codecs that have a kernel for accelerators, with the settings under which it is compared with a CPU."""

METHODS = [
    {"name": "onebit"},
    {"name": "onebit", "block": 96},
    {"name": "onebit", "block": 64},
    {"name": "onebit", "block": 4096},
    {"name": "efsign"},
    {"name": "efsign", "block": 264},
    {"name": "topk"},
    {"name": "topk", "selection": "sampled", "scope": "group", "values": "fp16", "density": 0.1},
]
EXACT = sorted({method["name"] for method in METHODS})
"""What a CPU writes and decodes, these do to the bit."""
