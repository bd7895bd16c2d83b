"""What ``Trainer(strategy=...)`` takes, and the files beside its checkpoints."""

import lightning.pytorch  # noqa: F401  # before our modules: its import imports them, and would find one half loaded
