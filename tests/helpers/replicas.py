"""The replica that code runs on, and one value for each replica."""

import collections
import dataclasses
import functools
import typing

import jax
import numpy as np

import jaxstrategy as js


def ids(strategy, start=0.0):
    """`start + i` for replica i."""
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([np.float32(start + i) for i in range(n)])


@functools.cache
def mirrored(n):
    return js.MirroredStrategy(jax.devices()[:n])


def versions(value):
    return [np.asarray(v).tolist() for v in value.values]


def replica():
    return js.get_replica_context()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: typing.Any
    second: typing.Any


Named = collections.namedtuple("Named", "a b")
