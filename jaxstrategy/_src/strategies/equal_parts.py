"""The division of very many leaves into parts that are alike: `equal_parts`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias

Groups: TypeAlias = list[list[int]]
"""The places of the leaves of each type, in order."""


def equal_parts(types: Sequence[Hashable], most: int) -> list[list[int]]:
    """The places of leaves in parts, of which most have the same types in one order.

    So one program does for all of these, however many there are. Each leaf is in one
    part. The parts follow from the types alone, so that all processes of a job find
    the same.

    Args:
      types: of the leaves.
      most: how many leaves a part may have.

    >>> equal_parts(["weight", "bias"] * 4, most=4)
    [[0, 2, 1, 3], [4, 6, 5, 7]]
    >>> equal_parts(["weight", "bias"] * 4 + ["scale"], most=4)
    [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    """
    found: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(types):
        found.setdefault(kind, []).append(place)
    groups, parts = list(found.values()), []
    while groups:
        alike = _alike(groups, most)
        parts += alike or _in_order(groups, most)
        groups = _left(groups, len(alike)) if alike else []
    return parts


def _alike(groups: Groups, most: int) -> list[list[int]]:
    """Parts with equally many leaves of each type, as few as there can be."""
    count = -(-sum(map(len, groups)) // most)
    shares = [(group, len(group) // count) for group in groups]
    parts = [
        [
            place
            for group, each in shares
            for place in group[at * each : (at + 1) * each]
        ]
        for at in range(count)
    ]
    return parts if parts[0] else []


def _left(groups: Groups, count: int) -> Groups:
    """What so many parts that are alike leave of each type."""
    left = [group[len(group) // count * count :] for group in groups]
    return [group for group in left if group]


def _in_order(groups: Groups, most: int) -> Iterator[list[int]]:
    """Parts of about one size, of types of which there are too few for all."""
    places = [place for group in groups for place in group]
    count = -(-len(places) // most)
    size = -(-len(places) // count)
    return (places[at : at + size] for at in range(0, len(places), size))
