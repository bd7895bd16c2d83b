"""What ``Trainer(callbacks=...)`` takes."""
