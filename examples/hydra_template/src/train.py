"""Train as ``src/train.py`` of lightning-hydra-template does; nothing here knows that gradients are compressed.

python src/train.py trainer.devices=2 compressor=topk compressor.density=0.05
"""

from __future__ import annotations

import hydra
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig


def train(cfg: DictConfig) -> Trainer:
    """Build what the config says, and fit it."""
    if cfg.get("seed"):
        seed_everything(cfg.seed, workers=True)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = [hydra.utils.instantiate(each) for each in cfg.callbacks.values()]
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=False)
    trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    return trainer


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    """Hydra's entry point."""
    train(cfg)


if __name__ == "__main__":
    main()
