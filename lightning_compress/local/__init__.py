"""Local steps: ranks train on their own, and average what changed every so often."""
