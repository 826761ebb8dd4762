"""The number of devices that a replica has, or of replicas on a device, as given."""

from __future__ import annotations

from collections.abc import Mapping

from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import whole


def checked_sizes(
    logical_axes: Mapping[str, int] | None, replicas_per_device: int
) -> tuple[dict[str, int], int]:
    """The inner axes by name, and the number of replicas that share a device.

    Raises:
      TypeError: they are no mapping of names to whole numbers, and no whole number.
      ValueError: a number is not positive, a name empty or that of the replicas' axis,
        or a replica has several devices and a device several replicas.
    """
    sizes, sharing = inner_sizes(logical_axes), checked_sharing(replicas_per_device)
    if sizes and sharing > 1:
        raise ValueError(
            f"`logical_axes` was {shown(logical_axes)} and `replicas_per_device` "
            f"{sharing}: a replica has several devices, or a device several replicas. "
            "Give one of the two."
        )
    return sizes, sharing


def inner_sizes(logical_axes: Mapping[str, int] | None) -> dict[str, int]:
    """The sizes of the axes along which the devices of one replica differ, by name.

    Raises:
      TypeError: they are no mapping of names to whole numbers.
      ValueError: a size is not positive, a name empty or that of the replicas' axis.
    """
    if logical_axes is None:
        return {}
    if not isinstance(logical_axes, Mapping):
        raise TypeError(
            f"`logical_axes` was {shown(logical_axes)}; the names of axes and their "
            'sizes were wanted, such as `{"core": 2}`.'
        )
    return {_name(name): _size(name, size) for name, size in logical_axes.items()}


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(
            f"`logical_axes` has {shown(name)} as the name of an axis; a text was "
            "wanted, such as `'core'`."
        )
    if not name:
        raise ValueError(
            "`logical_axes` has an empty text as the name of an axis; a name was "
            "wanted, such as `'core'`."
        )
    if name == mesh.REPLICA_AXIS:
        raise ValueError(
            f"`logical_axes` has an axis {name!r}, which is the name of the axis along "
            "which replicas differ. Give those inside a replica another name."
        )
    return name


def _size(name: str, given: object) -> int:
    size = whole(given)
    if size is None:
        raise TypeError(
            f"`logical_axes` has {shown(given)} as the size of {name!r}; a whole "
            "number was wanted."
        )
    if size < 1:
        raise ValueError(
            f"`logical_axes` has {size} as the size of {name!r}; at least 1 was wanted."
        )
    return size


def checked_sharing(given: int) -> int:
    """The number of replicas that share a device.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is not positive.
    """
    count = whole(given)
    if count is None:
        raise TypeError(
            f"`replicas_per_device` was {shown(given)}; a whole number was wanted."
        )
    if count < 1:
        raise ValueError(f"`replicas_per_device` was {count}; at least 1 was wanted.")
    return count
