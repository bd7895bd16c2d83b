"""A few bits an element."""
