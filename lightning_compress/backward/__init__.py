"""Methods that act inside of the backward pass."""

from lightning_compress.backward.transform import disable, enable

__all__ = ["disable", "enable"]
