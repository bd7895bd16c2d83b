"""Parts of ``benchmarks.time_to_target``."""
