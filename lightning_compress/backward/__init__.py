"""Methods that act inside of the backward pass."""
