"""The numbers of a `Topology`, checked where users give them."""

from __future__ import annotations

import itertools
import math
import numbers

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import whole


def bandwidth(given: object) -> float:
    """Bytes per second as a float."""
    complaint = (
        f"`bandwidth` was {shown(given)}; a positive, finite number of bytes per "
        "second was wanted. Give a link of 200 Gbit/s as `bandwidth=25e9`."
    )
    found = _finite(given, complaint)
    if found == 0:
        raise ValueError(complaint)
    return found


def latency(given: object) -> float:
    """Seconds as a float."""
    return _finite(
        given,
        f"`latency` was {shown(given)}; a finite number of seconds, 0 or more, was "
        "wanted. Give 5 microseconds as `latency=5e-6`.",
    )


def messages(given: object) -> tuple[tuple[float, float], ...]:
    """Pairs of bytes and seconds as floats, in ascending order."""
    complaint = (
        f"`messages` was {shown(given)}; pairs of bytes and seconds were wanted, both "
        "ascending, at least two. Give a link as `messages=((1e3, 1e-5), (1e6, 5e-5))`."
    )
    try:
        pairs = [(one, two) for one, two in given]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(complaint) from None
    found = tuple((_finite(x, complaint), _finite(y, complaint)) for x, y in pairs)
    for (size, seconds), (larger, longer) in itertools.pairwise(found):
        if size >= larger or seconds > longer:
            raise ValueError(complaint)
    if len(found) == 1:
        raise ValueError(complaint)
    return found


def spread(given: object, count: int) -> tuple[tuple[float, float], ...]:
    """Pairs of the least and the most seconds of each of `count` messages, or none."""
    complaint = (
        f"`spread` was {shown(given)}; a pair of the least and the most seconds was "
        f"wanted for each of {count} messages. Give `spread=((1e-5, 2e-5), ...)`."
    )
    try:
        pairs = [(one, two) for one, two in given]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(complaint) from None
    found = tuple((_finite(x, complaint), _finite(y, complaint)) for x, y in pairs)
    if len(found) not in (0, count) or any(least > most for least, most in found):
        raise ValueError(complaint)
    return found


def nbytes(given: object) -> float:
    """Bytes as a float."""
    return _finite(
        given,
        f"`nbytes` was {shown(given)}; a finite number of bytes, 0 or more, was "
        "wanted. Give the size of one replica's operand, for an array `x` its "
        "`x.nbytes`.",
    )


def _finite(given: object, complaint: str) -> float:
    """`given` as a float; `complaint` is raised unless it is finite and 0 or more."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(complaint)
    try:
        number = float(given)
    except OverflowError:
        raise ValueError(complaint) from None
    if not 0 <= number < math.inf:
        raise ValueError(complaint)
    return number


def replicas(given: object) -> int:
    """`given` as an int, refused unless it is a whole number of 1 or more."""
    complaint = (
        f"`replicas` was {shown(given)}; a whole number, 1 or more, was wanted. "
        "Give how many replicas take part, for example `replicas=8`."
    )
    found = whole(given)
    if found is None:
        raise TypeError(complaint)
    if found < 1:
        raise ValueError(complaint)
    return found
