"""What benchmarks and tests share: ranks that are started, links of a set speed, models, faults."""
