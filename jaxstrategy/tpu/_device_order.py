"""The order of replicas and of their cores: `DeviceOrderMode`."""

from __future__ import annotations

import enum


class DeviceOrderMode(enum.IntEnum):
    """The order in which replicas, and the cores of each, follow each other.

    AUTO is RING where that is possible and MESH elsewhere. In a RING each chip is
    beside the next one, for sums around rings; MESH counts along the axes.

    >>> import jaxstrategy as js
    >>> [mode.name for mode in js.tpu.experimental.DeviceOrderMode]
    ['AUTO', 'RING', 'MESH']
    """

    AUTO = 0
    RING = 1
    MESH = 2
