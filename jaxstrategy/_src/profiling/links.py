"""The speed of the replicas' links, by measurement."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxstrategy._src.processes import job
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replicas import STACKED, Replicas
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas

# Bytes that are reduced, and how often in a row within one program. Of fewer bytes than
# the first there may be fewer messages: gloo sends none of the parts without elements,
# and takes 105 us for 4 bytes where it takes 170 for 1 to 16 KiB (two processes of one
# host).
# Where sizes are 16 times each other, what lies between is up to 35% off: an all-reduce
# of 1, 4 and 16 MiB takes 0.8, 3.8 and 19.5 ms (the same). Many in a row, because the
# first of a program waits for the others' call and for new memory: with 2 of 8 MiB in a
# row, 4 MiB were predicted to take 60% longer than 16 in a row take.
_SIZES = (
    (4 * 1024, 16),
    (32 * 1024, 16),
    (128 * 1024, 16),
    (512 * 1024, 16),
    (2 * 1024**2, 16),
    (8 * 1024**2, 8),
)
_TURNS = 7


def measured(
    replicas: Replicas, clock: Callable[[], float] = time.perf_counter
) -> Topology:
    """Links with which the formula of a ring gives the measured times of all-reduces.

    Arrays of several sizes are reduced, each a few times in a row within one program.
    Latency and bandwidth are those whose times deviate least, relative to each. With
    several processes each must call it. Where replicas share devices, the links are
    those of the devices. Where a replica has several devices, all of them send at once,
    and the links are those that each has then.
    """
    # One replica on each device: what a device adds up by itself is not sent.
    devices = dataclasses.replace(replicas, per_device=1)
    n = devices.count
    if n == 1:
        return Topology(bandwidth=1e9, latency=0, replicas=replicas.count)
    from scipy import optimize  # late: its import takes a tenth of a second

    turns = _seconds(devices, clock)
    # What is larger takes longer; where it took less, that was chance.
    low, seconds, high = (
        optimize.isotonic_regression(quartile).x
        for quartile in zip(*map(statistics.quantiles, turns), strict=True)
    )
    # The line of which the squares of relative deviations are the least.
    sizes, ones = np.array([nbytes for nbytes, _ in _SIZES]), np.ones(len(_SIZES))
    rows = np.stack([ones, sizes / sizes[-1]], axis=1) / np.c_[seconds]
    fixed, slope = map(float, optimize.nnls(rows, ones)[0])
    per_byte = (slope or 1e-9 * fixed) / float(sizes[-1])
    in_turn = 2 * (n - 1)  # messages
    messages = np.stack([sizes / n, seconds / in_turn], axis=1).tolist()
    spread = (np.stack([low, high], axis=1) / in_turn).tolist()
    return Topology(
        bandwidth=in_turn / n / per_byte,
        latency=fixed / in_turn,
        replicas=replicas.count,
        messages=tuple(map(tuple, messages)),
        spread=tuple(map(tuple, spread)),
    )


def measured_together(replicas: Replicas) -> Topology:
    if all(d.process_index == jax.process_index() for d in replicas.all_devices):
        return measured(replicas)
    with job.exchanging("the speed of the links"):
        return measured(replicas)


def _seconds(replicas: Replicas, clock: Callable[[], float]) -> list[list[float]]:
    programs = []
    for nbytes, times in _SIZES:
        ones = np.ones((replicas.count, nbytes // 4), np.float32)
        x = mesh.place(ones, replicas.sharding(STACKED))
        programs.append((_program(replicas, times), x))
    for program, x in programs:
        jax.block_until_ready(program(x))  # compiles
    found: list[list[float]] = [[] for _ in _SIZES]
    # In turns, so that all sizes are slow while something slows them down.
    for _ in range(_TURNS):
        for (program, x), own, (_, times) in zip(programs, found, _SIZES, strict=True):
            start = clock()
            jax.block_until_ready(program(x))
            own.append((clock() - start) / times)
    return found


# Kept, so that who measures again, because the load has changed, compiles nothing.
@functools.lru_cache(maxsize=16)
def _program(replicas: Replicas, times: int) -> Callable[[jax.Array], jax.Array]:
    """Reduces an array so many times in a row."""

    def repeated(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.pmean(x, replicas.axes), None

        return jax.lax.scan(turn, x, length=times)[0]

    return jax.jit(on_replicas(repeated, replicas, [STACKED], STACKED))
