"""Groups of replicas that reduce among themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text._whole_numbers import several_whole


def near(devices: Sequence[Device]) -> Groups:
    """Replica ids in groups of devices that are close to each other."""
    by_place: dict[object, list[int]] = {}
    for replica, device in enumerate(devices):
        place = device.process_index, getattr(device, "slice_index", 0)
        by_place.setdefault(place, []).append(replica)
    groups = list(by_place.values())
    if len(groups) > 1 and len({len(group) for group in groups}) == 1:
        return tuple(map(tuple, groups))
    n = len(devices)
    count = next(count for count in range(math.isqrt(n), 0, -1) if n % count == 0)
    size = n // count
    return tuple(tuple(range(i, i + size)) for i in range(0, n, size))


def chosen_groups(groups: Sequence[Sequence[int]] | None, replicas: Replicas) -> Groups:
    """`groups`, or if there are none those of near devices.

    Raises:
      ValueError: they are not of these replicas.
    """
    if groups is None:
        return near(replicas.devices)
    return checked_groups(groups, replicas.count)


def checked_groups(groups: Sequence[Sequence[int]], replicas: int) -> Groups:
    """`groups`, which hold each replica once and are of one size.

    Raises:
      ValueError: they do not, or are not.
    """
    found = map(several_whole, groups) if isinstance(groups, Iterable) else [None]
    given = tuple(group or () for group in found)
    members = sorted(member for group in given for member in group)
    if members != list(range(replicas)) or len({len(group) for group in given}) != 1:
        raise ValueError(
            f"`groups` was {groups!r}; groups of one size were wanted in which each "
            f"replica from 0 to {replicas - 1} stands once, such as "
            f"{[list(range(replicas))]}."
        )
    return given
