"""Strategies whose replicas have several devices, and what their programs do there."""

import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

COLUMNS = P(None, "core")


def cored(replicas=4, cores=2, **options):
    """So many replicas, each of so many devices."""
    devices = jax.devices()[: replicas * cores]
    return js.MirroredStrategy(devices, logical_axes={"core": cores}, **options)


def over(strategy, array, *spec):
    """`array` on all devices of the strategy, divided as the spec says."""
    return jax.device_put(array, NamedSharding(strategy.mesh, P(*spec)))


def lies(value):
    """How an array, a `PerReplica` or a variable lies, by the axes of the mesh."""
    if isinstance(value, js.PerReplica):
        value = value.stacked
    return value.sharding.spec


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def all_gathers(strategy, step, *args):
    """How many all-gathers the compiled step has."""
    lowered = jax.jit(lambda *args: strategy.run(step, args)).lower(*args)
    text = lowered.compile().as_text()
    return len(re.findall(r" all-gather(?:-start)?\(", text))
