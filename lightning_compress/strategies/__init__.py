"""What ``Trainer(strategy=...)`` takes, and what it keeps beside a checkpoint."""
