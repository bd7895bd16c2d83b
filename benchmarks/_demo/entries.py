"""What the demo trains: a recipe is one entry, a compressor one line of it."""

from __future__ import annotations

from typing import NamedTuple

RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
"""As people write them, and as tc does."""


class Entry(NamedTuple):
    """A recipe on its embedded data, at a size that trains in seconds."""

    name: str
    """In the table."""
    overrides: list[str]
    """Of ``python -m recipes.train``."""
    methods: dict[str, list[str]]
    """Overrides by the name in the table; ``dense`` comes first."""


DENSE = {"dense": ["compressor=none"]}
QSGD = {"qsgd 4 bits": ["compressor=qsgd"]}
TOPK = {"topk 1 %": ["compressor=topk", "compressor.density=0.01"]}

ENTRIES = [
    Entry(
        "ResNet-20, digits",
        ["recipe=resnet", "recipe.schedule=linear", "recipe.warmup_epochs=1", "trainer.max_epochs=10"],
        DENSE | QSGD | TOPK,
    ),
    Entry(
        "LSTM, spoken digits",
        ["recipe=lstm_speech", "data.augment=null", "data.batch_size=8", "optimizer.lr=0.2", "trainer.max_epochs=2"],
        DENSE | QSGD | TOPK,
    ),
    Entry(
        "Transformer, numbers",
        ["recipe=nmt", "recipe.beam=1", "trainer.max_epochs=3"],
        DENSE | QSGD,
    ),
]
