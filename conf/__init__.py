"""Hydra's config tree; its compressor, exchange, strategy and monitor groups ship as ``lightning_compress.conf``."""
