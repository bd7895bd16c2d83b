"""What everything else is made of: layouts, numbers in two buffers, randomness, memory, counters, errors."""
