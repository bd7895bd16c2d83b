"""ResNet in the ImageNet form: He, Zhang, Ren, Sun 2015, "Deep Residual Learning", table 1, arXiv:1512.03385."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "Block", "ImageNetResNet"]

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of the four stages, by depth; from 50 on blocks are bottlenecks."""
EXPANSION = 4
"""Output channels of a bottleneck over those of its 3x3 convolution."""


class Block(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3, 1x1; a projection where the shape changes (option B).

    Args:
        in_channels: channels of the input.
        channels: channels of the 3x3 convolutions.
        stride: of the first 3x3 convolution (He et al. 2015 have a bottleneck's in its first 1x1; this is Goyal et al.
            2017, section 5.1).
        bottleneck: which of the two forms; a bottleneck has ``4 channels`` at its end.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out_channels = EXPANSION * channels if bottleneck else channels
        shapes = [(in_channels, channels, 3, stride), (channels, channels, 3, 1)]
        if bottleneck:
            shapes = [(in_channels, channels, 1, 1), (channels, channels, 3, stride), (channels, out_channels, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(of, to, size, step, padding=size // 2, bias=False) for of, to, size, step in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(to) for _, to, _, _ in shapes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', H / stride, W / stride], the sizes rounded up."""
        out = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True), 1):
            out = norm(conv(out))
            if number < len(self.convs):
                out = F.relu(out, inplace=True)
        return F.relu(out + self.shortcut(x), inplace=True)


class ImageNetResNet(nn.Module):
    """A 7x7 convolution, four stages of blocks with 64, 128, 256, 512 channels, the mean over pixels, a linear layer.

    Convolutions start from He's normal distribution with variance 2 / fan_out, the linear layer from a normal one with
    deviation 0.01 (Goyal et al. 2017, section 5.1).

    Args:
        depth: 18, 34, 50, 101 or 152 (11.7, 21.8, 25.6, 44.5, 60.2 million parameters with 1,000 classes).
        num_classes: classes, at least 2.
        in_channels: channels of the images: 3 for colour, 1 for grey.
        zero_gamma: start the scale of each block's last batch norm at 0, not 1 (Goyal et al. 2017, section 5.1).

    Raises:
        ValueError: ``depth`` is none of these.
    """

    def __init__(
        self, depth: int = 50, num_classes: int = 1000, in_channels: int = 3, *, zero_gamma: bool = False
    ) -> None:
        super().__init__()
        if depth not in LAYERS:
            raise ValueError(f"depth={depth}: the ImageNet form has {', '.join(map(str, LAYERS))}; or form=cifar")
        bottleneck = depth >= 50
        self.conv = nn.Conv2d(in_channels, 64, 7, 2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(64)
        width, blocks = 64, []
        for stage, count in enumerate(LAYERS[depth]):
            for number in range(count):
                channels, stride = 64 * 2**stage, 2 if stage and not number else 1
                blocks.append(Block(width, channels, stride, bottleneck=bottleneck))
                width = EXPANSION * channels if bottleneck else channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Block) and zero_gamma:
                nn.init.zeros_(module.norms[-1].weight)  # type: ignore[arg-type]
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, in_channels, H, W] -> logits [N, num_classes]."""
        out = F.max_pool2d(F.relu(self.bn(self.conv(x)), inplace=True), 3, 2, padding=1)
        logits: Tensor = self.fc(self.blocks(out).mean((2, 3)))
        return logits
