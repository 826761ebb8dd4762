"""Numbers as people read them: three digits and a unit, or a count and a noun."""

from __future__ import annotations

_SI = ("", "k", "M", "G", "T", "P", "E")


def with_bytes(nbytes: float) -> str:
    """A number of bytes, in powers of 1024.

    >>> with_bytes(640), with_bytes(5 * 1024**2)
    ('640 B', '5 MiB')
    """
    power = 0
    while nbytes >= 1000 and power + 1 < len(_SI):
        nbytes, power = nbytes / 1024, power + 1
    unit = f"{_SI[power].upper()}iB" if power else "B"
    return f"{nbytes:.3g} {unit}"


def with_seconds(seconds: float) -> str:
    """A time.

    >>> with_seconds(0.00125), with_seconds(2.5), with_seconds(5400)
    ('1.25 ms', '2.5 s', '1.5 h')
    """
    if seconds >= 999.5:
        hours = seconds / 3600
        return f"{hours:.3g} h" if hours >= 1 else f"{seconds / 60:.3g} min"
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} ns"


def with_prefix(number: float) -> str:
    """A large number, in powers of 1000.

    >>> with_prefix(1_250_000), with_prefix(12)
    ('1.25 M', '12')
    """
    power = 0
    while number >= 999.5 and power + 1 < len(_SI):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {_SI[power]}".rstrip()


def with_noun(count: int, noun: str) -> str:
    """A number of things.

    >>> with_noun(1, "replica"), with_noun(8, "replica"), with_noun(0, "batch")
    ('1 replica', '8 replicas', '0 batches')
    """
    return f"{count} {plural(count, noun)}"


def plural(count: int, noun: str) -> str:
    """`noun` as it follows a number of things.

    >>> plural(1, "process"), plural(2, "process")
    ('process', 'processes')
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return noun if count == 1 else f"{noun}{ending}"
