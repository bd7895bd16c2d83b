"""Training recipes that use lightning_compress; run ``python -m recipes.train``."""

from recipes.tables.lineage import follow

follow()  # here, since a rank that is still importing must not outlive the process that started it
