"""The callback by which ``lightning-compress advise --script`` measures a script.

Lightning calls these functions for every Trainer, in every process, by its entry point ``callbacks_factory``. They
return nothing, and import nothing, unless ``advise`` started the process. So this module stands beside the package,
whose import would load our strategies into programs that do not use them.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["VARIABLE", "callbacks", "callbacks_of_pytorch_lightning"]

VARIABLE = "LIGHTNING_COMPRESS_ADVISE"
"""The environment variable that holds the folder for what was measured; child processes have it too."""


def callbacks() -> list[Any]:
    """Return the callbacks for ``lightning.pytorch``."""
    if VARIABLE not in os.environ:
        return []
    from lightning_compress.callbacks.script import ScriptProfile

    return [ScriptProfile(os.environ[VARIABLE])]


def callbacks_of_pytorch_lightning() -> list[Any]:
    """Return the callbacks for ``pytorch_lightning``, which has its own class tree."""
    if VARIABLE not in os.environ:
        return []
    from lightning_compress.pytorch_lightning import ScriptProfile

    return [ScriptProfile(os.environ[VARIABLE])]
