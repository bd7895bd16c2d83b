"""``RayCompressedDDPStrategy`` for Ray Train: ``pip install 'lightning-compress[ray]'``."""

from __future__ import annotations

import os

from lightning_compress.strategies.compressed_ddp import CompressedDDPMixin

try:
    from ray.train.lightning import RayDDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lightning_compress.ray needs Ray Train: pip install 'lightning-compress[ray]'", name=error.name
    ) from error

__all__ = ["RayCompressedDDPStrategy"]


class RayCompressedDDPStrategy(CompressedDDPMixin, RayDDPStrategy):  # type: ignore[misc]  # Ray has no types
    """``lightning_compress.CompressedDDPStrategy`` for a Trainer inside of ``ray.train.torch.TorchTrainer``.

    It takes the same arguments. ``ray.train.lightning.prepare_trainer`` accepts this class and refuses the plain one
    ("Invalid strategy class"). Ray calls the training function on workers that it starts and restarts, so the Trainer
    needs ``devices="auto"`` and ``plugins=[RayLightningEnvironment()]``.

    With ``RayTrainReportCallback``, each rank saves to a folder of its own, on its own machine, and Ray merges these
    folders in its storage. So each rank writes the file of its residual into its own folder.

    Raises:
        ValueError: see ``lightning_compress.CompressedDDPStrategy``.
    """

    def _beside(self, filepath: str) -> str:
        """Return a path in the rank's own folder, with rank 0's name: a name may contain a rank's own metric."""
        folder, name = os.path.split(filepath)
        return os.path.join(folder, str(self.broadcast(name)))
