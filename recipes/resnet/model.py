"""ResNets for small images and for ImageNet, and AlexNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "AlexNet", "BasicBlock", "Block", "ImageNetResNet", "ResNet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A).

    Args:
        in_channels: channels of the input.
        channels: channels of the output; where they are more than ``in_channels``, height and width are halved.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.new_channels = channels - in_channels
        self.stride = 2 if self.new_channels else 1
        self.conv1 = nn.Conv2d(in_channels, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', H / stride, W / stride], the sizes rounded up."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.new_channels:  # subsample, and zeros for the channels that are new
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(out + x, inplace=True)


class ResNet(nn.Module):
    """A 3x3 convolution, three stages of n blocks with 16, 32, 64 channels, the mean over pixels, one linear layer.

    The CIFAR form: He, Zhang, Ren, Sun 2015, "Deep Residual Learning", section 4.2, arXiv:1512.03385.

    Convolutions and the linear layer start from He's normal distribution, with variance 2 / fan_in.

    Args:
        depth: layers with weights, 6n + 2 with n at least 1: 20, 32, 56, 110 in the paper (0.27, 0.46, 0.85, 1.7
            million parameters).
        num_classes: classes, at least 2.
        in_channels: channels of the images: 3 for colour, 1 for grey.
        zero_gamma: start the scale of each block's last batch norm at 0, not 1 (Goyal et al. 2017, section 5.1).

    Raises:
        ValueError: ``depth`` is not of that form.
    """

    def __init__(
        self, depth: int = 20, num_classes: int = 10, in_channels: int = 3, *, zero_gamma: bool = False
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise ValueError(f"depth={depth}: must be 6n + 2 with n >= 1, such as 20, 32, 44, 56 or 110")
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
        self.blocks = nn.Sequential(*map(BasicBlock, widths, widths[1:]))
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if isinstance(module, BasicBlock) and zero_gamma:
                nn.init.zeros_(module.bn2.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, in_channels, H, W] -> logits [N, num_classes]."""
        out = F.relu(self.bn(self.conv(x)), inplace=True)
        logits: Tensor = self.fc(self.blocks(out).mean((2, 3)))
        return logits


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

    The ImageNet form: He et al. 2015, table 1, arXiv:1512.03385.

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


LARGE = 64
"""Pixels a side from which images get the first layers of the 224 form."""


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, which hold nearly all parameters; without norms.

    In one tower: Krizhevsky 2014, "One weird trick", arXiv:1404.5997, after Krizhevsky et al., NIPS 2012.

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
