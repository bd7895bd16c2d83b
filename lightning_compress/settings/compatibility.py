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
    if exchange.moves_residual and correction.masks:
        raise ValueError(
            f"exchange={exchange} leaves what ranks sent in the residuals of others, and {given} takes what has left "
            "its own for applied; use exchange='auto', or masking=False"
        )
    for each in methods if correction.replaces_residual else ():
        if not each.conserves or not (each.contractive or each.elementwise):
            raise ValueError(
                f"a rule gives {given} the compressor {each}: its estimates need a method that always comes closer, "
                "such as 'onebit', 'topk' or 'bf16', and this one is right on average only, or leaves nothing behind; "
                "name one of those in the rule, or 'none'"
            )


def check_alone(given: object, exchange: Pattern) -> None:
    """Refuse an exchange under which a corrected method does not see what it needs, or that does its work too.

    Raises:
        ValueError: it does.
    """
    if exchange.plans_collectively:
        raise ValueError(
            f"exchange={exchange} adds up the gradients of a node before they are compressed, and {given} needs to "
            "know what each rank sent; use exchange='auto', or a compressor without momentum of its own"
        )
    if exchange.keeper and exchange.keeper.replaces_optimizer:
        raise ValueError(f"exchange={exchange} and {given} would both do the optimizer's work; use one of them")
