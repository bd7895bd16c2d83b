"""What benchmarks and tests share: ranks and links, tasks and trainings, methods, results, tables, faults."""
