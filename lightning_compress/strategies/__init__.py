"""What ``Trainer(strategy=...)`` takes, and the files beside its checkpoints."""
