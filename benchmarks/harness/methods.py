"""Methods by the names that tables have for them."""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "bf16": {"compressor": "bf16"},
    "range_float 8 bits": {"compressor": {"name": "range_float", "bits": 8}},
    "natural": {"compressor": "natural"},
    "rotated 5 bits": {"compressor": {"name": "rotated", "bits": 5}},
    "rotated 4 bits": {"compressor": {"name": "rotated", "bits": 4}},
    "qsgd 4 bits": {"compressor": {"name": "qsgd", "bits": 4}},
    "qsgd 2 bits": {"compressor": {"name": "qsgd", "bits": 2}},
    "topk 10 %": {"compressor": {"name": "topk", "density": 0.1}},
    "fft 85 %": {"compressor": {"name": "fft", "theta": 0.85}},
    "terngrad": {"compressor": "terngrad"},
    "onebit": {"compressor": "onebit"},
    "onebit, beta 0.02": {"compressor": "onebit", "error_feedback": {"name": "loco", "beta": 0.02}},
    "efsign": {"compressor": "efsign"},
    "powersgd": {"compressor": "powersgd"},
    "topk 1 %": {"compressor": {"name": "topk", "density": 0.01}},
    "topk 1 %, warm-up": {
        "compressor": {"name": "topk", "density": 0.01},
        "schedule": {"density": {0: 0.25, 60: 0.0625, 120: 0.01}},
    },
    "dgc 1 %": {"compressor": {"name": "dgc", "density": 0.01}, "warmup_steps": 20},
    "onebit_adam": {"compressor": "onebit_adam", "warmup_steps": 60},
}
"""Arguments of ``attach`` for methods that are compared with each other in training."""
ONLY = {"dgc 1 %": "sgd", "onebit_adam": "adamw"}
"""Methods that take over a part of one kind of optimizer's work, and refuse others."""
