"""Numbers of which many are 0, in as few bytes as a list, a bitmap or all of them take; nothing is lost.

    | count, int32 | padding to 16 bytes | indices, int32 [count], or bitmap, or neither | values, float32 |

Which one follows from the count: the least of ``8 count``, ``numel / 8 + 4 count`` and ``4 numel`` bytes. From a 32nd
on a bitmap is shorter than a list, which alone would be best up to a half (SparCML, Renggli et al., SC 2019).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HEADER = 16


def used_bytes(count: float, numel: int) -> float:
    """Bytes of a message of ``count`` of ``numel`` numbers."""
    return HEADER + min(8 * count, _bitmap_bytes(numel) + 4 * count, 4 * numel)


def write(values: Tensor, message: Tensor) -> int:
    """Write what is not 0.

    Args:
        values: float32 ``[numel]``, contiguous.
        message: uint8 ``[16 + 4 numel]`` at least.

    Returns:
        bytes of the message.
    """
    numel, places = len(values), _places(values)
    count, bitmap = len(places), _bitmap_bytes(numel)
    message[:4].view(torch.int32)[0] = count
    used = int(used_bytes(count, numel))
    body = message[HEADER:used]
    if used == HEADER + 4 * numel:
        body.view(torch.float32).copy_(values)
        return used
    if used == HEADER + 8 * count:
        body[: 4 * count].view(torch.int32).copy_(places)
    else:
        bits = torch.zeros(8 * bitmap, dtype=torch.bool, device=values.device)
        bits[places] = True
        packed = np.packbits(bits.cpu().numpy(), bitorder="little")
        body[:bitmap].copy_(torch.from_numpy(packed))
    body[-4 * count :].view(torch.float32).copy_(values[places])
    return used


def read(message: Tensor, out: Tensor) -> None:
    """Write all numbers, zeros too.

    Args:
        message: uint8, as long as ``write`` said or longer.
        out: float32 ``[numel]``, contiguous.

    Raises:
        ValueError: the message is damaged.
    """
    numel, count = len(out), int(message[:4].view(torch.int32)[0])
    if not 0 <= count <= numel or used_bytes(count, numel) > len(message):
        raise ValueError(f"a message says that it has {count} of {numel} numbers; it is damaged")
    used, bitmap = int(used_bytes(count, numel)), _bitmap_bytes(numel)
    body = message[HEADER:used]
    if used == HEADER + 4 * numel:
        out.copy_(body.view(torch.float32))
        return
    if used == HEADER + 8 * count:
        places = body[: 4 * count].view(torch.int32).long()
    else:
        bits = np.unpackbits(body[:bitmap].cpu().numpy(), bitorder="little")
        places = torch.from_numpy(np.flatnonzero(bits)).to(out.device)
    if len(places) != count or (count and not 0 <= int(places.min()) <= int(places.max()) < numel):
        raise ValueError(f"a message names places beyond its {numel} numbers; it is damaged")
    out.zero_()
    out[places] = body[-4 * count :].view(torch.float32) if count else out[:0]


def _bitmap_bytes(numel: int) -> int:
    return -(-numel // 32) * 4


def _places(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # several times as fast as torch's
        return torch.from_numpy(np.flatnonzero(values.numpy()))
    return values.nonzero().flatten()
