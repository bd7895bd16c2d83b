"""Training recipes that use lightning_compress; run ``python -m recipes.train``."""
