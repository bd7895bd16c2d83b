"""Codecs that have a kernel for accelerators, with the settings under which it is compared with a CPU."""

METHODS = [
    {"name": "onebit"},
    {"name": "onebit", "block": 96},
    {"name": "onebit", "block": 64},
    {"name": "onebit", "block": 4096},
    {"name": "efsign"},
    {"name": "efsign", "block": 264},
    {"name": "range_float"},
    {"name": "range_float", "bits": 7, "mantissa": 2, "block": 1032, "rounding": "truncate"},
    {"name": "range_float", "bits": 10, "block": 64, "mantissa": 3},
    {"name": "range_float", "bits": 13, "mantissa": 6},
    {"name": "range_float", "bits": 32, "block": 1024},
    {"name": "natural"},
    {"name": "natural", "bucket": 96},
    {"name": "terngrad"},
    {"name": "terngrad", "clip": None},
    {"name": "terngrad", "clip": 1.3, "packing": "base3"},
    {"name": "bf16"},
    {"name": "fp16"},
    {"name": "topk"},
    {"name": "topk", "scope": "group", "values": "fp16", "density": 0.1},
    {"name": "qsgd"},
    {"name": "qsgd", "bits": 2, "bucket": 96, "norm": "l2"},
    {"name": "qsgd", "bits": 5, "bucket": 200},
    {"name": "rotated"},
    {"name": "rotated", "bits": 5, "block": 64},
    {"name": "rotated", "bits": 8, "block": 1024},
]
TOLERANT = [
    {"name": "fft", "block": 512, "mantissa": 4},
    {"name": "fft", "block": 64, "theta": 0.97, "bits": 4},
    {"name": "fft", "block": 256, "theta": 0.0, "bits": 32, "mantissa": 23},
    {"name": "dct", "block": 128, "bits": 3},
    {"name": "dct", "block": 64, "theta": 0.97, "bits": 16, "mantissa": 7},
]
"""Those whose transforms are rounded otherwise."""
EXACT = sorted({method["name"] for method in METHODS})
"""What a CPU writes and decodes, these do to the bit."""
