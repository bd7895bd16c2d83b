"""Add our config groups to Hydra's search path: ``import lightning_compress_hydra`` above ``@hydra.main``.

This top-level module imports only Hydra. So it does not load PyTorch, and works from a wheel and from an editable
install. Hydra 1.4 finds it by its entry point; the import is then unnecessary but harmless.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

__all__ = ["LightningCompressSearchPathPlugin", "NeedsStrategy"]


class LightningCompressSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://lightning_compress.conf`` after the user's own configs, which can therefore override ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our config groups to ``search_path``."""
        search_path.append(provider="lightning_compress", path="pkg://lightning_compress.conf")


class NeedsStrategy(Callback):
    """Stop a run whose config has a compressor that no strategy takes: it would train in float32 without a word.

    Every file of the group ``compressor`` brings this callback along. Hydra calls it under ``@hydra.main``, and not for
    ``hydra.compose``.
    """

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """End the program with a message, because Hydra turns exceptions of a callback into warnings."""
        node = OmegaConf.to_container(config, resolve=False)
        assert isinstance(node, dict)
        chosen = node.pop("hydra")["runtime"]["choices"].get("compressor")
        if chosen is not None and not any(map(_takes_compressor, _values(node))):
            sys.exit(
                f"ValueError: compressor={chosen} has no effect: no strategy in the config takes it. "
                "Add 'strategy@trainer.strategy: compressed_ddp' to the defaults list, after the trainer; on a command "
                "line, +strategy@trainer.strategy=compressed_ddp. Or leave the compressor out"
            )


def _values(node: object) -> Iterator[tuple[object, object]]:
    """Yield each key or index with its value, of nested mappings and lists."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield key, value
        yield from _values(value)


def _takes_compressor(pair: tuple[object, object]) -> bool:
    """Whether a value refers to the compressor, or names a strategy of ours."""
    key, value = pair
    ours = key == "_target_" and str(value).startswith("lightning_compress.") and str(value).endswith("Strategy")
    return ours or (isinstance(value, str) and "${compressor" in value)


Plugins.instance().register(LightningCompressSearchPathPlugin)
