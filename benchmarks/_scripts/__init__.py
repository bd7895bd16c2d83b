"""Parts of ``benchmarks.scripts``."""
