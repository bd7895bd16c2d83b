"""Parts of ``python -m benchmarks.backward``."""
