"""Put our config groups on Hydra's search path: ``import lightning_compress_hydra`` above ``@hydra.main``.

A top-level module that imports Hydra alone, so that it loads no PyTorch and works from a wheel and an editable install.
Hydra 1.4 finds it by its entry point; there the import is not needed, and does no harm.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["LightningCompressSearchPathPlugin"]


class LightningCompressSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://lightning_compress.conf``, behind the user's own configs, which may so shadow ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our groups to ``search_path``."""
        search_path.append(provider="lightning_compress", path="pkg://lightning_compress.conf")


Plugins.instance().register(LightningCompressSearchPathPlugin)
