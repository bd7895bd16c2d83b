"""``check_codec``: check that a method keeps all laws, on one rank and on several ranks that are threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_compress.codecs import CODECS, Codec, Method, Plan
from lightning_compress.exchanges import AllGather, AllReduce, Pattern, SplitGather, TwoShot
from lightning_compress.planning.choose import Auto
from lightning_compress.reducers import REDUCERS, ReducerPlan
from lightning_compress.testing.laws import law, located
from lightning_compress.testing.multi_rank import check_multi_rank, check_noise, check_steps
from lightning_compress.testing.single_rank import Reference, Size, check_single_rank
from lightning_compress.testing.thread_ranks import average_on_ranks, lost


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
    """Check that a method keeps the laws: on one rank, and on thread ranks with every exchange that its flags allow.

    The laws: 1 conservation, 2 size, 3 identity, 4 agreement, 6 state is committed, 7 non-finite values propagate, 8
    fidelity (unbiased or contractive, and other declared properties), 9 any bytes. "Laws" in
    ``lightning-compress docs architecture`` explains them; ``lightning-compress docs extending`` says what this cannot
    find. It takes seconds and needs neither pytest nor a GPU.

    Args:
        codec: a method, with settings that compress a few hundred elements. A reducer is checked on several ranks only.
        ranks: numbers of ranks.
        exchanges: exchanges by a name for messages; None: those that the flags allow.
        lossless: the method with settings that lose nothing, if there are any.
        size: the formula of a message's bytes for a layout; the maximum if the size varies. Without it,
            ``message_size`` is trusted, even if it counts useless bytes.
        reference: a slow version that returns what a float32 vector is decoded to. Only for deterministic methods.
        rounding: the relative error of sums in the message's own dtype, in terms of the largest value; 2^-10 for
            float16.

    Raises:
        ValueError: an argument is invalid.
        AssertionError: a law is broken, or the method raised an error. The message names the law, the place, and
            figures.
    """
    counts = _read_arguments(codec, ranks, exchanges, lossless)
    if isinstance(codec, Codec):
        check_single_rank(codec, size, reference)
    for count in counts:
        for name, exchange in (_allowed(codec) if exchanges is None else exchanges).items():
            where = f"{codec} by {name} on {count} ranks"
            with located(where):
                check_multi_rank(codec, exchange, count, where, rounding)
                if count == counts[0] and (exchanges is not None or not isinstance(codec, Codec)):
                    check_steps(codec, exchange, count, where, rounding)
            if lossless is not None:
                with located(f"{lossless} by {name} on {count} ranks"):
                    error = lost(average_on_ranks(lossless, exchange, count))
                law(3, error <= 1e-6, f"{lossless} by {name} on {count} ranks is off the mean by {error:.2g}")
    if isinstance(codec, Codec) and not codec.contractive and codec.sum_dtype is None:
        with located(f"{codec} on {max(counts)} ranks"):
            check_noise(codec, max(counts))


def _read_arguments(codec: object, ranks: object, exchanges: object, lossless: object) -> list[int]:
    """Return the numbers of ranks.

    Raises:
        ValueError: an argument is invalid.
    """
    for name, given in (("", codec), ("lossless=", lossless)):
        if not isinstance(given, Method) and (not name or given is not None):
            raise ValueError(f"check_codec({name}{_written(given)}): {_instead(given)}")
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


def _written(given: object) -> str:
    return given.__name__ if isinstance(given, type) else repr(given)


def _instead(given: object) -> str:
    """Return what to pass instead of something that is not a method."""
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, type) and issubclass(given, Method):
        return f"give an object, made with its settings: check_codec({given.__name__}())"
    if issubclass(kind, Plan | ReducerPlan):
        return "that is a plan; give the codec or reducer that makes it: check_codec(MyCodec())"
    if isinstance(given, str) and (known := CODECS.find(given) or REDUCERS.find(given)):
        return f"give the method itself: check_codec({known.__name__}()), {known.__name__} from {known.__module__}"
    return "give a codec or a reducer, made with its settings: check_codec(MyCodec())"


def _allowed(method: Method) -> dict[str, Pattern]:
    """Return the exchanges that a method's flags allow."""
    if not isinstance(method, Codec):
        return {"auto": Auto()}
    allowed: dict[str, Pattern] = {"all_gather": AllGather()}
    if method.sum_dtype is not None:
        allowed["all_reduce"] = AllReduce()
    if method.reencodable:
        allowed["two_shot"] = TwoShot()
    if method.sparse:
        allowed["split_gather"] = SplitGather()
    return {**allowed, "auto": Auto()}
