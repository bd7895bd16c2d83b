"""A sign an element."""
