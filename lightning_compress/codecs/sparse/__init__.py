"""Few elements of many."""
