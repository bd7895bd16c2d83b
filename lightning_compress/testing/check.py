"""``check_codec``: a method held to all the laws, alone and on ranks that are threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_compress.codecs import CODECS, Codec, Method, Plan
from lightning_compress.exchanges import AllGather, AllReduce, Pattern, SplitGather, TwoShot
from lightning_compress.planning.choose import Auto
from lightning_compress.reducers import REDUCERS, ReducerPlan
from lightning_compress.testing.laws import law, named
from lightning_compress.testing.means import lost, means
from lightning_compress.testing.multi_rank import check_noise, check_steps, check_together
from lightning_compress.testing.single_rank import Reference, Size, check_alone


def check_codec(
    codec: Method,
    *,
    ranks: Iterable[int] = (2, 3),
    exchanges: Mapping[str, Pattern] | None = None,
    lossless: Method | None = None,
    size: Size | None = None,
    reference: Reference | None = None,
    rounding: float = 0.0,
) -> None:
    """Hold a method to the laws: alone, and on ranks that are threads, by every exchange that its flags allow.

    1 conservation, 2 size, 3 identity, 4 one truth, 6 state is committed, 7 bad numbers pass, 8 faithful: unbiased or
    contractive, and what else it declares, 9 any bytes (docs/architecture.md). It takes seconds, and neither pytest nor
    a GPU. docs/extending.md says what it does not see.

    Args:
        codec: with settings under which a few hundred elements are compressed; a reducer is held to what ranks see.
        ranks: numbers of them.
        exchanges: by a name for messages; None: those that the flags allow.
        lossless: settings under which nothing is lost, if there are any.
        size: the formula of a message's bytes, for a layout; the most that it may take if that varies. Without it
            ``message_size`` is believed, useless bytes included.
        reference: a slow version: what a float32 vector is decoded to, for a method that draws nothing at random.
        rounding: what sums in the message's own dtype may lose, relative to the largest value; 2^-10 for float16.

    Raises:
        ValueError: an argument is none of these.
        AssertionError: a law is broken, or the method raised an error: the message says which, where, and the figures.
    """
    counts = _read_arguments(codec, ranks, exchanges, lossless)
    if isinstance(codec, Codec):
        check_alone(codec, size, reference)
    for count in counts:
        for name, exchange in (_allowed(codec) if exchanges is None else exchanges).items():
            where = f"{codec} by {name} on {count} ranks"
            with named(where):
                check_together(codec, exchange, count, where, rounding)
                if count == counts[0] and (exchanges is not None or not isinstance(codec, Codec)):
                    check_steps(codec, exchange, count, where, rounding)
            if lossless is not None:
                with named(f"{lossless} by {name} on {count} ranks"):
                    error = lost(means(lossless, exchange, count))
                law(3, error <= 1e-6, f"{lossless} by {name} on {count} ranks is off the mean by {error:.2g}")
    if isinstance(codec, Codec) and not codec.contractive and codec.sum_dtype is None:
        with named(f"{codec} on {max(counts)} ranks"):
            check_noise(codec, max(counts))


def _read_arguments(codec: object, ranks: object, exchanges: object, lossless: object) -> list[int]:
    """The numbers of ranks.

    Raises:
        ValueError: an argument is none that ``check_codec`` takes.
    """
    for name, given in (("", codec), ("lossless=", lossless)):
        if not isinstance(given, Method) and (not name or given is not None):
            raise ValueError(f"check_codec({name}{_told(given)}): {_instead(given)}")
    counts = list(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else []
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise ValueError(f"check_codec(ranks={ranks!r}): give numbers of ranks, at least one, such as ranks=(2, 3)")
    if exchanges is not None and not (
        isinstance(exchanges, Mapping) and exchanges and all(isinstance(each, Pattern) for each in exchanges.values())
    ):
        raise ValueError(
            f"check_codec(exchanges={exchanges!r}): give exchanges by names of your choice, such as "
            "exchanges={'mine': MyExchange()}"
        )
    return counts


def _told(given: object) -> str:
    return given.__name__ if isinstance(given, type) else repr(given)


def _instead(given: object) -> str:
    """What to give in place of what is no method."""
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, type) and issubclass(given, Method):
        return f"give an object, made with its settings: check_codec({given.__name__}())"
    if issubclass(kind, Plan | ReducerPlan):
        return "that is a plan; give the codec or reducer that makes it: check_codec(MyCodec())"
    if isinstance(given, str) and (known := CODECS.find(given) or REDUCERS.find(given)):
        return f"give the method itself: check_codec({known.__name__}()), {known.__name__} from {known.__module__}"
    return "give a codec or a reducer, made with its settings: check_codec(MyCodec())"


def _allowed(method: Method) -> dict[str, Pattern]:
    """The exchanges that a method's flags allow."""
    if not isinstance(method, Codec):
        return {"auto": Auto()}
    found: dict[str, Pattern] = {"all_gather": AllGather()}
    if method.sum_dtype is not None:
        found["all_reduce"] = AllReduce()
    if method.repeatable:
        found["two_shot"] = TwoShot()
    if method.sparse:
        found["split_gather"] = SplitGather()
    return {**found, "auto": Auto()}
