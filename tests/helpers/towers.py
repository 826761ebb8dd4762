"""Strategies of 2018, and what their values are on the host."""

import jax
import numpy as np

from jaxstrategy.compat import contrib


def mirrored(n):
    return contrib.MirroredStrategy(jax.devices()[:n])


STRATEGIES = {
    "mirrored-2": lambda: mirrored(2),
    "one-device": lambda: contrib.OneDeviceStrategy("CPU:1"),
}


def unwrapped(d, value):
    """The towers' versions of a value, as lists and numbers."""
    return [np.asarray(version).tolist() for version in d.unwrap(value)]


def in_default(merge_fn, *args):
    """`merge_fn` in the cross-tower context of the default strategy."""
    return contrib.get_tower_context().merge_call(merge_fn, *args)
