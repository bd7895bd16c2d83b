"""Codecs that have a kernel for accelerators, with the settings under which it is compared with a CPU."""

from tests.cases import kernel_settings

METHODS = [given for case, given in kernel_settings("triton") if not case.transforms]
TOLERANT = [given for case, given in kernel_settings("triton") if case.transforms]
"""Those whose transforms are rounded otherwise."""
EXACT = sorted({method["name"] for method in METHODS})
"""What a CPU writes and decodes, these do to the bit."""
