"""Codecs that have a kernel for accelerators, with the settings under which it is compared with a CPU."""

METHODS = [
    {"name": "onebit"},
    {"name": "onebit", "block": 96},
    {"name": "onebit", "block": 64},
    {"name": "onebit", "block": 4096},
    {"name": "efsign"},
    {"name": "efsign", "block": 264},
    {"name": "natural"},
    {"name": "natural", "bucket": 96},
    {"name": "natural", "bucket": 4096},
    {"name": "terngrad"},
    {"name": "terngrad", "clip": None},
    {"name": "terngrad", "clip": 1.3, "packing": "base3"},
    {"name": "bf16"},
    {"name": "fp16"},
]
EXACT = sorted({method["name"] for method in METHODS})
"""What a CPU writes and decodes, these do to the bit."""
