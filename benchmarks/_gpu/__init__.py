"""Parts of the benchmarks that are made for a GPU."""
