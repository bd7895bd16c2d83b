"""Add our config groups to Hydra's search path: ``import lightning_compress_hydra`` above ``@hydra.main``.

This top-level module imports only Hydra. So it does not load PyTorch, and works from a wheel and from an editable
install. Hydra 1.4 finds it by its entry point; the import is then unnecessary but harmless.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["LightningCompressSearchPathPlugin"]


class LightningCompressSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://lightning_compress.conf`` after the user's own configs, which can therefore override ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our config groups to ``search_path``."""
        search_path.append(provider="lightning_compress", path="pkg://lightning_compress.conf")


Plugins.instance().register(LightningCompressSearchPathPlugin)
