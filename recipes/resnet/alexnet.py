"""AlexNet in one tower: Krizhevsky 2014, "One weird trick", arXiv:1404.5997, after Krizhevsky et al., NIPS 2012."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["AlexNet"]

LARGE = 64
"""Pixels a side from which images get the first layers of the 224 form."""


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, which hold nearly all parameters; without norms.

    For images of 64 pixels and more, the published form: 11x11 in steps of 4, then 5x5 and three 3x3, three max-pools
    of 3x3 in steps of 2. For small ones the same channels, the first convolution 3x3 in steps of 2 (of 1 below 32
    pixels), and pools of 2x2. Weights start from He's normal distribution, biases at 0.

    Args:
        num_classes: classes, at least 2.
        in_channels: channels of the images: 3 for colour, 1 for grey.
        image_size: height and width of the images, at least 8.
        hidden: units of the two hidden linear layers: 4,096 in the paper.
        dropout: share of their inputs that is dropped in training, in [0, 1).

    With 1,000 classes of 224 pixels 61.1 million parameters; with ten of 32 pixels 23.5 million.

    Raises:
        ValueError: ``image_size``, ``hidden`` or ``dropout`` is out of its range.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        image_size: int = 224,
        *,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if image_size < 8:
            raise ValueError(f"image_size={image_size}: AlexNet needs images of at least 8 pixels a side")
        if hidden < 1:
            raise ValueError(f"recipe.hidden={hidden}: must be at least 1 (4096 in the paper)")
        if not 0 <= dropout < 1:
            raise ValueError(f"recipe.dropout={dropout}: must be in [0, 1)")
        large = image_size >= LARGE
        first = (11, 4, 2) if large else (3, 2 if image_size >= 32 else 1, 1)
        channels, pool = (in_channels, 64, 192, 384, 256, 256), 3 if large else 2
        shapes = [first, (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)]
        layers: list[nn.Module] = []
        for number, (size, stride, padding) in enumerate(shapes):
            layers += [nn.Conv2d(channels[number], channels[number + 1], size, stride, padding), nn.ReLU(inplace=True)]
            if number in (0, 1, 4):
                layers.append(nn.MaxPool2d(pool, 2))
        self.features = nn.Sequential(*layers)
        with torch.no_grad():
            found = self.features(torch.zeros(1, in_channels, image_size, image_size)).numel()
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(found, hidden), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, in_channels, image_size, image_size] -> logits [N, num_classes]."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
