"""Slow references for integer codes and sparse messages, in plain Python from the papers' rules."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


def omega(number: int) -> str:
    """Elias' omega code, by its recursive rule."""
    code = "0"
    while number > 1:
        code = format(number, "b") + code
        number = len(format(number, "b")) - 1
    return code


def read_omega(bits: str, place: int) -> tuple[int, int]:
    """The number whose omega code begins there, and where the next one begins."""
    number = 1
    while bits[place] == "1":
        number, place = int(bits[place : place + number + 1], 2), place + number + 1
    return number, place + 1


def rice(numbers: list[int], k: int) -> bytes:
    """Golomb-Rice codes, as the module describes them."""
    unary = "".join("0" * (number >> k) + "1" for number in numbers)
    rest = "".join(format(number & (1 << k) - 1, f"0{k}b")[::-1] for number in numbers) if k else ""
    head = b"".join(value.to_bytes(4, "little") for value in (len(numbers), k, len(unary)))
    return head + _bytes(unary) + _bytes(rest)


def read_rice(raw: bytes) -> tuple[list[int], int]:
    """The numbers, and the bytes that they took."""
    count, k, unary = (int.from_bytes(raw[place : place + 4], "little") for place in (0, 4, 8))
    middle = 12 + -(-unary // 8)
    quotients = _bits(raw[12:middle])[:unary].split("1")[:-1]
    rest = _bits(raw[middle : middle + -(-count * k // 8)])
    assert len(quotients) == count
    remainders = [int(rest[i * k : (i + 1) * k][::-1] or "0", 2) for i in range(count)]
    numbers = [(len(quotient) << k) + each for quotient, each in zip(quotients, remainders, strict=True)]
    return numbers, middle + -(-count * k // 8)


def _bytes(bits: str) -> bytes:
    """Packed, the first bit of each byte lowest."""
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def _bits(raw: bytes) -> str:
    return "".join(format(byte, "08b")[::-1] for byte in raw)


def parse_qsgd_elias(message: torch.Tensor, numel: int, bits: int, bucket: int) -> Array:
    """Read a message of QSGD in Elias codes bit by bit, as its docstring describes it."""
    raw, s = bytes(message.tolist()), 2 ** (bits - 1) - 1
    buckets = -(-numel // bucket)
    norms = np.frombuffer(raw[: 4 * buckets], np.float32)
    lengths = np.frombuffer(raw[4 * buckets : 6 * buckets], np.uint16)
    stream = "".join(format(byte, "08b") for byte in raw[6 * buckets :])
    assert len(raw) == 6 * buckets + math.ceil(int(lengths.sum()) / 8)
    out, place = np.zeros(numel, np.float32), 0
    for number in range(buckets):
        element, end = number * bucket - 1, place + int(lengths[number])
        while place < end:
            gap, place = read_omega(stream, place)
            sign = -1 if stream[place] == "1" else 1
            level, place = read_omega(stream, place + 1)
            element += gap
            out[element] = sign * level * (norms[number] / np.float32(s))
        assert place == end
    return out
