"""ResNet in the CIFAR form: He, Zhang, Ren, Sun 2015, "Deep Residual Learning", section 4.2, arXiv:1512.03385."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BasicBlock", "ResNet"]


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
