"""The TPU, or what JAX has instead of one, as a topology of devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstrategy.cluster.resolvers._environment import default_resolver
from jaxstrategy.cluster.resolvers._tpu import TPUClusterResolver
from jaxstrategy.processes import _job
from jaxstrategy.processes._job import Processes
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text import _user_code
from jaxstrategy.text._shown import shown
from jaxstrategy.tpu._tpu_topology import Integers, TPUTopology

_initialized: set[str] = set()
"""The names of TPUs that were initialized."""


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None,
) -> TPUTopology:
    """The topology of the devices of all processes, which meet if they have not yet.

    On any platform: TPUs have the coordinates that JAX tells, other devices lie side
    by side along x. Nothing else happens: JAX has its devices from the beginning, and
    a strategy needs no call of this.

    Args:
      cluster_resolver: by default `TPUClusterResolver()`.

    Raises:
      TypeError: it is another resolver.
      ValueError: its cluster makes no sense, or processes have different numbers of
        devices.
      ClusterError: the processes could not start together.

    Warns:
      RuntimeWarning: this TPU has been initialized before.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> js.tpu.experimental.initialize_tpu_system()
    Topology(mesh_shape=[8, 1, 1, 1], 1 task of 8 devices)
    >>> js.tpu.experimental.shutdown_tpu_system()
    """
    resolver = checked_resolver(cluster_resolver)
    if resolver.tpu in _initialized:
        _user_code.warn(
            f"The TPU system {resolver.tpu!r} has already been initialized. Its "
            "devices, and what is on them, stay as they are; the topology is the same.",
            RuntimeWarning,
        )
    meet(resolver)
    _initialized.add(resolver.tpu)
    return topology_of(resolver.devices())


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Forgets that a TPU was initialized.

    JAX keeps its devices, and what is on them, until the program ends.

    Args:
      cluster_resolver: by default `TPUClusterResolver()`.

    Raises:
      TypeError: it is another resolver.
      ValueError: it is of a TPU on which this does not run.

    Warns:
      RuntimeWarning: this TPU has not been initialized.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> resolver = js.cluster_resolver.TPUClusterResolver("local")
    >>> _ = js.tpu.experimental.initialize_tpu_system(resolver)
    >>> js.tpu.experimental.shutdown_tpu_system(resolver)
    """
    resolver = checked_resolver(cluster_resolver)
    if resolver.tpu not in _initialized:
        _user_code.warn(
            f"The TPU system {resolver.tpu!r} was to be shut down and has not been "
            "initialized.",
            RuntimeWarning,
        )
    _initialized.discard(resolver.tpu)


def checked_resolver(given: object) -> TPUClusterResolver:
    """The resolver that was given; by default of the TPU on which this runs.

    Raises:
      TypeError: it is another resolver.
    """
    if given is None:
        return TPUClusterResolver()
    if not isinstance(given, TPUClusterResolver):
        raise TypeError(
            f"A `TPUClusterResolver` was wanted, or None, got {shown(given)}. With "
            "another resolver use `MultiWorkerMirroredStrategy(resolver)`, or leave "
            "it out: `TF_CONFIG` and what launchers set are found."
        )
    return given


def meet(resolver: TPUClusterResolver) -> Processes | None:
    """The processes of a resolver's cluster, which have met; None for a local TPU.

    Raises:
      ClusterError: they could not start together.
      ValueError: the cluster makes no sense.
    """
    if resolver.is_local:
        return None
    return _job.found(default_resolver(), otherwise=resolver)


def topology_of(devices: Sequence[Device]) -> TPUTopology:
    """The topology of JAX's devices, those of process 0 first.

    Raises:
      ValueError: processes have different numbers of devices.
    """
    tasks = by_task(devices)
    if len({len(task) for task in tasks}) > 1:
        raise ValueError(
            "A topology has as many devices in each process, and these have "
            f"{', '.join(str(len(task)) for task in tasks)}."
        )
    ordered = [device for task in tasks for device in task]
    if all(hasattr(device, "coords") for device in ordered):
        places = _of_tpus(ordered)
    else:
        places = np.asarray([[x, 0, 0, 0] for x in range(len(ordered))])
    return TPUTopology(
        mesh_shape=(places.max(axis=0) + 1).tolist(),
        device_coordinates=places.reshape(len(tasks), -1, 4),
    )


def by_task(devices: Sequence[Device]) -> list[list[Device]]:
    """The devices of each process in the order of their ordinals."""
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    groups = itertools.groupby(ordered, key=lambda d: d.process_index)
    return [list(group) for _, group in groups]


def _of_tpus(devices: Sequence[Any]) -> Integers:
    """The coordinates of TPU cores, from 0 on; slices lie above each other."""
    found = np.asarray([[*d.coords, d.core_on_chip] for d in devices], np.int64)
    found -= found.min(axis=0)
    slices = [getattr(device, "slice_index", 0) or 0 for device in devices]
    height = found[:, 2].max() + 1
    found[:, 2] += height * (np.asarray(slices) - min(slices))
    return found
