"""What does not go together is refused, whichever setting of it came first."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_compress.codecs import Codec, Method
from lightning_compress.corrections import Correction
from lightning_compress.exchanges import Pattern, Planner
from lightning_compress.settings.compensation import Compensation


def check_carried(method: Method, exchange: Pattern, way: Compensation) -> None:
    """Refuse a method that the exchange cannot carry, or whose errors cannot be fed back.

    Args:
        method: compresses at some time.
        exchange: carries its messages.
        way: what becomes of its errors.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(method, Codec):
        exchange.check(method)
    elif not isinstance(exchange, Planner):
        raise ValueError(f"exchange={exchange} cannot carry {method}, which exchanges by itself; use exchange='auto'")
    elif way != "none" and not method.conserves:
        raise ValueError(f"error_feedback=True: {method} leaves nothing that could be fed back; set it to null")


def check_corrected(given: object, correction: Correction, exchange: Pattern, methods: Iterable[Method]) -> None:
    """Refuse a corrected method whose exchange or rules take away what it counts on.

    Args:
        given: the method.
        correction: its own.
        exchange: carries the messages.
        methods: of the rules.

    Raises:
        ValueError: they do.
    """
    if exchange.hands_over and correction.masks:
        raise ValueError(
            f"exchange={exchange} leaves what ranks sent in the residuals of others, and {given} takes what has left "
            "its own for applied; use exchange='auto', or masking=False"
        )
    for each in methods if correction.replaces_residual else ():
        if not each.conserves or not (each.contractive or each.elementwise):
            raise ValueError(
                f"a rule gives {given} the compressor {each}: its estimates need a method that always comes closer, "
                "such as 'onebit', 'topk' or 'bf16', and this one is right on average only, or leaves nothing behind; "
                "name one of those in the rule, or exclude=[...] its parameters"
            )


def check_idle(local_clip_norm: float | None, local_clip_by: str, on_drift: str, every: int) -> None:
    """Refuse settings of which nothing would come.

    Args:
        local_clip_norm: see ``CompressedDDPStrategy``.
        local_clip_by: likewise.
        on_drift: likewise.
        every: ``check_drift_every``.

    Raises:
        ValueError: nothing would.
    """
    if local_clip_norm is None and local_clip_by != "parameter":
        raise ValueError(
            f"local_clip_by={local_clip_by!r} says whose norm local_clip_norm is, and there is none; give "
            "local_clip_norm=1.0, or leave local_clip_by out"
        )
    if on_drift != "error" and not every:
        raise ValueError(
            f"on_drift={on_drift!r} and check_drift_every=0: without checks no drift is found; give "
            "check_drift_every=100, or leave on_drift out"
        )
