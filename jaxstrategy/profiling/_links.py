"""The speed of the replicas' links, by measurement."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._replicas import SPLIT, Replicas
from jaxstrategy.replicas._topology import Topology
from jaxstrategy.tracing._on_replicas import on_replicas

_BYTES = 2**22
_REPEATS = 16
_RUNS = 3


def measured(
    replicas: Replicas, clock: Callable[[], float] = time.perf_counter
) -> Topology:
    """Links with which the formula of a ring gives the measured times of all-reduces.

    Two sizes are reduced, 4 bytes and 4 MiB, a few times in a row within one program.
    With several processes each must call it. Where replicas share devices, the links
    are those of the devices. Where a replica has several devices, all of them send at
    once, and the links are those that each has then.
    """
    # One replica on each device: what a device adds up by itself is not sent.
    devices = dataclasses.replace(replicas, per_device=1)
    n = devices.count
    if n == 1:
        return Topology(bandwidth=1e9, latency=0, replicas=replicas.count)
    small, large = (_seconds(devices, size, clock) for size in (1, _BYTES // 4))
    seconds = max(large - small, 1e-9)
    return Topology(
        bandwidth=2 * (n - 1) / n * _BYTES / seconds,
        latency=small / (2 * (n - 1)),
        replicas=replicas.count,
    )


def _seconds(replicas: Replicas, size: int, clock: Callable[[], float]) -> float:
    """Of one all-reduce of so many numbers."""

    def repeated(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.pmean(x, replicas.collective_axes), None

        return jax.lax.scan(turn, x, length=_REPEATS)[0]

    program = jax.jit(on_replicas(repeated, replicas, [SPLIT], SPLIT))
    ones = np.ones((replicas.count, size), np.float32)
    x = _mesh.place(ones, replicas.sharding(SPLIT))
    jax.block_until_ready(program(x))
    times = []
    for _ in range(_RUNS):
        start = clock()
        jax.block_until_ready(program(x))
        times.append(clock() - start)
    return min(times) / _REPEATS
