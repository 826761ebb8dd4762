"""The replica that code runs on, and one value for each replica."""

import collections
import dataclasses
import typing

import jax
import numpy as np

import jaxstrategy as js


def ids(strategy):
    return strategy.per_replica(
        [float(i) for i in range(strategy.num_replicas_in_sync)]
    )


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
